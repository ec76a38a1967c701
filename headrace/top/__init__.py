"""The live view of a deployment in a terminal: `headrace top`."""
