"""A run: the states that it passes through, with the transitions between them, and the log of its tokens.

Sans-io.  A run is one execution of one attempt of one request on this worker.  Everything that changes its state stands in
this file, and nothing outside it assigns `Run.state`; an illegal transition raises, because the caller has a bug.

       ┌────────────────start────────────────┐
       │                                     v
    WAITING ──claim──> CLAIMING ──start──> RUNNING ──end──> ENDED
       ^                │ │ │               │   ^             │
       └───wait_again───┘ │ └──end──> ENDED │   │             │
                          │            lapse│   │confirm      │lapse
                          │                 v   │             │
                          └─────lapse─────> LAPSED <──────────┘

    each of these five ──move──> MOVING
    each of these six ──forget──> GONE

* `WAITING` to `RUNNING` is the usual way: a first attempt that was delivered once starts without asking its judge.
* Every other run takes its turn first, as `CLAIMING`: its judge is asked, but for a first attempt that was delivered once, and
  its payload is fetched.  The judge may answer "wait": the job is suspect, and such a run waits until few enough others run on
  the worker (`trial.py`).
* A run ends without having been in the engine when its payload or its adapter is lost.
* `LAPSED`: the lease was lost meanwhile.  The run may still be the current one, so it goes on decoding into its log, but it
  sends nothing until its judge calls it current.  An ended run lapses too: its last frame may never have arrived.
* `MOVING`: the run was stopped here, and its message is being published as the next attempt.  Only the end of that settles it.
* Every state but `GONE` holds the stored message by in-progress acks.

The token path reads `Run.state` as a plain attribute, once per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum
from math import inf
from typing import TypeVar

from headrace.broker.messages.control import HistoryEntry, RunRef
from headrace.broker.messages.frames import Finish, Row, Text, TokenLogprob
from headrace.broker.messages.requests import Envelope, PrefillDecision
from headrace.broker.protocol.quarantine import CLEAR_TOKENS, limit_by_header
from headrace.jetstream.ports import Delivery

# Transition tables: which states of a state machine may follow each of its states.
#
# A state machine of this project is an enum, a table of this kind and the methods that use it, all at the head of one file:
# the reader sees every transition there, and nothing outside that file assigns the state.

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


class RunState(StrEnum):
    """The state of a run. The values are what operators see."""

    WAITING = "waiting"
    CLAIMING = "claiming"
    RUNNING = "running"
    LAPSED = "lapsed"
    ENDED = "ended"
    MOVING = "moving"
    GONE = "gone"


TRANSITIONS: dict[RunState, frozenset[RunState]] = {
    RunState.WAITING: frozenset({RunState.CLAIMING, RunState.RUNNING, RunState.MOVING, RunState.GONE}),
    RunState.CLAIMING: frozenset(
        {RunState.WAITING, RunState.RUNNING, RunState.ENDED, RunState.LAPSED, RunState.MOVING, RunState.GONE}
    ),
    RunState.RUNNING: frozenset({RunState.ENDED, RunState.LAPSED, RunState.MOVING, RunState.GONE}),
    RunState.LAPSED: frozenset({RunState.RUNNING, RunState.MOVING, RunState.GONE}),
    RunState.ENDED: frozenset({RunState.LAPSED, RunState.MOVING, RunState.GONE}),
    RunState.MOVING: frozenset({RunState.GONE}),
    RunState.GONE: frozenset(),
}

BATCH_LATER = 1 << 31  # beyond the priorities that clients can ask for

STARTED = frozenset({RunState.CLAIMING, RunState.RUNNING, RunState.LAPSED, RunState.ENDED})
"""The states of a run that the judge may take for the current one."""


class ChoiceLog:
    """The log of one choice: all its tokens, kept until the judge has confirmed the end, so that any can be sent again."""

    __slots__ = ("fin", "ids", "logprobs", "sent", "settled", "start", "texts")

    def __init__(self, emitted: list[int], *, settled: bool) -> None:
        self.start = len(emitted)  # tokens that an earlier attempt emitted, whose text is not known here
        self.ids = list(emitted)
        self.texts: list[Text] = [""] * self.start
        self.logprobs: list[TokenLogprob] | None = None
        self.sent = 0  # while lapsed: tokens that were sent before the lapse
        self.settled = settled  # an earlier attempt finished this choice
        self.fin: Finish | None = None


class Run:
    __slots__ = (
        "attempt",
        "beside",
        "choices",
        "clear_s",
        "cleared",
        "crashes",
        "delivery",
        "due_s",
        "envelope",
        "history",
        "id",
        "judge",
        "kept",
        "limit",
        "prefill",
        "progress_s",
        "rank",
        "ref",
        "resent_s",
        "run",
        "seq",
        "state",
    )

    def __init__(
        self,
        *,
        envelope: Envelope,
        attempt: int,
        history: list[HistoryEntry],
        run: int,
        delivery: Delivery,
    ) -> None:
        self.id = envelope.id
        self.envelope = envelope
        self.judge = envelope.judge
        self.attempt = attempt
        self.history = history
        self.limit = limit_by_header(history)  # of the group that it may run in, 0 = no suspect; an upper bound of the judge's
        self.crashes = len(history)
        self.cleared = False  # it was suspect, and its judge has cleared it
        self.beside = False  # a suspect that started beside other jobs, as its judge knows
        self.clear_s = 0.0  # after so long its judge may clear it
        self.progress_s: float | None = None  # when it was first seen to have made a token
        self.run = run
        self.ref = RunRef(envelope.id, attempt, run)
        self.delivery = delivery
        self.seq = delivery.stream_seq
        self.state = RunState.WAITING
        self.choices: list[ChoiceLog] = []
        self.resent_s = 0.0
        self.due_s = inf  # its deadline on the loop's clock, which does not jump; set by the caller that reads the wall clock
        self.prefill: PrefillDecision | None = None  # of the router, if it has decided
        self.rank: int | None = None  # data-parallel rank of the engine; None = it has only one
        self.kept = False  # a batch run that makes way for nothing, because it was placed for the share of batch work

    # State transitions. Each raises IllegalTransition if the table does not have it.

    def claim(self, *, beside: bool = False) -> None:
        """Take the turn of this run: it counts as started while its judge is asked and its payload is fetched."""
        self.beside = beside
        self.state = follow(TRANSITIONS, self.state, RunState.CLAIMING)

    def wait_again(self) -> None:
        self.state = follow(TRANSITIONS, self.state, RunState.WAITING)

    def start(self) -> None:
        self.state = follow(TRANSITIONS, self.state, RunState.RUNNING)

    def lapse(self) -> None:
        """Hold back what is logged from now on, because the lease is lost, until the judge calls this run current."""
        self.state = follow(TRANSITIONS, self.state, RunState.LAPSED)
        for log in self.choices:
            log.sent = len(log.ids)

    def confirm(self) -> None:
        self.state = follow(TRANSITIONS, self.state, RunState.RUNNING)

    def end(self, now_s: float) -> None:
        """Wait for the judge's answer: the last frame was sent at `now_s`."""
        self.state = follow(TRANSITIONS, self.state, RunState.ENDED)
        self.resent_s = now_s

    def move(self) -> None:
        self.state = follow(TRANSITIONS, self.state, RunState.MOVING)

    def forget(self) -> None:
        self.state = follow(TRANSITIONS, self.state, RunState.GONE)

    @property
    def gone(self) -> bool:
        return self.state is RunState.GONE

    @property
    def stopping(self) -> bool:
        """True once the run is being moved or was forgotten: nothing may be done with it."""
        return self.state is RunState.MOVING or self.state is RunState.GONE

    @property
    def batch(self) -> bool:
        return self.envelope.request_class == "batch"

    @property
    def yields_place(self) -> bool:
        """The run gets only what interactive work leaves."""
        return self.batch and not self.kept

    @property
    def engine_priority(self) -> int:
        """The priority inside the engine, lower is sooner: batch requests come behind all others."""
        return self.envelope.priority + (BATCH_LATER if self.batch else 0)

    @property
    def suspect(self) -> bool:
        """The job may be the cause of crashes, and is not cleared yet."""
        return self.limit > 0

    @property
    def ahead(self) -> bool:
        """True once every open choice has gone so far beyond what earlier attempts emitted that the judge may clear the job."""
        return all(log.settled or log.fin is not None or len(log.ids) - log.start >= CLEAR_TOKENS for log in self.choices)

    @property
    def in_engine(self) -> bool:
        return self.state in (RunState.RUNNING, RunState.LAPSED) and not self.complete

    @property
    def resumed(self) -> bool:
        for log in self.choices:  # noqa: SIM110  # `any` of a generator takes three times as long, for every run
            if log.start:
                return True
        return False

    @property
    def made(self) -> int:
        made = 0
        for log in self.choices:
            made += len(log.ids) - log.start
        return made

    def begin(self, emitted: list[list[int]], finished: list[int]) -> None:
        """Open the logs. `emitted` and `finished` come from the judge, and are empty for a first attempt."""
        self.choices = [
            ChoiceLog(emitted[i] if i < len(emitted) else [], settled=i in finished) for i in range(self.envelope.choices)
        ]

    def append(
        self, choice: int, ids: list[int], texts: list[Text], logprobs: list[TokenLogprob] | None, fin: Finish | None
    ) -> Row:
        log = self.choices[choice]
        offset = len(log.ids)
        log.ids += ids
        log.texts += texts
        if logprobs is not None:
            if log.logprobs is None:
                log.logprobs = []
            log.logprobs += logprobs
        log.fin = fin
        return Row(self.id, self.attempt, self.run, choice, offset, ids, texts, logprobs, fin)

    @property
    def complete(self) -> bool:
        """True once every choice has ended, or one of them has ended the whole job with a fault."""
        fault = False
        whole = True
        for log in self.choices:
            if log.fin is None and not log.settled:
                whole = False
            elif log.fin is not None and log.fin.fault is not None:
                fault = True
        return whole or fault

    def rows_since(self, offsets: list[int]) -> list[Row]:
        """Return everything after these offsets, one row per choice that has tokens or an end."""
        rows = []
        for choice, log in enumerate(self.choices):
            if log.settled:
                continue
            # Tokens of an earlier attempt have no text here; a judge that asks for them is not this run's judge.
            offset = max(offsets[choice] if choice < len(offsets) else 0, log.start)
            if offset < len(log.ids) or log.fin is not None:
                logprobs = log.logprobs[offset - log.start :] if log.logprobs is not None else None
                rows.append(
                    Row(
                        self.id,
                        self.attempt,
                        self.run,
                        choice,
                        min(offset, len(log.ids)),
                        log.ids[offset:],
                        log.texts[offset:],
                        logprobs,
                        log.fin,
                    )
                )
        return rows
