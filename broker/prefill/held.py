"""A prefill job that a worker has taken: its states with the transitions between them, and what the worker knows of it.

Everything that changes the state of a job stands in this file, and nothing outside it assigns `HeldPrefill.state`; an illegal
transition raises, because the caller has a bug.

    ASKING ──start──> RUNNING ──finish──> TELLING ──accept──> HELD
       │                 │                  ^  ^ │
       └────refuse───────┴────────refuse────┘  └─┘ refuse

    each of these four ──forget──> GONE

* `ASKING`: the payload is fetched, and the decode worker is asked where the job is not fresh.
* `TELLING`: there is an answer, which is on its way to the decode worker.  A worker that leaves replaces it by a refusal.
* `HELD`: the answer was accepted and its message acked.  The engine keeps the blocks until they are fetched or expire.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.broker.messages.prefill import PrefillDone, PrefillJob
from headrace.broker.protocol.transitions import follow
from headrace.jetstream.ports import Delivery


class HeldState(StrEnum):
    """The state of a prefill job. The values are what operators see, behind `prefill_`."""

    ASKING = "asking"
    RUNNING = "running"
    TELLING = "telling"
    HELD = "held"
    GONE = "gone"


TRANSITIONS: dict[HeldState, frozenset[HeldState]] = {
    HeldState.ASKING: frozenset({HeldState.RUNNING, HeldState.TELLING, HeldState.GONE}),
    HeldState.RUNNING: frozenset({HeldState.TELLING, HeldState.GONE}),
    HeldState.TELLING: frozenset({HeldState.TELLING, HeldState.HELD, HeldState.GONE}),
    HeldState.HELD: frozenset({HeldState.GONE}),
    HeldState.GONE: frozenset(),
}


@dataclass(slots=True, eq=False)
class HeldPrefill:
    """A prefill job of this worker. All times are seconds of the event loop's clock."""

    job: PrefillJob
    delivery: Delivery
    state: HeldState = HeldState.ASKING
    started_s: float = 0.0
    kept_until_s: float = 0.0  # the engine keeps the computed blocks until then
    asked_s: float = 0.0  # the last question to the decode worker
    promised_until_s: float = 0.0  # the decode worker was promised the blocks until then, and may be fetching them
    answer: PrefillDone | None = None
    computed: asyncio.Event = field(default_factory=asyncio.Event)  # set once there is an answer, or none will come

    def start(self, now_s: float) -> None:
        """Begin to compute."""
        self.state = follow(TRANSITIONS, self.state, HeldState.RUNNING)
        self.started_s = now_s

    def finish(self, answer: PrefillDone, *, kept_until_s: float) -> None:
        """Take the engine's answer, to be told to the decode worker."""
        self.state = follow(TRANSITIONS, self.state, HeldState.TELLING)
        self.answer = answer
        self.kept_until_s = kept_until_s
        self.computed.set()

    def refuse(self, answer: PrefillDone) -> None:
        """Give up, with a fault to be told to the decode worker."""
        self.state = follow(TRANSITIONS, self.state, HeldState.TELLING)
        self.answer = answer
        self.computed.set()

    def accept(self, now_s: float) -> None:
        """Keep the blocks: the decode worker has taken the answer."""
        self.state = follow(TRANSITIONS, self.state, HeldState.HELD)
        self.asked_s = now_s

    def forget(self) -> None:
        """Leave the worker for good."""
        self.state = follow(TRANSITIONS, self.state, HeldState.GONE)
        self.computed.set()

    @property
    def gone(self) -> bool:
        """The worker has forgotten this job."""
        return self.state is HeldState.GONE
