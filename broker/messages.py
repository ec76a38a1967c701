"""Every message Headrace puts on the wire, as typed, immutable records.

All are msgpack.  Records are maps with the field names below, except `Row` and the small tuples inside it, which are arrays to
keep the token path cheap.  Readers ignore fields (and trailing array items) that they do not know; `v` is the major version
and a reader refuses one that is higher than its own.  `docs/wire.md` is this module in prose.

`gc=False` keeps the collector away from what comes by the hundred thousand and holds no cycles.

Times are Unix seconds (float), durations are seconds, token ids are u32, block chain values are u64.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

WIRE_VERSION = 1

HEADER_ATTEMPT = "Hr-Attempt"  # decimal; absent = 1
HEADER_HISTORY = "Hr-History"  # JSON list of [attempt, worker]; absent = []
HEADER_PREFILL = "Hr-Prefill"  # JSON `PrefillDecision`; absent = nobody has decided

Verdict = Literal["go", "wait", "stale", "unknown"]
FinishReason = Literal["stop", "length", "error", "tool_calls", "content_filter"]


class Record(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Base of all map messages."""

    v: int = msgspec.field(default_factory=lambda: WIRE_VERSION)  # a factory, so that omit_defaults never leaves it out


# -- requests ------------------------------------------------------------------------------------------------


class Spill(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a payload lies that was too large for a message: object store `<prefix>_spill`."""

    object: str
    size: int
    digest: str  # SHA-256, hex


class Envelope(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The body of a request in REQ and WORK. It never changes after submission; what changes travels in headers."""

    id: str
    pool: str
    model: str
    judge: str  # the ingress that accepted it: frames go to hr.out.<judge>, claims to hr.ctl.<judge>
    deadline: float
    created: float
    kind: Literal["generate", "pool"] = "generate"
    tokens: int  # prompt length, of kind `pool` that of all inputs together
    max_tokens: int = 0  # most tokens one choice may produce, 0 = up to the context length
    choices: int = 1  # of kind `pool`: the inputs
    request_class: str = "std"
    tenant: str = "_"
    priority: int = 0  # lower is sooner, inside a class
    block_size: int = 0  # 0 when there are no hashes
    hashes: bytes = b""  # block chain values, u64 little endian; empty = no affinity
    payload: bytes = b""  # a msgpack `Generation` or, of kind `pool`, `Pooling`; empty when spilled
    spill: Spill | None = None
    trace: dict[str, str] = {}
    # what a router may be told about where to place it
    adapter: str = ""
    session: str = ""  # requests of one session go to one worker
    affinity: Literal["soft", "hard"] = "soft"  # soft: unless that costs more than the session's blocks are worth
    worker: str = ""  # exactly this one (policy `direct`)
    require: list[str] = []  # labels a worker must have
    prefer: dict[str, float] = {}  # labels a worker should have, with weights above 0 (or below: rather not)


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How to choose tokens. Absent = the engine's own default."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None  # None = up to the context length
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []


class Generation(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The payload of a generation request: decoded by the worker only."""

    token_ids: bytes  # the prompt, u32 little endian
    sampling: Sampling = Sampling()
    stop: list[str] = []
    include_stop: bool = False  # keep the stop string in the text
    skip_special_tokens: bool = True
    logprobs: int | None = None  # alternatives per token; None = no logprobs at all
    prompt_logprobs: int | None = None
    guided: dict[str, Any] | None = None  # one of json, regex, choice, grammar, json_object, structural_tag
    adapter: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    media: list[dict[str, Any]] = []
    extra: dict[str, Any] = {}  # handed to the engine as it is
    parse: Parsing | None = None  # None = the answer is plain text
    prompt_embeds: bytes | None = None  # instead of `token_ids`: a file of torch.save, a row per token, read by the worker


class Parsing(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How the worker is to take an answer apart into reasoning, content and tool calls.

    `tools` and `choice` are as OpenAI's chat API has them; `whole`: nobody reads along, so everything may come at the end.
    """

    tools: list[dict[str, Any]] = []
    choice: str | dict[str, Any] = "auto"  # auto, none, required, or {"type": "function", "function": {"name": …}}
    parallel: bool = True  # more than one call
    reasoning: bool = True  # hand it out; if not it is left out, not taken for content
    whole: bool = False
    template_kwargs: dict[str, Any] = {}  # what the chat template was given: some of it turns reasoning on and off
    calls_before: int = 0  # tool calls in the conversation so far: some families number them


PoolingTask = Literal["embed", "classify"]


class PoolingInput(msgspec.Struct, frozen=True, array_like=True):
    """[ids, second]: one text or pair of texts. `second` is where the second text of a pair begins, for models that mark it."""

    token_ids: bytes  # u32 little endian
    second: int | None = None


class Pooling(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The payload of a job of kind `pool`: each input becomes one vector, input i that of choice i.

    `embed` gives an embedding, `classify` the scores of all classes; a model that scores pairs has one class.
    """

    task: PoolingTask
    inputs: list[PoolingInput]
    dimensions: int | None = None  # None = all that the model has
    normalize: bool | None = None  # to length 1, or scores to probabilities; None = as the model does
    adapter: str | None = None
    extra: dict[str, Any] = {}  # handed to the engine as it is


class PrefillDecision(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Where the prompt of a placed request is computed, in the header `Hr-Prefill` of its message.

    `worker`: the prefill worker that should do it; empty = any. `wait_s`: how long the decode worker waits for somebody to take
    the job before it computes the prompt itself; its own setting is the least. `refuse`: the request ends if it cannot be.
    """

    remote: bool = False
    refuse: bool = False
    worker: str = ""
    reason: str = ""
    wait_s: float = 0.0


# -- token frames --------------------------------------------------------------------------------------------


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """[id, token bytes, logprob, top, rank], `top` being [[id, bytes, logprob], …], best first."""

    id: int
    token: bytes
    logprob: float
    top: list[tuple[int, bytes, float]] = []
    rank: int = 0  # of this token among all, 1 = the likeliest; only for prompts, otherwise 0


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A piece of an answer that was taken apart: [kind, text, index, id, name].

    `text` of kind `tool` is a piece of the arguments of call `index`; its first piece brings `id` and `name`.
    """

    kind: Literal["content", "reasoning", "tool"]
    text: str = ""
    index: int = 0
    id: str | None = None
    name: str | None = None


Text = str | list[Part]
"""What a token released: plain text, or, where the request asked for parsing, parts. Never both in one answer."""


class JobFault(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a job ended without a full answer. `code` is `broker.errors.JobError.code`."""

    code: str
    message: str
    retriable: bool = False
    retry_after_s: float | None = None
    param: str | None = None


class Finish(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """The end of one choice. `tail` is text held back until it was clear what it is part of."""

    reason: FinishReason
    stop: str | int | None = None  # the stop string or stop token that matched
    tail: Text = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0  # of the completion tokens, as far as the parser can tell
    prompt_logprobs: list[TokenLogprob | None] | None = None  # one per prompt token, None for the first
    vector: bytes = b""  # what pooling gave, f32 little endian
    fault: JobFault | None = None


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one engine step gave one choice: [id, attempt, run, choice, offset, ids, texts, logprobs, fin].

    `offset` counts the tokens of this choice before `ids`; `texts` has one entry per id, empty while text is held back.
    """

    id: str
    attempt: int
    run: int
    choice: int
    offset: int
    ids: list[int]
    texts: list[Text]
    logprobs: list[TokenLogprob] | None = None
    fin: Finish | None = None


class Frame(Record, frozen=True, omit_defaults=True, kw_only=True):
    """One engine step of one worker for one ingress, on hr.out.<ingress>."""

    worker: str
    rows: list[Row]


# -- control: to an ingress, on hr.ctl.<ingress>, answered ---------------------------------------------------


class RunRef(msgspec.Struct, frozen=True, array_like=True):
    """[id, attempt, run]"""

    id: str
    attempt: int
    run: int


class HistoryEntry(msgspec.Struct, frozen=True, array_like=True):
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


IngressControl = Claim | Check | Refuse


# -- control: to a worker, on hr.ctl.<worker> (and hr.find.<pool>), one way unless said ----------------------


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


WorkerControl = Answers | Abort | Since | Drain | Inspect | Ping | KvDump


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


# -- broadcasts ----------------------------------------------------------------------------------------------


class Cancel(Record, frozen=True, omit_defaults=True, kw_only=True):
    """On hr.cancel.<pool>."""

    ids: list[str]


EventKind = Literal["placed", "started", "prefilled", "settled", "moved"]


class JobEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """[kind, id, attempt, worker, tokens, uncached, blocks, by, hashes, prefill]

    `tokens`: of the prompt, in `settled` of the answer. `uncached`: prompt tokens to be prefilled, predicted in `placed`,
    measured in `prefilled`. `by`: the router that placed it.
    `hashes` (only in `placed`): chain values that the worker is about to hold and nobody has seen there yet, at most 512 of
    them, so that all routers send the siblings of a burst to the same worker.
    `prefill` (only in `placed`): who computes the prompt, a prefill worker or `*` for any of them; empty = the worker itself.
    """

    kind: EventKind
    id: str
    attempt: int
    worker: str
    tokens: int = 0
    uncached: int = 0
    blocks: int = 0
    by: str = ""
    hashes: bytes = b""
    prefill: str = ""


class JobEvents(Record, frozen=True, omit_defaults=True, kw_only=True):
    """On hr.ev.<pool>."""

    events: list[JobEvent]


class LoadReport(Record, frozen=True, omit_defaults=True, kw_only=True):
    """On hr.load.<pool>.<worker>, on change and every 200 ms."""

    worker: str
    epoch: int
    n: int
    at: float
    slots: int
    running: int
    waiting: int
    blocks_total: int = 0
    blocks_used: int = 0
    queued_prefill_tokens: int = 0
    step_s: float = 0.0  # duration of the last engine step …
    step_prefill_tokens: int = 0  # … the prompt tokens it computed
    step_decodes: int = 0  # … and the sequences that got a token in it
    handover_s: float = 0.0  # of the last prompt that another worker computed: from its blocks being ready to the first token …
    handover_tokens: int = 0  # … and the tokens fetched


# -- KV cache events, on hr.kv.<pool>.<worker>, kept in the KV stream -----------------------------------------


class KvStep(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="step"):
    """What changed in a worker's cache: first `cleared`, then `removed`, then `stored` apply.

    `epoch` changes when the engine starts, `n` counts this worker's KV messages of the epoch from 0, without a hole. Values map
    a tier (device, host, disk) to chain values, u64 little endian. `device` comes first wherever tiers are ordered.
    """

    worker: str
    epoch: int
    n: int
    cleared: bool = False
    removed: dict[str, bytes] = {}
    stored: dict[str, bytes] = {}


class KvReset(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="reset"):
    """One part (at most 256 KiB) of a worker's whole inventory; the parts of a dump follow each other in `n` without a step
    between them. Readers gather them and apply all at `last`: from then on the worker holds exactly these blocks."""

    worker: str
    epoch: int
    n: int
    dump: int  # tells dumps of one epoch apart
    part: int  # from 0
    last: bool = False
    blocks: dict[str, bytes] = {}


KvMessage = KvStep | KvReset


# -- placements as they were made, on hr.route.<pool>, kept in the ROUTE stream -------------------------------


class Routed(Record, frozen=True, omit_defaults=True, kw_only=True):
    """One placement, for those who want to know later what another policy would have done (`headrace replay placements`)."""

    at: float  # when it was placed
    id: str
    attempt: int = 1
    router: str = ""
    worker: str
    reason: str = ""
    tokens: int  # prompt length
    max_tokens: int = 0
    uncached: int = 0  # tokens to be prefilled, predicted
    waited_s: float = 0.0  # in the window
    predicted_ttft_s: float = 0.0
    tenant: str = "_"
    request_class: str = "std"
    priority: int = 0
    block_size: int = 0
    blocks: int = 0  # whole blocks of the prompt …
    hashes: bytes = b""  # … and the chain values of the first of them, at most 2048
    adapter: str = ""
    session: str = ""
    prefill: PrefillDecision | None = None  # where its prompt was to be computed, if that was a question


# -- control: to a router, on hr.ctl.<router>, answered ---------------------------------------------------------


class Explain(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="explain"):
    """Why was this request placed where it is? Answered with Explanation."""

    id: str


RouterControl = Explain | Inspect


class Candidate(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One worker as the router saw it when it decided. Blocks are of the pool's block size; costs are seconds."""

    worker: str
    device: int = 0  # blocks of the prompt's prefix on that worker, per tier
    host: int = 0
    disk: int = 0
    uncached: int = 0  # tokens it would have to prefill
    pending: int = 0  # prefill tokens already before it
    running: int = 0
    wait_s: float = 0.0  # predicted, until its prefill could begin
    cost_s: float = 0.0  # predicted time to first token, with the preferences that count
    room: bool = True
    why_not: str = ""  # not eligible, and the reason


class Explanation(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A decision, or (`known` false) the word that this router knows nothing of the request."""

    id: str
    known: bool = True
    router: str = ""
    policy: str = ""
    state: str = ""  # waiting, placed, refused
    worker: str = ""
    reason: str = ""
    at: float = 0.0
    waited_s: float = 0.0  # in the window
    predicted_ttft_s: float = 0.0
    candidates: list[Candidate] = []
    prefill: PrefillDecision | None = None  # where its prompt is computed, if that was a question


# -- members (leases) ----------------------------------------------------------------------------------------


class WorkerMember(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The value of a worker's lease."""

    worker: str
    pool: str
    model: str
    role: str = "aggregated"
    engine: str = ""
    engine_version: str = ""
    slots: int = 0
    block_size: int = 0
    blocks: int = 0
    max_model_len: int = 0
    epoch: int = 0
    started: float = 0.0
    draining: bool = False
    host: str = ""
    pid: int = 0
    labels: list[str] = []
    adapters: list[str] = []  # adapters it serves besides the base model
    kv_events: bool = False  # it publishes its cache's changes; without them routers work from their own placements
    step_tokens: int = 0  # most tokens of one engine step, 0 = unknown
    roles: list[str] = []  # those it can change to
    handover: str = ""  # how it hands KV blocks over; workers with equal words can; empty = not at all
    transfer_card: bytes = b""  # what other engines need to reach its memory
    tool_parser: str | None = None  # what it takes answers apart with; the card has those of the worker that joined last
    reasoning_parser: str | None = None

    @property
    def serves(self) -> bool:
        """It owns requests; a worker in the role `prefill` only computes prompts for others."""
        return self.role != "prefill"


class IngressMember(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The value of an ingress's lease."""

    ingress: str
    started: float = 0.0
    host: str = ""
    pid: int = 0


class RouterMember(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The value of a router's lease."""

    router: str
    pool: str
    started: float = 0.0


# -- dead letters --------------------------------------------------------------------------------------------


class DeadLetter(Record, frozen=True, omit_defaults=True, kw_only=True):
    """On hr.dlq.<pool>: a job taken out of service, with everything needed to look at it or try again."""

    envelope: Envelope
    reason: str
    attempt: int
    history: list[HistoryEntry]
    at: float
