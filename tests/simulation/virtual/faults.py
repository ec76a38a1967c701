"""What happens to the processes of a simulated deployment, and how a run of it fails."""

from __future__ import annotations

from dataclasses import dataclass


class ProcessFailed(AssertionError):
    """A simulated process raised, or left an error unhandled."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to whom, when. `length_s` None: one of the usual lengths, by the seed."""

    at_s: float
    kind: str
    who: str = ""
    length_s: float | None = None
