"""Reads numbers from the command lines of the tools."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """Return a number from 1 on. Raises ArgumentTypeError for anything else."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return value


def positive(text: str) -> float:
    """Return a finite number above 0. Raises ArgumentTypeError for anything else."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value
