"""Messages between a decode worker, which owns the request, and the prefill worker that computes its prompt.

    decode ── PrefillJob ──▶ hr.prefill.<pool>[.<worker>]  (stream PREFILL, ack awaited)
    decode ◀── PrefillTaken ── prefill        somebody works on it; in the rendezvous style both sides start now
    decode ── PrefillCheck ──▶ prefill        every half second, and right before the parameters are used
    decode ◀── PrefillDone ── prefill         parameters (style params), the end of the transfer (rendezvous), or a fault
    decode ── PrefillDrop ──▶ prefill         nobody wants the blocks (any more)

All but the first are core requests on the control subjects of the two workers; the job itself is acked when the decode worker
has answered PrefillDone, or is gone.  Nothing here decides about the request: its claim is the decode worker's alone.
"""

from __future__ import annotations

from typing import Any, Literal

from headrace.broker.messages import JobFault, Record, Spill, WorkerControl


class PrefillJob(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A prompt to be computed. `job` is the engines' request id on both sides, new for every try.

    The tokens are those of the `Generation` in `payload` (or `spill`), and after them `emitted`.
    """

    job: str
    id: str
    attempt: int
    decode: str  # the worker that owns the request and gets the answers
    deadline: float  # nobody waits for it longer
    created: float
    tokens: int  # in all
    uncached: int  # tokens that a prefill worker without cached prefix has to compute for this
    priority: int = 0
    room: int | None = None  # rendezvous: where both sides meet
    emitted: bytes = b""  # u32 little endian
    block_size: int = 0
    hashes: bytes = b""  # block chain values of the prompt, u64 little endian
    payload: bytes = b""
    spill: Spill | None = None


# -- to the decode worker, answered with PrefillVerdict --------------------------------------------------------


class PrefillTaken(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="prefill_taken"):
    """A prefill worker has begun with it, or is about to. `address`: where its engine is met (rendezvous)."""

    job: str
    worker: str
    address: str = ""


class PrefillDone(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="prefill_done"):
    """The prompt is computed, or is not going to be (`fault`)."""

    job: str
    worker: str
    params: dict[str, Any] | None = None  # opaque, for the decode side's engine
    cached: int = 0  # tokens found in the prefill worker's cache
    computed: int = 0  # … and those it computed
    queued_s: float = 0.0  # from the job's creation until its engine got it
    took_s: float = 0.0  # in its engine
    fault: JobFault | None = None


class PrefillVerdict(Record, frozen=True, omit_defaults=True, kw_only=True):
    """`go`: carry on; after PrefillDone: they are mine to use or to drop. `stale`: nobody waits for this job here."""

    verdict: Literal["go", "stale"]


# -- to the prefill worker -------------------------------------------------------------------------------------


class PrefillCheck(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="prefill_check"):
    """How does this job stand? Answered with PrefillState."""

    job: str


class PrefillState(Record, frozen=True, omit_defaults=True, kw_only=True):
    """`held`: computed, and the engine keeps the blocks for at least `left_s` more seconds."""

    state: Literal["running", "held", "unknown"]
    left_s: float = 0.0


class PrefillDrop(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="prefill_drop"):
    """Stop these jobs and let go of their blocks. Not answered."""

    jobs: list[str]


class SetRole(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="set_role"):
    """Finish the work of the present role and serve this one: aggregated, prefill or decode. Answered with Done."""

    role: str
    grace_s: float | None = None  # then what still runs is handed over


PrefillControl = PrefillTaken | PrefillDone | PrefillCheck | PrefillDrop | SetRole
AnyWorkerControl = WorkerControl | PrefillControl
