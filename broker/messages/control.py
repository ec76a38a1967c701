"""Defines the control messages of an ingress (`hr.ctl.<ingress>`) and of a worker (`hr.ctl.<worker>`, `hr.find.<pool>`)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headrace.broker.messages.events import EventKind
from headrace.broker.messages.frames import JobFault
from headrace.broker.messages.requests import (
    MOST_HISTORY,
    Attempt,
    Choice,
    Choices,
    Count,
    Finite,
    Name,
    PrefillDecision,
    Rank,
    Record,
    Run64,
    Seconds,
    Suspect,
    Token,
    Tokens,
    UnixTime,
)

# Defines what an ingress tells about the requests that it has accepted, for `headrace trace`.

MOST_EVENTS = 1024  # of one story: more are counted only
MOST_STORIES = 16  # in one answer


class StoryEvent(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A job event as its ingress heard it: [after_s, kind, attempt, worker, tokens, uncached, by, prefill, rank, fetch_ms].

    `after_s`: since the submission. The other fields are those of the job event.
    """

    after_s: Seconds
    kind: EventKind
    attempt: Attempt
    worker: Name
    tokens: Tokens = 0
    uncached: Tokens = 0
    by: Name = ""
    prefill: Name = ""
    rank: Rank | None = None
    fetch_ms: Count = 0


class Story(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A request from its submission to its end. `ended_s` is None while it is open; durations count from the submission.

    `finish`: the reasons why its choices ended, each once. `fault` and `message`: the error that ended it, if one did.
    `lost_events`: events beyond those that are kept.
    """

    id: Name
    ingress: Name
    pool: Name
    model: Name
    tenant: Name
    request_class: Name
    submitted: UnixTime
    prompt_tokens: Tokens
    max_tokens: Tokens = 0
    deadline_s: Seconds = 0.0
    choices: Choices = 1
    adapter: Name = ""
    name: Name = ""  # the client's own name for the request
    events: Annotated[list[StoryEvent], Meta(max_length=MOST_EVENTS)] = []
    lost_events: Count = 0
    answer_tokens: Tokens = 0
    ended_s: Seconds | None = None
    finish: Annotated[list[Name], Meta(max_length=64)] = []
    fault: Name = ""
    message: Name = ""


class TellStories(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="tell_stories"):
    """A question to an ingress for the timelines of the requests with this id, or client's name. Answered with Stories."""

    name: Name


class Stories(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The last requests of that name at an ingress, oldest first; empty if it remembers none."""

    stories: Annotated[list[Story], Meta(max_length=MOST_STORIES)] = []


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
    nonce: str = ""  # the asker's delivery: of two that check the job at once, the one with the higher nonce has it; or of none


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


# Defines records of placements (hr.route.<pool>, stream ROUTE) and a router's explanation of one (`hr.ctl.<router>`).


class Routed(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A placement, recorded so that it can be replayed under another policy (`headrace replay placements`)."""

    at: float  # time of the placement
    id: str
    attempt: int = 1
    router: str = ""
    worker: str
    reason: str = ""
    tokens: int  # prompt length
    max_tokens: int = 0
    uncached: int = 0  # predicted tokens to prefill
    waited_s: float = 0.0  # time in the router's window
    predicted_ttft_s: float = 0.0
    tenant: str = "_"
    request_class: str = "std"
    priority: int = 0
    block_size: int = 0
    blocks: int = 0  # whole blocks of the prompt
    hashes: bytes = b""  # chain values of the prompt's first blocks, at most 2048
    adapter: str = ""
    session: str = ""
    prefill: PrefillDecision | None = None  # where its prompt was to be prefilled, if the router decided that
    fleet: str = ""  # in a pool with several fleets
    fleet_reason: str = ""
    ttft_target_s: float | None = None
    itl_target_s: float | None = None


class Explain(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="explain"):
    """A question for the reasons of a placement. Answered with Explanation.

    `id` is that of a request or its client's own id.
    """

    id: str


RouterControl = Explain | Inspect


class Candidate(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A worker as the router saw it at the decision. Blocks are of the pool's block size; costs are seconds."""

    worker: str
    device: int = 0  # blocks of the prompt's prefix on that worker, per tier
    host: int = 0
    disk: int = 0
    uncached: int = 0  # tokens that it would have to prefill
    pending: int = 0  # prefill tokens that are queued there already
    running: int = 0
    wait_s: float = 0.0  # predicted time until the prefill could begin
    cost_s: float = 0.0  # predicted time to first token, adjusted by the preferences
    room: bool = True
    why_not: str = ""  # reason why it is not eligible


class FleetOption(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A fleet as the router saw it for one request. Times are seconds; -1 = nothing is known."""

    fleet: str
    price: float = 0.0
    rank: int = 0  # 0 = preferred
    state: str = ""  # meets, late, unknown
    ttft_s: float = 0.0  # predicted, from arrival, by its best worker
    itl_s: float = 0.0  # predicted
    late_s: float = 0.0  # by how much it is predicted to miss the targets, over the whole answer


class FleetDecision(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The fleet that a request was placed in, and why."""

    fleet: str
    reason: str = ""  # cheapest, meets, least_late, unknown, overflow, policy, trial; of a grid: grid, override, retry
    ttft_target_s: float = 0.0
    itl_target_s: float = 0.0
    options: list[FleetOption] = []


class Decided(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A decision of a router about a request, or that it waits."""

    id: str
    name: str = ""  # the client's own id of the request
    attempt: Attempt = 1
    router: str = ""
    policy: str = ""
    state: str = ""  # waiting, placed, refused
    worker: str = ""
    reason: str = ""
    at: Finite = 0.0
    waited_s: float = 0.0  # time in the router's window
    since_arrival_s: float = 0.0  # from the request's arrival at its frontend to the decision
    predicted_ttft_s: float = 0.0  # from the arrival
    candidates: list[Candidate] = []
    prefill: PrefillDecision | None = None  # where its prompt is prefilled, if the router decided that
    fleet: FleetDecision | None = None  # in a pool with several fleets


class Explanation(Decided, frozen=True, omit_defaults=True, kw_only=True):
    """The last decision about a request; `known` is False if the router does not know the request.

    `earlier`: what this router decided before about requests with the same id or client's id, oldest first.
    """

    known: bool = True
    earlier: list[Decided] = []
