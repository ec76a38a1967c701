"""The console of a deployment in a browser: `headrace console`, and a part of `headrace up`."""
