"""Defines the control messages of an ingress (`hr.ctl.<ingress>`) and of a worker (`hr.ctl.<worker>`, `hr.find.<pool>`)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from headrace.broker.messages.base import (
    MOST_HISTORY,
    Attempt,
    Choice,
    Count,
    Record,
    Run64,
    Seconds,
    Suspect,
    Token,
    Tokens,
)
from headrace.broker.messages.frames import JobFault
from headrace.broker.messages.stories import TellStories

Verdict = Literal["go", "wait", "stale", "unknown"]


# To an ingress, which answers them:


class RunRef(msgspec.Struct, frozen=True, array_like=True):
    """A reference to a run: [id, attempt, run]."""

    id: str
    attempt: Attempt
    run: Run64


class HistoryEntry(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A suspicion, [attempt, worker, group]: the worker may have crashed while it had that attempt. Orders by attempt.

    `group`: the number of jobs that it had then, among which the cause may be; 0 = not known.
    """

    attempt: Attempt
    worker: Suspect
    group: Count = 0


History = Annotated[list[HistoryEntry], msgspec.Meta(max_length=MOST_HISTORY)]


class Claim(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="claim"):
    """A worker's request to run an attempt that may not be the first; answered with ClaimReply.

    `group`: the worker runs at most so many suspects at once, this one included, until this one is cleared; 0 = no limit.
    `beside`: other jobs run there as well.
    """

    id: str
    attempt: Attempt
    run: Run64
    worker: Token
    history: History = []
    group: Count = 0
    beside: bool = False


class ClaimReply(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The judge's answer to a claim.

    `go` carries the tokens emitted so far, so that the run continues exactly there. `wait`: the job is suspect, and the worker
    asks again once it honours the limit.
    """

    verdict: Verdict
    emitted: list[list[Count]] = []  # per choice
    finished: list[Choice] = []  # choices that have ended already
    crashes: Count = 0  # that count against the job
    limit: Count = 0  # the most suspects that may run together with this one; 0 = the job is not suspect
    clear_s: Seconds = 0.0  # the run clears the job when it has gone on for so long, and some tokens further


class SuspicionQuery(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="suspicion"):
    """A question of a router or worker: how suspect is this job, with these entries? It decides nothing. Answer: Suspicion."""

    id: str
    history: History = []


class Suspicion(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The judge's answer to a suspicion query, as in ClaimReply."""

    limit: Count = 0
    crashes: Count = 0


class Check(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="check"):
    """A question of a worker that had lost its lease: are these runs still its own? Answered with CheckReply."""

    worker: Token
    runs: list[RunRef]


class CheckReply(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The judge's answer to a check: a verdict per run, in the order of the question."""

    verdicts: list[Literal["current", "stale", "unknown"]]


class Refuse(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="refuse"):
    """The end of a job without a run (deadline, shed, malformed payload); answered with RefuseReply."""

    id: str
    attempt: Attempt
    fault: JobFault


class RefuseReply(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The judge's answer to a refusal. `done`: the refusal ended the request."""

    verdict: Literal["done", "stale", "unknown"]


class CancelJob(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="cancel_job"):
    """A command to end the tenant's requests of this name at an ingress. Answered with Done: `ok` if there were any.

    `name` is the id of a job, or its client's own name for the request.
    """

    name: str
    tenant: str


class Carrying(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="carrying"):
    """A question of a carrier to another one: does it carry this stored job? Answered with Done: `ok` if it does."""

    job: str  # the id inside Headrace, without the mark of a run
    nonce: str = ""  # the asker's delivery: of two carriers that check the job at once, the one with the higher nonce has it


IngressControl = Claim | SuspicionQuery | Check | Refuse | CancelJob | Carrying | TellStories


# To a worker; one way unless the docstring names an answer:


class RunVerdict(msgspec.Struct, frozen=True, array_like=True):
    """The judge's verdict on the last frame of a run: [id, attempt, run, verdict]."""

    id: str
    attempt: Attempt
    run: Run64
    verdict: Literal["done", "stale", "unknown"]


class Answers(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="answers"):
    """The judge's verdicts on the last frames in one message."""

    answers: list[RunVerdict]


class Abort(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="abort"):
    """A command to stop exactly these runs. It sets no tombstone."""

    runs: list[RunRef]


class SinceItem(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that have arrived of a request, [id, offsets]: `offsets[i]` tokens of choice i."""

    id: str
    offsets: list[Tokens]


class Since(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="since"):
    """A command to send the tokens after these offsets again, for a worker that has the jobs. Also sent on hr.find.<pool>."""

    items: list[SinceItem]


class Drain(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="drain"):
    """A command to stop claiming, finish the runs or hand them over, and leave. Answered with Done."""

    grace_s: Seconds | None = None


class Inspect(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="inspect"):
    """A question for the state of a component, for operators and tests. Answered with Inspection."""


class Ping(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="ping"):
    """A probe whether the process is there. Answered with Done."""


class KvDump(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="kv_dump"):
    """A command to publish the inventory of cached blocks to the KV stream, at most once a second. Answered with Done."""


class LoadAdapter(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="load_adapter"):
    """A command to serve an adapter. `source` is a folder on the worker's machine, from which its engine loads the adapter.

    Answered with Done when the adapter is served.
    """

    name: str
    source: str


class UnloadAdapter(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="unload_adapter"):
    """A command to accept no more jobs for an adapter, finish its runs and unload it. Answered with Done after that."""

    name: str
    grace_s: Seconds | None = None  # after it the runs on the adapter are handed over


WorkerControl = Answers | Abort | Since | Drain | Inspect | Ping | KvDump | LoadAdapter | UnloadAdapter


class Done(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The answer to a command."""

    ok: bool = True
    message: str = ""


class Inspection(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The answer to Inspect."""

    component: str
    runs: list[RunRef] = []
    states: dict[str, int] = {}
    lease_held: bool = False
    draining: bool = False
    kv: str = ""  # state of the cache events: "ok", or the fault; empty = the worker publishes none
