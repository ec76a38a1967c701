"""Shows how far a command is: a bar on a terminal, else a line from time to time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import IO, Any, Self

EVERY_S = 10.0  # between two lines


class Progress:
    """The progress over `total` things. Lines come only when something was done, and never more often than `every_s`."""

    def __init__(
        self,
        total: int,
        unit: str,
        *,
        stream: IO[str] | None = None,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._unit = unit
        self._stream = stream if stream is not None else sys.stderr
        self._every_s = every_s
        self._clock = clock
        self._done = 0
        self._began_s = self._said_s = clock()
        self._bar: Any = None
        if self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit=f" {unit}", file=self._stream, leave=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, number: int = 1, **told: object) -> None:
        """Count so many more. `told` is shown beside it."""
        self._done += number
        if self._bar is not None:
            if told:
                self._bar.set_postfix(refresh=False, **told)
            self._bar.update(number)
            return
        now_s = self._clock()
        if now_s - self._said_s < self._every_s or self._done >= self._total:
            return
        self._said_s = now_s
        more = "".join(f", {name} {value}" for name, value in told.items())
        share, took_s = self._done / self._total, now_s - self._began_s
        self._stream.write(f"{self._done:,} of {self._total:,} {self._unit} ({share:.0%}) after {took_s:.0f} s{more}\n")
        self._stream.flush()
