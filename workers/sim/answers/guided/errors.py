"""Exceptions of structured output; `texts` turns both into the worker's typed errors."""

from __future__ import annotations


class Unsupported(Exception):
    """The request has a mistake or asks for a feature that the simulator lacks; the message names it."""


class NoInstance(Exception):
    """No value was found that satisfies the schema; another alternative may have one."""
