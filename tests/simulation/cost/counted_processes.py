"""Counts the calls of each simulated process: those of functions of Headrace, and what these call directly.

Code of other packages below that is left out, so that the figures follow from this tree and not from what else is installed.
"""

from __future__ import annotations

import cProfile
from collections import Counter
from pathlib import Path
from types import CodeType

import headrace
from tests.simulation.virtual.loop import VirtualLoop

_HOME = str(Path(headrace.__file__).parent)


class CountedProcess:
    """Counts what runs in the loop of one process, between `begin` and `end`."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._profile = cProfile.Profile()
        self._counting = False
        self._run_batch = loop.run_batch
        loop.run_batch = self._counted  # type: ignore[method-assign]

    def begin(self) -> None:
        """Count from the next batch of callbacks on."""
        self._counting = True

    def end(self) -> None:
        """Count no more after this batch of callbacks."""
        self._counting = False

    def _counted(self) -> int:
        if not self._counting:
            return self._run_batch()
        self._profile.enable()
        try:
            return self._run_batch()
        finally:
            self._profile.disable()

    def calls(self) -> Counter[str]:
        """Return the calls so far by module, as in `router/session/intake.py`, each with what the module calls itself."""
        found: Counter[str] = Counter()
        for entry in self._profile.getstats():
            module = _module(entry.code)
            if module:
                found[module] += entry.callcount
                found[module] += sum(called.callcount for called in entry.calls or () if not _module(called.code))
        return found


def _module(code: CodeType | str) -> str:
    """Return the module of Headrace that a function is in, or an empty text."""
    if isinstance(code, str) or not code.co_filename.startswith(_HOME):
        return ""
    return code.co_filename[len(_HOME) + 1 :]
