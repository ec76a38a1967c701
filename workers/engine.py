"""The engine protocol: all that the worker runtime knows of vLLM, SGLang, TensorRT-LLM or the simulator.

Tokens in, tokens out.  An engine runs *sequences* (one choice of one request each) and reports per engine step, in one call,
what every sequence got: that is how engines work inside, and it is what lets one message carry a whole step.  Text,
stop strings and parsers are the runtime's business.

Options an engine knows and this protocol does not pass through untouched: `EngineConfig.args` at start, `Sequence.extra` per
request.

Failures come in three shapes (engines.md §7) and all arrive the same way: an exception from `submit`, an output with
`fault` set (the engine gave up on that sequence), or silence, which the runtime's own watchdog turns into a fault.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

import msgspec

from headrace.broker.messages import PoolingTask, Sampling, TokenLogprob
from headrace.broker.models.cards import MediaSlot
from headrace.workers.prompt_embeds import StoredTensor


class Role(StrEnum):
    """What part of a request an engine serves."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"
    EMBEDDING = "embedding"


class DisaggStyle(StrEnum):
    """How prefill hands its blocks to decode."""

    NONE = "none"
    PARAMS = "params"  # prefill returns opaque parameters, decode consumes them (vLLM, TensorRT-LLM)
    RENDEZVOUS = "rendezvous"  # both sides start at once and meet in a room (SGLang)


POOLING_KINDS = frozenset({"embedding", "score", "classify"})
"""Kinds of requests that make vectors. An engine serves these or generates."""

SERVING_ROLES = frozenset({Role.AGGREGATED, Role.DECODE})
"""Workers in these roles own requests; one in the role `prefill` computes prompts for those in the role `decode`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an engine can do. The runtime refuses what is not here with a typed error that names it."""

    roles: frozenset[Role] = frozenset({Role.AGGREGATED})  # those that `set_role` can change to, once it is started
    disagg: DisaggStyle = DisaggStyle.NONE
    resume: bool = True  # can continue prompt + emitted ids as a forced prefix
    resume_guided: bool = False  # … with the grammar state of structured output
    resume_penalties: bool = False  # … with presence and frequency penalties counting the emitted ids
    kv_events: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    guided: frozenset[str] = frozenset()  # of json, regex, choice, grammar, json_object, structural_tag
    lora: Literal["none", "static", "dynamic"] = "none"
    media: frozenset[str] = frozenset()  # of image, video, audio
    prompt_embeds: bool = False
    cache_salt: bool = False
    priority: bool = False
    sleep_levels: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What every engine needs, and `args`: the engine's own settings, handed over unchanged."""

    model: str  # folder or hub id; for the simulator a name
    served_name: str
    role: Role = Role.AGGREGATED
    seed: int = 0
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a started engine says of itself. `tokenizer_dir` holds tokenizer.json, its config and the chat template."""

    engine: str
    version: str
    tokenizer_dir: str
    context_length: int
    block_size: int
    blocks: int
    slots: int  # sequences it runs at once
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kinds: tuple[str, ...] = ("chat", "completion")  # and embedding, score, classify: `pool` makes these
    labels: tuple[str, ...] = ()  # names of the classes, by number, where the model has some
    step_tokens: int = 0  # most tokens of one step, 0 = unknown
    adapters: tuple[str, ...] = ()  # served besides the base model
    handover: str = ""  # how it hands over, for example "vllm/push"; engines with equal words can; empty = it cannot
    lease_s: float = 0.0  # how long a prefill side keeps blocks on offer that nobody fetches
    address: str = ""  # where the decode side of a rendezvous finds it
    transfer_card: bytes = b""  # what engines of other workers need to reach its memory (`Engine.meet`), some KB at most
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    prompt_embeds: bool = False  # it takes prompts as embeddings
    media: Mapping[str, MediaSlot] = field(default_factory=dict)  # kinds of media it takes, and how they stand in a prompt
    hands_over_media: bool = False  # whether blocks of prompts with media can be handed over
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """One side of a prefill/decode hand-over. Both sides' sequences have the same id.

    Prefill side: the prompt is computed, one token comes with `Output.finish` "length" and is thrown away, for the decode side
    makes it again.  Params: that output's `handover` is opaque and is the decode side's `params`.  Rendezvous: both have the
    same `room`, the decode side gets the prefill engine's `address` as `peer`, and the prefill side's last output comes when
    the blocks have been taken.

    Neither side asks how old the parameters are: who hands them over has just asked the prefill side.
    """

    kind: Literal["prefill", "decode"]
    params: Mapping[str, Any] | None = None
    room: int | None = None
    peer: str | None = None


class Sequence(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of one request, as the engine runs it.

    On a resume `token_ids` is prompt + emitted ids, `prompt_tokens` still counts the original prompt, and `sampling.max_tokens`
    and `min_tokens` are already reduced. `sampling.max_tokens` is always set.
    """

    id: str  # unique per run and choice: <request>-<attempt>-<choice>
    token_ids: list[int]
    prompt_tokens: int
    sampling: Sampling
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guided: Mapping[str, Any] | None = None
    adapter: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    priority: int = 0
    media: Seq[Mapping[str, Any]] = ()
    prompt_embeds: StoredTensor | None = None  # a row per prompt token, whose ids are placeholders then
    handover: Handover | None = None
    expected_cached: int = 0  # tokens of the prefix that the cache should have, as far as KV events tell
    reasoning_ended: bool | None = None  # structured output begins after the reasoning; None = the engine finds out
    reasoning_kwargs: Mapping[str, Any] | None = None  # for the engine's own reasoning parser
    extra: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolItem:
    """One input of which an engine makes a vector.

    `second` is where the second text of a pair begins, for models that mark it. `normalize` None = as the model does.
    """

    id: str  # unique per run and input
    task: PoolingTask
    token_ids: list[int]
    second: int | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    priority: int = 0
    adapter: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pooled:
    """The vector of one input, f32 little endian, and how many of its tokens the cache had."""

    vector: bytes
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """The engine gave up on a sequence. Code `transfer_failed`: blocks of another engine did not come."""

    code: str
    message: str
    retriable: bool


class Output(msgspec.Struct, gc=False):
    """What one engine step gave one sequence. One is built per token: a plain struct, outside the collector's sight.

    `finish` is set on the last output: "stop" (EOS or a stop token, which is then the last id), "length" or "abort".
    `cached_tokens` is set on the first output: found in this engine's own cache; what another engine computed is not in it.
    So is `prompt_tokens`, where media made the prompt longer than the ids it was given as: what it is inside the engine.
    So are `prompt_logprobs`, where they were asked for: one per token of the sequence, None for the first.
    """

    id: str
    ids: list[int]
    finish: Literal["stop", "length", "abort"] | None = None
    stop: int | None = None  # the stop token that matched
    logprobs: list[TokenLogprob] | None = None
    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    fault: Fault | None = None
    handover: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] | None = None


Sink = Callable[[list[Output]], None]
"""Takes all outputs of one engine step. Called on the event loop, must not block."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's own view of how busy it is."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    queued_prefill_tokens: int = 0  # prompt tokens still to be computed: what is found in the cache is not among them
    step_s: float = 0.0  # duration of the last step …
    step_prefill_tokens: int = 0  # … the prompt tokens it computed
    step_decodes: int = 0  # … and the sequences that decoded in it


Tier = Literal["device", "host", "disk"]
TIERS: tuple[Tier, ...] = ("device", "host", "disk")


class KvEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the engine's KV cache. Hashes are the engine's own, u64.

    `token_ids` comes with `stored`: those of all blocks in `hashes`, in order, `block_size` tokens each. An event whose tokens
    are more or fewer than that (an engine that leaves out blocks of a sliding window) names blocks of which another group's
    event tells the content. A hash that is stored again while the device holds it is another copy, removed by itself.
    """

    kind: Literal["stored", "removed", "cleared"]
    tier: Tier = "device"
    hashes: Seq[int] = ()
    parent: int | None = None
    token_ids: Seq[int] = ()
    adapter: str | None = None
    salt: str | None = None
    media: Seq[Seq[tuple[int, int]]] = ()  # per block the (digest, offset) of each item that touches it; () = no items
    group: int | None = None
    block_size: int | None = None  # tokens that one hash stands for; None = as many as there are for each of them


class KvBatch(list[KvEvent]):
    """One step's events, and their number: contiguous from the engine's start, so that a lost batch shows.

    One that begins with `cleared` needs nothing before it. If it is the answer to a new reader it goes on with everything that
    is cached, under the number of the last batch that this takes in; `partial` says that the engine may hold more than that.
    """

    __slots__ = ("number", "partial")

    def __init__(self, events: Iterable[KvEvent], number: int, *, partial: bool = False) -> None:
        super().__init__(events)
        self.number = number
        self.partial = partial


class Engine(Protocol):
    """An inference engine inside (or beside) the worker process."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def start(self, config: EngineConfig, sink: Sink) -> EngineInfo:
        """Load the model; return when requests can be served. Raises EngineStartFailed."""

    async def submit(self, sequence: Sequence) -> None:
        """Take a sequence in. Raises RequestInvalid, EngineOverloaded, EngineDead, UnsupportedByEngine."""

    async def abort(self, ids: Seq[str]) -> None:
        """Stop these sequences and free their blocks. No further output of them reaches the sink. Unknown ids are fine."""

    def load(self) -> Load: ...

    async def healthy(self) -> None:
        """Return if the engine can serve. Raises EngineDead."""

    async def died(self) -> str:
        """Wait until the engine dies; return why. Never returns for a healthy engine."""

    def kv_events(self) -> AsyncGenerator[KvBatch]:
        """Changes of the KV cache, a batch per step, to one reader at a time; it begins with `cleared` and what is cached now.

        Only with capability `kv_events`. Raises EngineDead.
        """

    async def replay_kv(self, start: int) -> list[KvBatch]:
        """The batches from this number on that are still kept; the first may have a higher number. Raises EngineError."""

    def meet(self, peers: Mapping[str, bytes]) -> None:
        """The live workers of the pool and their transfer cards, this one's own left out; called after every change.

        Who is no longer among them is gone: what is known of it is dropped.
        """

    async def release(self, sequence_id: str, params: Mapping[str, Any] | None) -> None:
        """Nobody will fetch these blocks. Prefill side (`params` None): let go of them. Decode side: tell the prefill side.

        Fine when there is nothing (any more). Raises EngineDead.
        """

    async def set_role(self, role: Role) -> None:
        """Serve this role from now on; no sequence is inside. Raises UnsupportedByEngine."""

    async def pool(self, item: PoolItem) -> Pooled:
        """One input's vector. Cancelling the wait stops the work. Only for an engine whose `EngineInfo.kinds` say so.

        Raises RequestInvalid, EngineOverloaded, EngineDead, UnsupportedByEngine, EngineError.
        """

    async def control(self, op: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Engine-specific operations (LoRA, sleep, cache reset, profiling). Raises UnsupportedByEngine for an unknown `op`."""

    async def stop(self, grace_s: float) -> None:
        """End the engine and every process it started, within `grace_s`."""
