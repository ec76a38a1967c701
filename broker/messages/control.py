"""Control of an ingress (`hr.ctl.<ingress>`) and of a worker (`hr.ctl.<worker>`, `hr.find.<pool>`)."""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.broker.messages.base import Record
from headrace.broker.messages.frames import JobFault

Verdict = Literal["go", "wait", "stale", "unknown"]


# -- to an ingress, answered ------------------------------------------------------------------------------------


class RunRef(msgspec.Struct, frozen=True, array_like=True):
    """[id, attempt, run]"""

    id: str
    attempt: int
    run: int


class HistoryEntry(msgspec.Struct, frozen=True, array_like=True, order=True):
    """[attempt, worker]: that worker is suspected to have crashed while it had that attempt."""

    attempt: int
    worker: str


class Claim(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="claim"):
    """A worker asks to run an attempt that is not plainly the first; answered with ClaimReply.

    `alone`: nothing else runs on this worker, and nothing will beside it.
    """

    id: str
    attempt: int
    run: int
    worker: str
    history: list[HistoryEntry] = []
    alone: bool = False


class ClaimReply(Record, frozen=True, omit_defaults=True, kw_only=True):
    """`go` carries what has been emitted, so that the run continues exactly there. `wait`: ask again once it is alone."""

    verdict: Verdict
    emitted: list[list[int]] = []  # per choice
    finished: list[int] = []  # choices that have ended already
    crashes: int = 0


class Check(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="check"):
    """Asked by a worker that had lost its lease: are these still mine to run?"""

    worker: str
    runs: list[RunRef]


class CheckReply(Record, frozen=True, omit_defaults=True, kw_only=True):
    """One verdict per run asked about."""

    verdicts: list[Literal["current", "stale", "unknown"]]


class Refuse(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="refuse"):
    """A job is ended without a run (deadline, shed, malformed payload); answered with RefuseReply."""

    id: str
    attempt: int
    fault: JobFault


class RefuseReply(Record, frozen=True, omit_defaults=True, kw_only=True):
    """`done`: this was the one end of the request."""

    verdict: Literal["done", "stale", "unknown"]


class CancelJob(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="cancel_job"):
    """End what an ingress has open under this name, for this tenant. Answered with Done: `ok` when there was something.

    `name` is the id of a job, or what its client called the request.
    """

    name: str
    tenant: str


IngressControl = Claim | Check | Refuse | CancelJob


# -- to a worker, one way unless said ---------------------------------------------------------------------------


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """[id, attempt, run, verdict]: the judge's word on a last frame."""

    id: str
    attempt: int
    run: int
    verdict: Literal["done", "stale", "unknown"]


class Answers(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="answers"):
    """All answers that one frame gave rise to."""

    answers: list[Answer]


class Abort(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="abort"):
    """Stop exactly these runs. Sets no tombstone."""

    runs: list[RunRef]


class SinceItem(msgspec.Struct, frozen=True, array_like=True):
    """[id, offsets]: `offsets[i]` tokens of choice i have arrived."""

    id: str
    offsets: list[int]


class Since(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="since"):
    """Send the tokens after these offsets again, if you have these jobs. Also broadcast on hr.find.<pool>."""

    items: list[SinceItem]


class Drain(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="drain"):
    """Stop claiming, finish or hand over, leave. Answered with Done."""

    grace_s: float | None = None


class Inspect(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="inspect"):
    """Answered with a map of what the component holds: for operators and tests."""


class Ping(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="ping"):
    """Is anybody there? Answered with Done."""


class KvDump(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="kv_dump"):
    """Publish the whole inventory of cached blocks into the KV stream. Answered with Done; at most one dump a second."""


class LoadAdapter(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="load_adapter"):
    """Serve this adapter as well, from now on. `source` is what the worker's engine finds it by: a folder on its machine.

    Answered with Done when it is served.
    """

    name: str
    source: str


class UnloadAdapter(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="unload_adapter"):
    """Take nothing new for this adapter, finish what runs on it, and unload it. Answered with Done when it is gone."""

    name: str
    grace_s: float | None = None  # then what still runs is handed over


WorkerControl = Answers | Abort | Since | Drain | Inspect | Ping | KvDump | LoadAdapter | UnloadAdapter


class Done(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The plain answer to a command."""

    ok: bool = True
    message: str = ""


class Inspection(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The answer to Inspect."""

    component: str
    runs: list[RunRef] = []
    states: dict[str, int] = {}
    lease_held: bool = False
    draining: bool = False
    kv: str = ""  # how publishing cache events goes: "ok", or what is wrong; empty = there are none
