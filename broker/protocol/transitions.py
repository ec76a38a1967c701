"""Transition tables: which states of a state machine may follow each of its states.

A state machine of this project is an enum, a table of this kind and the methods that use it, all at the head of one file: the
reader sees every transition there, and nothing outside that file assigns the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

S = TypeVar("S", bound=Enum)


class IllegalTransition(RuntimeError):
    """A state may not follow the present one: the caller has a bug. `before` and `after` are the two states."""

    def __init__(self, before: Enum, after: Enum) -> None:
        super().__init__(f"{type(before).__name__}: {before.name} cannot become {after.name}")
        self.before = before
        self.after = after


def follow(table: Mapping[S, frozenset[S]], before: S, after: S) -> S:
    """Return `after` if the table has it behind `before`. Raises IllegalTransition."""
    if after not in table[before]:
        raise IllegalTransition(before, after)
    return after
