"""The runs of one worker: which stored message is running here, in which state, and what it has produced.

Sans-io.  A run is keyed by the stored stream sequence of its WORK message: a redelivery of a sequence that is held here, in
whatever state, only replaces the ack handle.  An attempt that was started is never started again under another run.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from headrace.broker.messages import Envelope, Finish, HistoryEntry, PrefillDecision, Row, RunRef, Text, TokenLogprob
from headrace.broker.protocol.crashes import ALONE_FROM, suspected
from headrace.jetstream.ports import Delivery


class RunState(Enum):
    """Where a run stands. Everything but `GONE` holds its stored message by in-progress acks."""

    WAITING = "waiting"  # not claimed or started yet
    CLAIMING = "claiming"
    RUNNING = "running"
    LAPSED = "lapsed"  # the lease was lost meanwhile: no frames until the judge says `current`
    ENDED = "ended"  # the last frame is out, its answer is awaited
    MOVING = "moving"  # stopped here, its message is being moved
    GONE = "gone"


_STARTED = frozenset({RunState.CLAIMING, RunState.RUNNING, RunState.LAPSED, RunState.ENDED})


class ChoiceLog:
    """All tokens of one choice, kept until the judge has confirmed the end: whatever it misses is sent again from here."""

    __slots__ = ("fin", "ids", "logprobs", "sent", "settled", "start", "texts")

    def __init__(self, emitted: list[int], *, settled: bool) -> None:
        self.start = len(emitted)  # tokens that an earlier attempt emitted; their text has been sent long ago
        self.ids = list(emitted)
        self.texts: list[Text] = [""] * len(emitted)
        self.logprobs: list[TokenLogprob] | None = None
        self.sent = 0  # while lapsed: tokens that were sent before
        self.settled = settled  # an earlier attempt finished this choice
        self.fin: Finish | None = None


class Run:
    """One execution of one attempt of one request on this worker."""

    __slots__ = (
        "attempt",
        "choices",
        "crashes",
        "delivery",
        "envelope",
        "history",
        "id",
        "judge",
        "prefill",
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
        self.crashes = suspected(history)  # until the judge's own count is known
        self.run = run
        self.ref = RunRef(envelope.id, attempt, run)
        self.delivery = delivery
        self.seq = delivery.stream_seq
        self.state = RunState.WAITING
        self.choices: list[ChoiceLog] = []
        self.resent_s = 0.0
        self.prefill: PrefillDecision | None = None  # what the router has decided, if one has

    @property
    def alone(self) -> bool:
        """In its last life: nothing may run beside it."""
        return self.crashes >= ALONE_FROM

    @property
    def gone(self) -> bool:
        return self.state is RunState.GONE

    @property
    def in_engine(self) -> bool:
        """The engine was given it and has not finished it."""
        return self.state in (RunState.RUNNING, RunState.LAPSED) and not self.complete

    @property
    def resumed(self) -> bool:
        return any(log.start for log in self.choices)

    @property
    def made(self) -> int:
        """Tokens that this run has added to the answer."""
        return sum(len(log.ids) - log.start for log in self.choices)

    def begin(self, emitted: list[list[int]], finished: list[int]) -> None:
        """Open the logs. `emitted` and `finished` are the judge's, empty for a first attempt."""
        self.choices = [
            ChoiceLog(emitted[i] if i < len(emitted) else [], settled=i in finished) for i in range(self.envelope.choices)
        ]

    def append(
        self, choice: int, ids: list[int], texts: list[Text], logprobs: list[TokenLogprob] | None, fin: Finish | None
    ) -> Row:
        """Log what a step produced and return it as a row."""
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
        """Every choice has its end, or one of them ended the whole job with a fault."""
        fault = False
        whole = True
        for log in self.choices:
            if log.fin is None and not log.settled:
                whole = False
            elif log.fin is not None and log.fin.fault is not None:
                fault = True
        return whole or fault

    def rows_since(self, offsets: list[int]) -> list[Row]:
        """Everything after these offsets, one row per choice that has something to say."""
        rows = []
        for choice, log in enumerate(self.choices):
            if log.settled:
                continue
            # What an earlier attempt emitted has no text here; a judge that asks for it is not this run's judge.
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

    def lapse(self) -> None:
        """The lease is lost. What is logged from now on waits for the judge's word."""
        if self.state is not RunState.LAPSED:
            self.state = RunState.LAPSED
            for log in self.choices:
                log.sent = len(log.ids)


class RunTable:
    """All runs of one worker."""

    def __init__(self) -> None:
        self._by_seq: dict[int, Run] = {}
        self._by_id: dict[str, list[Run]] = {}
        self._alone: set[Run] = set()
        self.sequences = 0  # choices of all runs: what they take of the engine's slots

    def __len__(self) -> int:
        return len(self._by_seq)

    def __iter__(self) -> Iterator[Run]:
        return iter(list(self._by_seq.values()))

    def displaced(self, delivery: Delivery) -> Run | None:
        """The run under this sequence, if it is of quite another message: the stream was deleted and made again."""
        run = self._by_seq.get(delivery.stream_seq)
        return run if run is not None and run.delivery.data != delivery.data else None

    def redelivered(self, delivery: Delivery) -> bool:
        """True if this stored message is held here already: only the ack handle is replaced."""
        run = self._by_seq.get(delivery.stream_seq)
        if run is None:
            return False
        run.delivery = delivery
        return True

    def add(self, run: Run) -> None:
        if run.seq in self._by_seq:
            raise ValueError(f"stream sequence {run.seq} has a run already")
        self._by_seq[run.seq] = run
        self.sequences += run.envelope.choices
        self.set_crashes(run, run.crashes)
        self._by_id.setdefault(run.id, []).append(run)

    def of(self, request_id: str) -> list[Run]:
        return list(self._by_id.get(request_id, ()))

    def find(self, ref: RunRef) -> Run | None:
        for run in self._by_id.get(ref.id, ()):
            if run.attempt == ref.attempt and run.run == ref.run:
                return run
        return None

    def remove(self, run: Run) -> bool:
        """Forget a run. False if it was forgotten before."""
        if run.state is RunState.GONE:
            return False
        run.state = RunState.GONE
        del self._by_seq[run.seq]
        self.sequences -= run.envelope.choices
        self._alone.discard(run)
        same = self._by_id[run.id]
        same.remove(run)
        if not same:
            del self._by_id[run.id]
        return True

    def may_start(self, run: Run) -> bool:
        """False while a job in its last life is here, or while this one is in its last life and others run.

        A job in its last life that waits for the others to end holds new ones back: on a busy worker it would wait for ever.
        """
        if not self._alone and not run.alone:
            return True  # nearly always
        for other in self._by_seq.values():
            if other is run:
                continue
            started = other.state in _STARTED
            if (run.alone and started) or (other.alone and (started or (not run.alone and other.state is RunState.WAITING))):
                return False
        return True

    @property
    def any_alone(self) -> bool:
        return bool(self._alone)

    def set_crashes(self, run: Run, crashes: int) -> None:
        """What is known of this job's crashes decides whether it runs alone."""
        run.crashes = crashes
        (self._alone.add if run.alone else self._alone.discard)(run)


class Tombstones:
    """Recently cancelled request ids. Bounded in time and number; a backstop, not a promise."""

    def __init__(self, *, keep_s: float, limit: int = 100_000) -> None:
        self._keep_s = keep_s
        self._limit = limit
        self._until: dict[str, float] = {}

    def add(self, request_id: str, now_s: float) -> None:
        self._until[request_id] = now_s + self._keep_s
        if len(self._until) > self._limit:
            del self._until[next(iter(self._until))]

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._until

    def expire(self, now_s: float) -> None:
        """Forget what is too old. Insertion order is expiry order."""
        for request_id, until in list(self._until.items()):
            if until > now_s:
                break
            del self._until[request_id]
