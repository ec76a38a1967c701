"""Headrace beside other servers and gateways, each in an environment of its own, asked in turns: `headrace bench compare`."""
