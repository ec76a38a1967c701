"""Describes all workers at one moment, as a decision sees them: plain lists, and the same as arrays on demand.

The choice among a few requests is quicker without arrays (`scalar_choice.py`), among many with them (`array_costs.py`); both
must see the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from headrace.router.placement.disagg.prefill_costs import PrefillView

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.intp]


@dataclass(kw_only=True)
class WorkerView:
    """A value per column. The lists are named `all_…`; the arrays have the same names without that."""

    all_wait_s: list[float]  # until it could begin with one more prompt
    all_pending: list[float]  # prompt tokens before that
    all_token_s: list[float]  # seconds per uncached token, with the decodes of the steps it fills
    all_step_s: list[float]  # seconds of a step beside its prefill
    all_room: list[bool]
    all_blocks_free: list[float]
    all_running: list[int]
    all_unevenness: list[float]
    all_disturbed: list[float]  # loss of the running requests, in parts of the service
    prefill: PrefillView | None = None  # None: every prompt is computed where it is answered

    @cached_property
    def wait_s(self) -> Floats:
        return np.array(self.all_wait_s)

    @cached_property
    def pending(self) -> Floats:
        return np.array(self.all_pending)

    @cached_property
    def token_s(self) -> Floats:
        return np.array(self.all_token_s)

    @cached_property
    def step_s(self) -> Floats:
        return np.array(self.all_step_s)

    @cached_property
    def room(self) -> Bools:
        return np.array(self.all_room, dtype=np.bool_)

    @cached_property
    def blocks_free(self) -> Floats:
        return np.array(self.all_blocks_free)

    @cached_property
    def unevenness(self) -> Floats:
        return np.array(self.all_unevenness)

    @cached_property
    def disturbed(self) -> Floats:
        return np.array(self.all_disturbed)

    def close(self, column: int) -> None:
        """Give this worker nothing in this decision."""
        self.all_room[column] = False
        self.__dict__.pop("room", None)
