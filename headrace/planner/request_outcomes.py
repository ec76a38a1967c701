"""Derives from the events of requests how long their first tokens took, and the time between two tokens.

Times are those at which events were heard. How long a request waited before it was placed is told by the routers' records
alone: without routers its time begins when it is placed. Of one whose beginning was not heard nothing is derived.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from headrace.broker.messages import JobEvent
from headrace.planner.observation import OutcomeSight

MOST = 20_000  # requests of a queue that are followed at once, and that end between two looks


@dataclass(slots=True)
class _Followed:
    placed_s: float
    waited_s: float = 0.0
    first_s: float | None = None  # when its prompt was computed
    worker: str = ""  # that ended it


class RequestOutcomes:
    """The open requests of a queue, and those that have ended since the last look."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, _Followed] = OrderedDict()
        self._ended: dict[str, tuple[_Followed, float]] = {}  # and the mean time between its tokens

    def on_event(self, event: JobEvent, now: float) -> None:
        """Note an event. A request that moves is followed on: what it lost by that is part of its times."""
        if event.kind == "placed":
            if event.attempt == 1 and event.id not in self._open:
                self._open[event.id] = _Followed(now)
                if len(self._open) > MOST:
                    self._open.popitem(last=False)
        elif event.kind == "prefilled":
            followed = self._open.get(event.id)
            if followed is not None and followed.first_s is None:
                followed.first_s = now
        elif event.kind == "settled":
            followed = self._open.pop(event.id, None)
            if followed is not None and followed.first_s is not None and len(self._ended) < MOST:
                followed.worker = event.worker
                self._ended[event.id] = followed, (now - followed.first_s) / max(1, event.tokens - 1)

    def waited(self, request_id: str, seconds: float) -> None:
        """Note how long a request had waited when it was placed."""
        if request_id in self._open:
            self._open[request_id].waited_s = seconds
        elif request_id in self._ended:
            self._ended[request_id][0].waited_s = seconds

    def take(self) -> list[tuple[str, OutcomeSight]]:
        """Return what has ended since the last look, with the workers that ended it."""
        ended, self._ended = self._ended, {}
        return [
            (one.worker, OutcomeSight(ttft_s=max(0.0, one.first_s - one.placed_s) + one.waited_s, itl_s=max(0.0, itl_s)))
            for one, itl_s in ended.values()
            if one.first_s is not None
        ]
