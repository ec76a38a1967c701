"""What goes wrong inside structured output; `texts` turns both into the worker's typed errors."""

from __future__ import annotations


class Unsupported(Exception):
    """Something in the request is wrong, or known and not done here; the message names it."""


class NoInstance(Exception):
    """Nothing was found that satisfies this; another alternative may have something."""
