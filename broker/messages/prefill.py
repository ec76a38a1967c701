"""Defines the messages between a decode worker, which owns the request, and the worker that prefills its prompt.

    decode ── PrefillJob ──▶ hr.prefill.<pool>[.<worker>]  (stream PREFILL, ack awaited)
    decode ◀── PrefillTaken ── prefill        a prefill worker has taken the job; in the rendezvous style both sides start now
    decode ── PrefillCheck ──▶ prefill        every half second, and right before the parameters are used
    decode ◀── PrefillDone ── prefill         parameters (style params), the end of the transfer (rendezvous), or a fault
    decode ── PrefillDrop ──▶ prefill         the blocks are not needed, or no longer

All but the first are core requests on the control subjects of the two workers; the job itself is acked when the decode worker
has answered PrefillDone, or is gone.  No message here decides about the request, which only the decode worker has claimed.
"""

from __future__ import annotations

from typing import Any, Literal

from headrace.broker.messages.control import WorkerControl
from headrace.broker.messages.frames import JobFault
from headrace.broker.messages.requests import (
    Attempt,
    EncodeMedia,
    JobId,
    Rank,
    Record,
    Run64,
    Seconds,
    Small,
    Spill,
    Token,
    Tokens,
    UnixTime,
)


class PrefillJob(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A prompt to prefill. `job` is the engines' request id on both sides, new for every try.

    The tokens are those of the `Generation` in `payload` (or `spill`), and after them `emitted`.
    """

    job: JobId
    id: JobId
    attempt: Attempt
    decode: Token  # the worker that owns the request and receives the answers
    deadline: UnixTime  # the decode worker waits until then
    created: UnixTime
    tokens: Tokens  # tokens in all
    uncached: Tokens  # tokens that a prefill worker without a cached prefix has to compute
    priority: Small = 0
    room: Run64 | None = None  # rendezvous: the number under which both sides meet
    emitted: bytes = b""  # u32 little endian
    block_size: Tokens = 0
    hashes: bytes = b""  # block chain values of the prompt, u64 little endian
    payload: bytes = b""
    spill: Spill | None = None
    rank: Rank | None = None  # data-parallel rank of the prefill worker; None = its engine chooses
    prefix: dict[str, Any] | None = None  # opaque parameters of a prefix that the decode worker's engine lends


# To the decode worker, which answers with PrefillVerdict:


class PrefillTaken(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="prefill_taken"):
    """The notice that a prefill worker starts a job. `address`: the address of its engine (rendezvous)."""

    job: str
    worker: Token
    address: str = ""


class PrefillDone(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="prefill_done"):
    """The end of a prefill job: the prompt is prefilled, or has failed (`fault`)."""

    job: str
    worker: Token
    params: dict[str, Any] | None = None  # opaque transfer parameters for the decode worker's engine
    cached: Tokens = 0  # tokens found in the prefill worker's cache
    computed: Tokens = 0  # tokens that it computed
    read: Tokens = 0  # tokens that it read from the decode worker's engine
    queued_s: Seconds = 0.0  # time from the job's creation until the engine received it
    took_s: Seconds = 0.0  # time in the engine
    fault: JobFault | None = None


class PrefillVerdict(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The decode worker's answer. `go`: continue; after PrefillDone: the blocks are the decode worker's, to use or to drop.

    `stale`: the decode worker does not wait for this job.
    """

    verdict: Literal["go", "stale"]


# To the prefill worker:


class PrefillCheck(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="prefill_check"):
    """A question for the state of a job. Answered with PrefillState."""

    job: str


class PrefillState(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The state of a job. `held`: it is computed, and the engine keeps the blocks for at least `left_s` more seconds."""

    state: Literal["running", "held", "unknown"]
    left_s: Seconds = 0.0


class PrefillDrop(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="prefill_drop"):
    """A command to stop these jobs and release their blocks. Not answered."""

    jobs: list[str]


class SetRole(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="set_role"):
    """A command to finish the work of the present role and take this one: aggregated, prefill or decode. Answered with Done."""

    role: str
    grace_s: Seconds | None = None  # after it the remaining runs are handed over


PrefillControl = PrefillTaken | PrefillDone | PrefillCheck | PrefillDrop | SetRole
AnyWorkerControl = WorkerControl | PrefillControl | EncodeMedia
