"""Measures SGLang's load from the snapshots that its schedulers keep in shared memory, and from the steps that it reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from headrace.workers.engine import Load


class LoadMeter:
    """Turns snapshots of all data-parallel ranks into one `Load`."""

    def __init__(self, *, page_size: int, blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._page_size = page_size
        self._blocks = blocks
        self._clock = clock
        self._last: float | None = None
        self._prefilled = 0
        self._step = Load()

    def stepped(self, snapshots: Iterable[Any], *, decodes: int, mine: int) -> Load:
        """Return the load after a step that brought tokens for `decodes` sequences. `mine` sequences are in the engine.

        The time between two steps of a busy engine is the duration of a step.
        """
        now = self._clock()
        step_s = now - self._last if self._last is not None else 0.0
        self._last = now if mine else None
        known = list(snapshots)
        prefilled = sum(snapshot.total_prefill_uncached_tokens for snapshot in known)
        self._step = Load(step_s=step_s, step_decodes=decodes, step_prefill_tokens=max(0, prefilled - self._prefilled))
        self._prefilled = prefilled
        return self.read(known, mine=mine)

    def read(self, snapshots: Iterable[Any], *, mine: int) -> Load:
        """Return the load now. The snapshots of an engine without sequences are stale: it has no step to write them in."""
        if mine == 0:
            self._last = None
            return Load(blocks_total=self._blocks)
        known = list(snapshots)
        running = min(mine, sum(snapshot.num_running_reqs for snapshot in known))
        tokens = sum(snapshot.num_used_tokens for snapshot in known)
        return Load(
            running=running,
            waiting=max(mine - running, sum(snapshot.num_waiting_reqs for snapshot in known)),
            blocks_used=min(self._blocks, -(-tokens // self._page_size)),
            blocks_total=self._blocks,
            queued_prefill_tokens=sum(snapshot.num_waiting_uncached_tokens for snapshot in known),
            step_s=self._step.step_s,
            step_prefill_tokens=self._step.step_prefill_tokens,
            step_decodes=self._step.step_decodes,
            ranks=self._of_ranks(known) if len(known) > 1 else (),
        )

    def _of_ranks(self, known: Sequence[Any]) -> tuple[Load, ...]:
        """Return the load of each data-parallel rank. The last step is known of all together and is shared out evenly."""
        blocks = self._blocks // len(known)
        return tuple(
            Load(
                running=snapshot.num_running_reqs,
                waiting=snapshot.num_waiting_reqs,
                blocks_used=min(blocks, -(-snapshot.num_used_tokens // self._page_size)),
                blocks_total=blocks,
                queued_prefill_tokens=snapshot.num_waiting_uncached_tokens,
                step_s=self._step.step_s,
                step_prefill_tokens=self._step.step_prefill_tokens // len(known),
                step_decodes=self._step.step_decodes // len(known),
            )
            for snapshot in known
        )
