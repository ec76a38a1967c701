"""Defines an attempt of an attacker: who, what, how it ends, which tests make it, and what to take out to see them fail."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """A remedy, or a part of it, taken out of a file. `old` stands there once."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt. `who` is a letter of the threat model, `without` says what the cuts take out.

    `tests` are named as pytest names them, below `tests/`. Without the remedy each of them fails.
    """

    finding: str
    who: str
    tries: str
    result: str
    tests: tuple[str, ...]
    without: str
    cuts: tuple[Cut, ...]
