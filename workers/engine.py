"""Defines the engine protocol: everything that the worker runtime knows of vLLM, SGLang, TensorRT-LLM or the simulator.

Engines take token ids and return token ids. An engine runs *sequences* (one choice of one request each) and reports, in one
call per engine step, the output of every sequence: engines work like that inside, and it lets one message carry a whole step.
The runtime handles text, stop strings and parsers.

Options that an engine knows and this protocol does not are passed through untouched: `EngineConfig.args` at start,
`Sequence.extra` per request.

An engine fails in one of three ways: an exception from `submit`, an output with `fault` set (the engine gave up on that
sequence), or silence, which the runtime's watchdog turns into a fault.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from headrace.broker import torch_tensors
from headrace.broker.messages.frames import TokenLogprob
from headrace.broker.messages.requests import Picture, PoolingTask, Sampling
from headrace.broker.models.cards import MediaSlot
from headrace.broker.torch_tensors import StoredTensor, TensorUnreadable
from headrace.workers.errors import RequestInvalid

__all__ = ["StoredTensor", "read_matrix", "read_tensor"]


def read_tensor(file: bytes, *, param: str) -> StoredTensor:
    """Read a dense float tensor as `torch.save` writes it. Raises RequestInvalid naming `param` for anything else."""
    return _read(torch_tensors.read_tensor, file, param)


def read_matrix(file: bytes, *, param: str) -> StoredTensor:
    """Read a tensor of two dimensions, or of more dimensions with leading ones of size 1. Raises RequestInvalid."""
    return _read(torch_tensors.read_matrix, file, param)


def _read(read: Callable[[bytes], StoredTensor], file: bytes, param: str) -> StoredTensor:
    try:
        return read(file)
    except TensorUnreadable as error:
        raise RequestInvalid(f"{param}: {error}", param=param) from None


class Role(StrEnum):
    """The part of a request that an engine serves."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODE = "encode"
    EMBEDDING = "embedding"


class DisaggStyle(StrEnum):
    """The way in which a prefill engine hands its KV blocks to a decode engine."""

    NONE = "none"
    PARAMS = "params"  # prefill returns opaque parameters, decode consumes them (vLLM, TensorRT-LLM)
    RENDEZVOUS = "rendezvous"  # both sides start at once under a shared room id (SGLang)


POOLING_KINDS = frozenset({"embedding", "score", "classify", "image", "video"})
"""The kinds of requests with one result per input: a vector, a picture or a video. An engine serves these or generates."""

SERVING_ROLES = frozenset({Role.AGGREGATED, Role.DECODE})
"""Workers in these roles own requests; a worker in the role `prefill` computes prompts for workers in the role `decode`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The abilities of an engine. The runtime refuses a request that needs another one, with a typed error that names it."""

    roles: frozenset[Role] = frozenset({Role.AGGREGATED})  # the roles that `set_role` accepts once the engine is started
    disagg: DisaggStyle = DisaggStyle.NONE
    seeds: bool = True  # a seed makes sampling repeatable
    resume: bool = True  # can continue prompt + emitted ids as a forced prefix
    resume_guided: bool = False  # can also continue with the grammar state of structured output
    resume_penalties: bool = False  # can also continue with presence and frequency penalties counting the emitted ids
    resume_repetition: bool = False  # can also continue with a repetition penalty, as one that counts the tokens of prompts too
    kv_events: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    guided: frozenset[str] = frozenset()  # any of json, regex, choice, grammar, json_object, structural_tag
    lora: Literal["none", "static", "dynamic"] = "none"
    media: frozenset[str] = frozenset()  # any of image, video, audio
    prompt_embeds: bool = False
    cache_salt: bool = False
    priority: bool = False
    sleep_levels: tuple[int, ...] = ()  # of the operations "sleep" and "wake"
    operations: frozenset[str] = frozenset()  # the names that `control` knows, those of adapters and sleep included


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings that every engine needs, and `args`: the engine's own settings, passed on unchanged."""

    model: str  # folder or hub id; for the simulator a name
    served_name: str
    role: Role = Role.AGGREGATED
    seed: int = 0
    args: Mapping[str, Any] = field(default_factory=dict)
    peer_host: str = "127.0.0.1"  # this machine's address for the engines of other workers, for hand-overs


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """A started engine's description of itself. `tokenizer_dir` holds tokenizer.json, its config and the chat template."""

    engine: str
    version: str
    tokenizer_dir: str
    context_length: int
    block_size: int
    blocks: int
    slots: int  # most sequences that run at once
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kinds: tuple[str, ...] = ("chat", "completion")  # or embedding, score, classify, which `pool` computes
    labels: tuple[str, ...] = ()  # names of the model's classes, by number, if it has classes
    step_tokens: int = 0  # most tokens of one step, 0 = unknown
    adapters: tuple[str, ...] = ()  # served besides the base model
    handover: str = ""  # hand-over method, for example "vllm/push"; only engines with equal methods can hand over; empty = none
    lease_s: float = 0.0  # seconds for which a prefill engine keeps offered blocks that no decode engine fetches
    lends: bool = False  # on the decode side it lets a prefill engine read the prefix of a prompt that it has cached
    address: str = ""  # address for the decode side of a rendezvous
    prefill_samples: bool = False  # in a hand-over the prefill side's token is the answer's first, so it has to sample as asked
    transfer_card: bytes = b""  # lets engines of other workers reach this engine's memory (`Engine.meet`); some KB at most
    default_sampling: Mapping[str, Any] = field(default_factory=dict)
    prompt_embeds: bool = False  # accepts prompts as embeddings
    ranks: int = 1  # data-parallel ranks, each with a KV cache and a queue of its own; `blocks` and `slots` are those of all
    parallel: Mapping[str, int] = field(default_factory=dict)  # ranks that share the model, by kind (`several`)
    media: Mapping[str, MediaSlot] = field(default_factory=dict)  # accepted kinds of media and their form in a prompt
    encoder: str = ""  # engines with equal words make the same embeddings of media, and pass them on; empty = none are passed
    hands_over_media: bool = False  # whether blocks of prompts with media can be handed over
    follows: bool = False  # computes a part of an engine that another node's worker serves, and takes no sequences itself
    extra: Mapping[str, Any] = field(default_factory=dict)


def several(**ranks: int | None) -> dict[str, int]:
    """Return the kinds of ranks (tensor, pipeline, expert) with more than one rank."""
    return {kind: number for kind, number in ranks.items() if number is not None and number > 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """The hand-over parameters of a sequence on the prefill or the decode side. Both sides' sequences have the same id.

    The prefill side computes the prompt and reports one token with `Output.finish` "length"; the token is thrown away, because
    the decode side computes it again (not with `EngineInfo.prefill_samples`). Params: that output's `handover` is opaque and
    becomes the decode side's `params`. Rendezvous: both sides have the same `room`, the decode side gets the prefill engine's
    `address` as `peer`, and the prefill side's last output comes when the blocks have been fetched.

    Neither side checks the age of the parameters: the worker that hands them over has just confirmed them with the prefill
    side.

    `lend`: the decode side has a prefix of the prompt in its cache (`EngineInfo.lends`). The sequence is that prefix and a
    token more, and ends as a prefill does; its parameters are those of the prefill side's sequence, which reads these blocks if
    its engine can, and computes them otherwise. `Output.extra["remote_tokens"]` is how many tokens it has read.
    """

    kind: Literal["prefill", "decode", "lend"]
    params: Mapping[str, Any] | None = None
    room: int | None = None
    peer: str | None = None


class Sequence(msgspec.Struct, frozen=True, kw_only=True):
    """A choice of a request, as the engine runs it.

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
    rank: int | None = None  # the data-parallel rank to compute it; None = the engine chooses
    media: Seq[Mapping[str, Any]] = ()
    embeddings: Mapping[int, bytes] = {}  # by the index of a media item: what an encode worker has made of it
    prompt_embeds: StoredTensor | None = None  # a row per prompt token, whose ids are placeholders then
    handover: Handover | None = None
    expected_cached: int = 0  # tokens of the prefix that the cache should have, as far as KV events tell
    reasoning_ended: bool | None = None  # structured output begins after the reasoning; None = the engine detects its end
    reasoning_kwargs: Mapping[str, Any] | None = None  # for the engine's own reasoning parser
    trace: Mapping[str, str] = {}  # W3C headers of the request, for an engine that traces
    extra: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolItem:
    """An input for which an engine computes a vector, or makes a picture or a video.

    `second` is the index at which the second text of a pair begins, for models that mark it. `normalize` None: the model's
    default.
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
    picture: Picture | None = None  # of the tasks `image` and `video`


@dataclass(frozen=True, slots=True)
class Pooled:
    """The result of an input, and the number of its tokens that the cache had.

    `vector`: f32 little endian, or the bytes of a file: PNG for task `image`, MP4 for task `video`.
    """

    vector: bytes
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """The reason why the engine gave up on a sequence.

    Code `transfer_failed`: blocks of another engine did not arrive. `invalid_request`: the request itself, found only after
    `submit` (a grammar that does not compile).
    """

    code: str
    message: str
    retriable: bool


class Output(msgspec.Struct, gc=False):
    """The output of an engine step for a sequence: a plain struct, untracked by the garbage collector, as each token has one.

    `finish` is set on the last output: "stop" (EOS or a stop token, which is then the last id), "length" or "abort".
    Three fields are set on the first output. `cached_tokens`: tokens found in this engine's own cache, without those that
    another engine computed. `prompt_tokens`: the length of the prompt inside the engine, if media made it longer than the ids.
    `prompt_logprobs`, if requested: one per token of the sequence, None for the first.
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
"""Receives all outputs of an engine step. Called on the event loop, must not block."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    queued_prefill_tokens: int = 0  # prompt tokens still to be computed, without those found in the cache
    step_s: float = 0.0  # duration of the last step, in seconds
    step_prefill_tokens: int = 0  # prompt tokens computed in the last step
    step_decodes: int = 0  # sequences that decoded in the last step
    ranks: tuple[Load, ...] = ()  # of each data-parallel rank, as far as the engine tells


Tier = Literal["device", "host", "disk"]
TIERS: tuple[Tier, ...] = ("device", "host", "disk")


class KvEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the engine's KV cache. Hashes are the engine's own, u64.

    `token_ids` is set for `stored`: the tokens of all blocks in `hashes`, in order, `block_size` tokens each. If an event has
    more or fewer tokens (an engine that leaves out blocks of a sliding window), another group's event gives the content of its
    blocks. A hash that is stored again while the device holds it is another copy, removed by an event of its own.
    """

    kind: Literal["stored", "removed", "cleared"]
    tier: Tier = "device"
    hashes: Seq[int] = ()
    parent: int | None = None
    token_ids: Seq[int] = ()
    adapter: str | None = None
    salt: str | None = None
    media: Seq[Seq[tuple[int, int]]] = ()  # per block the (digest, offset) of each media item in it; () = no items
    group: int | None = None
    block_size: int | None = None  # tokens per hash; None = the tokens divided evenly among the hashes


class KvBatch(list[KvEvent]):
    """The events of a step, with a number that is contiguous from the engine's start, so that a lost batch shows.

    A batch that begins with `cleared` does not depend on earlier ones. The first batch for a new reader begins so and goes on
    with everything that is cached, under the number of the last batch included; `partial`: the engine may hold more than that.
    """

    __slots__ = ("number", "partial")

    def __init__(self, events: Iterable[KvEvent], number: int, *, partial: bool = False) -> None:
        super().__init__(events)
        self.number = number
        self.partial = partial


@runtime_checkable
class MediaEncoder(Protocol):
    """An engine that can run the encoder of a multimodal model by itself, in the role `encode`."""

    async def encode(self, item: Mapping[str, Any]) -> bytes:
        """Compute the embeddings of a media item (`kind`, `type`, `data`), as `Sequence.embeddings` has them.

        Raises RequestInvalid for an item that cannot be read, UnsupportedByEngine, EngineDead, EngineError.
        """


class Engine(Protocol):
    """An inference engine inside the worker process or in child processes of it."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def start(self, config: EngineConfig, sink: Sink) -> EngineInfo:
        """Load the model. Returns when requests can be served. Raises EngineStartFailed."""

    async def submit(self, sequence: Sequence) -> None:
        """Accept a sequence. Raises RequestInvalid, EngineOverloaded, EngineDead, UnsupportedByEngine."""

    async def abort(self, ids: Seq[str]) -> None:
        """Stop these sequences and free their blocks. No further output of them reaches the sink. Unknown ids are fine."""

    def load(self) -> Load: ...

    async def healthy(self) -> None:
        """Check that the engine can serve. Raises EngineDead if it cannot."""

    async def died(self) -> str:
        """Wait until the engine dies and return the reason. Never returns for a healthy engine."""

    def blamed(self) -> frozenset[str]:
        """Return the ids of the sequences that a dead engine names as the cause. Empty: it cannot tell, or lives.

        An exception or a lack of memory may name them. Requests that are named are tried alone next; others count as innocent.
        """

    def kv_events(self, rank: int = 0) -> AsyncGenerator[KvBatch]:
        """Yield the changes of the KV cache of a data-parallel rank, a batch per step, to one reader at a time.

        The first batch is `cleared` and everything that is cached now. Only with capability `kv_events`. Raises EngineDead.
        """

    async def replay_kv(self, start: int, rank: int = 0) -> list[KvBatch]:
        """Return the kept batches of a rank from number `start` on; the first may have a higher number. Raises EngineError."""

    def meet(self, peers: Mapping[str, bytes]) -> None:
        """Replace the known peers by `peers`: the transfer cards of the pool's live workers, without this worker's own.

        Called after every change of the members. The engine drops its state of workers that are no longer in `peers`.
        """

    async def release(self, sequence_id: str, params: Mapping[str, Any] | None) -> None:
        """Release offered blocks that will not be fetched.

        The prefill side (`params` None) frees them; the decode side notifies the prefill side. Does nothing if there are none
        left. Raises EngineDead.
        """

    async def set_role(self, role: Role) -> None:
        """Change the role. The caller makes sure that the engine has no sequences. Raises UnsupportedByEngine."""

    async def pool(self, item: PoolItem) -> Pooled:
        """Compute the vector of an input, or make its picture or video. Cancelling the call stops the work.

        Only for the kinds in `EngineInfo.kinds`.

        Raises RequestInvalid, EngineOverloaded, EngineDead, UnsupportedByEngine, EngineError.
        """

    async def control(self, op: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run an engine-specific operation (LoRA, sleep, cache reset). Raises UnsupportedByEngine if `op` is unknown."""

    async def stop(self, grace_s: float) -> None:
        """End the engine and every process it started, within `grace_s`."""


# Keeps the outputs of engine steps apart when the event loop was late and several steps have arrived in one turn of it.
#
# An engine's readers then find more than one output of a sequence. The first output of each sequence belongs to the oldest
# step, its second one to the next step, and so on: each step is one call of the sink, as if the loop had been in time.


class EngineSteps:
    """The outputs of one turn of the event loop, by step. Used on the event loop only."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._waiting: list[list[Output]] = []
        self._leaving: deque[list[Output]] = deque()
        self._taken: dict[str, int] = {}  # sequence → its outputs of this turn
        self._loop = asyncio.get_running_loop()

    def add(self, output: Output) -> None:
        """Add an output to its step. The first one of a turn schedules the calls of the sink, at the turn's end."""
        if not self._waiting:
            self._loop.call_soon(self._flush)
        step = self._taken.get(output.id, 0)
        self._taken[output.id] = step + 1
        if step == len(self._waiting):
            self._waiting.append([])
        self._waiting[step].append(output)

    def drop(self, ids: Collection[str]) -> None:
        """Drop the outputs of these sequences, so that none of them reaches the sink any more, in whose call this may be."""
        for step in chain(self._leaving, self._waiting):
            step[:] = [output for output in step if output.id not in ids]

    def clear(self) -> None:
        """Drop all outputs."""
        for step in chain(self._leaving, self._waiting):
            step.clear()

    def _flush(self) -> None:
        self._leaving.extend(self._waiting)
        self._waiting = []
        self._taken.clear()
        while self._leaving:
            if step := self._leaving.popleft():
                self._sink(step)
