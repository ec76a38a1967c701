"""Defines requests: the envelope that routers read, and the payloads that only workers read."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

# Defines the base of all messages: the version field, the encoding of records as maps, and the bounds of what fields may
# hold.
#
# A message is written by another process and may hold anything. What a field may hold stands in its type, so that a token
# that cannot be part of a subject, an infinite deadline or a size that would fill the memory is refused where the message is
# decoded, with the name of the field, and nothing behind that needs to look again.

WIRE_VERSION = 1

MOST_TOKENS = 2**31 - 1  # of a prompt, an answer or a queue
MOST_ATTEMPTS = 10**9
MOST_CHOICES = 65_536  # of a request; for kind `pool` its inputs
MOST_RANKS = 1024
MOST_CALLS = 4096  # tool calls in one answer
MOST_HISTORY = 1024  # suspicions in the history of a job
LATEST = 4_102_444_800.0  # the year 2100, in Unix seconds: a Nats-TTL until then is one that the server can hold
LONGEST_S = 1e9
LONGEST_NAME = 4096  # characters

Token = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
"""A name that is part of a subject or of a key: a process, a pool, a tenant."""

OptionalToken = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{0,64}\Z")]
"""A token, or nothing."""

Place = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}(~[0-9]{1,4})?\Z")]
"""A worker, or one of its data-parallel ranks."""

Suspect = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}(#[a-z]{1,16})?\Z")]
"""A worker, with a mark where its engine has died instead of the process."""

JobId = Annotated[str, Meta(pattern=r"^[\x21-\x7e]{1,256}\Z")]
"""The id of a request, which becomes part of headers: printable, without blanks."""

Name = Annotated[str, Meta(max_length=LONGEST_NAME)]
"""A name that a client or operator has chosen."""

UnixTime = Annotated[float, Meta(ge=0.0, le=LATEST)]
Seconds = Annotated[float, Meta(ge=0.0, le=LONGEST_S)]
Finite = Annotated[float, Meta(ge=-1e12, le=1e12)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Tokens = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
Attempt = Annotated[int, Meta(ge=1, le=MOST_ATTEMPTS)]
Choice = Annotated[int, Meta(ge=0, lt=MOST_CHOICES)]
Choices = Annotated[int, Meta(ge=1, le=MOST_CHOICES)]
CallIndex = Annotated[int, Meta(ge=0, lt=MOST_CALLS)]
TokenId = Annotated[int, Meta(ge=0, lt=2**32)]
Run64 = Annotated[int, Meta(ge=0)]
"""A random number of up to 64 bits."""

Ranks = Annotated[int, Meta(ge=1, le=MOST_RANKS)]
Rank = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
Small = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
"""An integer whose sign has a meaning, a priority for example."""


class Record(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Base of all messages that are maps."""

    v: int = msgspec.field(default_factory=partial(int, WIRE_VERSION))  # a factory, so that omit_defaults never leaves it out


Target = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]  # seconds

HEADER_ATTEMPT = "Hr-Attempt"  # decimal; absent = 1
HEADER_HISTORY = "Hr-History"  # JSON list of [attempt, worker, group]; absent = []
HEADER_KEPT = "Hr-Kept"  # present: the worker does not preempt this batch request
HEADER_PREFILL = "Hr-Prefill"  # JSON `PrefillDecision`; absent = no router has decided
HEADER_RANK = "Hr-Rank"  # decimal: the data-parallel rank of the worker; absent = the worker chooses


SealKey = Annotated[bytes, msgspec.Meta(max_length=32)]


class Spill(msgspec.Struct, frozen=True, omit_defaults=True):
    """The place of a payload that was too large for a message, in the object store `<prefix>_spill`."""

    object: Name
    size: Count
    digest: str  # SHA-256, hex, of the payload itself
    key: SealKey = b""  # under which the object is encrypted; empty = it is not


class Envelope(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The body of a request in REQ and WORK. It never changes after submission; headers carry the parts that do."""

    id: JobId
    pool: Token
    model: str
    judge: OptionalToken  # the ingress that accepted it: frames go to hr.out.<judge>, claims to hr.ctl.<judge>
    deadline: UnixTime
    created: UnixTime
    kind: Literal["generate", "pool"] = "generate"
    tokens: Tokens  # prompt length; for kind `pool` that of all inputs together
    max_tokens: Tokens = 0  # most tokens one choice may produce, 0 = up to the context length
    choices: Choices = 1  # for kind `pool` the number of inputs
    request_class: Name = "std"
    tenant: Token = "_"
    priority: Small = 0  # lower is sooner, inside a class
    block_size: Tokens = 0  # 0 when there are no hashes
    hashes: bytes = b""  # block chain values, u64 little endian; empty = no affinity
    payload: bytes = b""  # a msgpack `Generation` or, of kind `pool`, `Pooling`; empty when spilled
    spill: Spill | None = None
    trace: dict[str, str] = {}
    name: Name = ""  # the client's own id of the request, to be found by in logs and explanations; need not be unique
    # Constraints and preferences for the placement:
    adapter: Name = ""
    session: Name = ""  # requests of one session go to one worker
    affinity: Literal["soft", "hard"] = "soft"  # soft: unless it costs more time than the session's blocks save
    worker: Name = ""  # the only worker that may run it (policy `direct`)
    ttft_target_s: Target | None = None  # wanted time to first token; None = the router's default. 0 is a target, too
    itl_target_s: Target | None = None  # wanted time between two tokens
    agent_priority: Small | None = None  # for the priority overrides of a grid of fleets
    require: list[Name] = []  # labels that a worker must have
    prefer: dict[Name, Finite] = {}  # labels that a worker should have, with weights; a weight below 0 is for labels to avoid


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Parameters of sampling. An absent one is the engine's own default."""

    temperature: Finite = 1.0
    top_p: Finite = 1.0
    top_k: int = 0  # 0 = off
    min_p: Finite = 0.0
    presence_penalty: Finite = 0.0
    frequency_penalty: Finite = 0.0
    repetition_penalty: Finite = 1.0
    seed: int | None = None
    max_tokens: Tokens | None = None  # None = up to the context length
    min_tokens: Tokens = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    logit_bias: dict[int, Finite] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []


class Generation(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The payload of a generation request, which only the worker decodes."""

    token_ids: bytes  # the prompt, u32 little endian
    sampling: Sampling = Sampling()
    stop: list[str] = []
    include_stop: bool = False  # keep the stop string in the text
    skip_special_tokens: bool = True
    logprobs: Tokens | None = None  # alternatives per token; None = no logprobs
    prompt_logprobs: int | None = None
    guided: dict[str, Any] | None = None  # one of json, regex, choice, grammar, json_object, structural_tag
    adapter: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    media: list[dict[str, Any]] = []
    extra: dict[str, Any] = {}  # passed to the engine as it is
    parse: Parsing | None = None  # None = the answer is plain text
    prompt_embeds: bytes | None = None  # instead of `token_ids`: a file of torch.save, a row per token, read by the worker


class Parsing(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Options for parsing an answer into reasoning, content and tool calls in the worker.

    `tools` and `choice` are those of OpenAI's chat API; `whole`: the client does not stream, so all parts may come at the end.
    """

    tools: list[dict[str, Any]] = []
    choice: str | dict[str, Any] = "auto"  # auto, none, required, or {"type": "function", "function": {"name": …}}
    parallel: bool = True  # more than one call is allowed
    reasoning: bool = True  # return the reasoning; otherwise it is dropped, not returned as content
    whole: bool = False
    template_kwargs: dict[str, Any] = {}  # arguments of the chat template: some of them turn reasoning on and off
    calls_before: Tokens = 0  # tool calls in the conversation so far, because some model families number them


PoolingTask = Literal["embed", "classify", "image", "video"]


class Picture(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A picture or a video to be made from text. None leaves a number to the model.

    `seed` is that of the first picture of a request, and one more for each that follows.
    """

    prompt: str
    negative_prompt: str = ""
    width: int | None = None  # pixels
    height: int | None = None
    steps: int | None = None
    guidance: float | None = None  # how closely to follow the prompt
    seed: int = 0
    seconds: int | None = None  # of a video


class PoolingInput(msgspec.Struct, frozen=True, array_like=True):
    """A text or a pair of texts: [ids, second]. `second` is the index of the second text, for models that mark it."""

    token_ids: bytes  # u32 little endian
    second: int | None = None


class Pooling(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The payload of a job of kind `pool`: each input becomes a vector or a picture, that of input i is choice i.

    `embed` returns an embedding, `classify` the scores of all classes; a model that scores pairs has one class. `image` makes
    a picture of `picture` for each input; their tokens are those of its prompt.
    """

    task: PoolingTask
    inputs: list[PoolingInput]
    dimensions: int | None = None  # None = all dimensions of the model
    normalize: bool | None = None  # to length 1, or scores to probabilities; None = the model's own default
    adapter: str | None = None
    extra: dict[str, Any] = {}  # passed to the engine as it is
    picture: Picture | None = None  # of task `image`


class PrefillDecision(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The router's decision on where a placed request is prefilled, in the header `Hr-Prefill` of its message.

    `worker`: the prefill worker that should do it; empty = any. `rank`: its data-parallel rank, if it has several. `wait_s`:
    the time that the decode worker waits for a prefill worker to take the job before it prefills the prompt itself; its own
    setting is the least. `refuse`: the request ends if remote prefill is not possible.
    """

    remote: bool = False
    refuse: bool = False
    worker: OptionalToken = ""
    rank: Rank | None = None
    reason: str = ""
    wait_s: Seconds = 0.0


# Defines the messages by which a serving worker has an encode worker run the encoder of a multimodal model.
#
#     serving ── EncodeMedia ──▶ encode      one media item of a request; a core request to the worker's subject for peers
#     serving ◀── MediaEncoded ── encode     where the embeddings are to be read, or why they are not there
#
# They lie in memory of the encode worker that the asker reads over NIXL, if both can, or in the object store
# `<prefix>_embeddings-<pool>`.
#
# Nothing here decides about a request: without embeddings its worker runs the encoder itself.

ObjectDigest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class EncodeMedia(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="encode_media"):
    """A media item to encode: number `item` of the `Generation` in `payload` (or `spill`).

    `name`: the name under which its embeddings are to lie, which follows from the item (`workers/encoding/server.py`).
    `reads`: the most bytes that the asker reads over NIXL at once, 0 where it cannot.
    """

    id: JobId
    name: ObjectDigest
    item: Count = 0
    payload: bytes = b""
    spill: Spill | None = None
    reads: Count = 0


class LentRecord(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A record in memory of an encode worker: `size` bytes from block `first` of the agent with this card.

    It may be overwritten at any time; a reader finds that out by the record's checksum.
    """

    card: bytes
    first: Count
    size: Count


class MediaEncoded(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The answer of an encode worker: the embeddings are there, or not and why. Without `lent` they are in the object store."""

    ok: bool
    message: Name = ""
    lent: LentRecord | None = None
