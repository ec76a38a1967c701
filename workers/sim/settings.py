"""The simulator's engine arguments, checked at start.

Values may come as text (from a command line): numbers, booleans and, for `timing_overrides` and `faults`, JSON objects in text
are understood.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec

from headrace.workers.engine import DisaggStyle, Role
from headrace.workers.errors import EngineDead, EngineOverloaded, EngineStartFailed, RequestInvalid, UnsupportedByEngine

# The duration of a simulated step. `docs/simulator.md` gives the sources of the numbers and what they leave out.
#
#     step = (base + prefill tokens / prefill rate + sequences × per sequence + context tokens × per context token) ÷ speed-up
#
# `sequences` are those that decode in the step and `context tokens` is the sum of their lengths. KV blocks that move between
# tiers or engines take their bytes over the line's rate, and between engines some time per descriptor.


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingModel:
    """The parameters of the timing model.

    Raises ValueError for a negative time or size, a rate or speed-up that is not above zero, or an infinite time.
    """

    prefill_tokens_per_s: float = math.inf
    decode_base_s: float = 0.0  # every step: weights read once, kernels launched, one round of scheduling
    decode_per_sequence_s: float = 0.0
    decode_per_context_token_s: float = 0.0  # reading the KV cache
    kv_bytes_per_token: float = 0.0
    transfer_bytes_per_s: float = math.inf  # rate between engines
    transfer_per_descriptor_s: float = 0.0  # a descriptor names blocks that lie side by side on both ends
    host_bytes_per_s: float = math.inf  # rate from host memory to the device
    disk_bytes_per_s: float = math.inf
    speedup: float = 1.0

    def __post_init__(self) -> None:
        for name in (
            "decode_base_s",
            "decode_per_sequence_s",
            "decode_per_context_token_s",
            "kv_bytes_per_token",
            "transfer_per_descriptor_s",
        ):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {value}")
        for name in ("prefill_tokens_per_s", "transfer_bytes_per_s", "host_bytes_per_s", "disk_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0 < self.speedup < math.inf:
            raise ValueError(f"speedup must be above 0, got {self.speedup}")

    @property
    def instant(self) -> bool:
        return self.step_s(prefill_tokens=1, sequences=1, context_tokens=1) == 0

    def step_s(self, *, prefill_tokens: int, sequences: int, context_tokens: int) -> float:
        """Return the modelled duration of one step."""
        total = (
            self.decode_base_s
            + prefill_tokens / self.prefill_tokens_per_s
            + sequences * self.decode_per_sequence_s
            + context_tokens * self.decode_per_context_token_s
        )
        return total / self.speedup

    def transfer_s(self, *, tokens: int, descriptors: int) -> float:
        """Return the time to move the blocks of this many tokens from one engine to another."""
        moving = tokens * self.kv_bytes_per_token / self.transfer_bytes_per_s
        return (moving + descriptors * self.transfer_per_descriptor_s) / self.speedup

    def load_s(self, tier: Literal["host", "disk"], tokens: int) -> float:
        """Return the time to copy the blocks of this many tokens from a lower tier to the device."""
        rate = self.host_bytes_per_s if tier == "host" else self.disk_bytes_per_s
        return tokens * self.kv_bytes_per_token / rate / self.speedup


PRESETS: Mapping[str, TimingModel] = MappingProxyType(
    {
        "instant": TimingModel(),
        # Measured: vLLM 0.32, SmolLM2-135M bf16, 2 cores: 46 tokens/s alone, 300 with 8; 850 prompt tokens/s over 1,536.
        # Its KV: 30 layers × 3 heads × 64 × 2 (K, V) × 2 bytes. Transfers as NIXL over UCX on such a machine; tiers assumed.
        "cpu-small": TimingModel(
            prefill_tokens_per_s=860.0,
            decode_base_s=0.02104,
            decode_per_sequence_s=0.0007,
            kv_bytes_per_token=23_040.0,
            transfer_bytes_per_s=5e9,
            transfer_per_descriptor_s=8e-6,
            host_bytes_per_s=5e9,
            disk_bytes_per_s=1e9,
        ),
        # Estimated from data sheets, not measured: 8 B parameters in bf16 on one H100 SXM.
        "h100-8b": TimingModel(
            prefill_tokens_per_s=24_000.0,
            decode_base_s=0.007,
            decode_per_sequence_s=0.00003,
            decode_per_context_token_s=5.6e-8,
            kv_bytes_per_token=131_072.0,
            transfer_bytes_per_s=40e9,
            transfer_per_descriptor_s=8e-6,
            host_bytes_per_s=45e9,
            disk_bytes_per_s=6e9,
        ),
    }
)


def timing_model(preset: str, overrides: Mapping[str, float]) -> TimingModel:
    """Return a preset with some of its fields replaced. Raises ValueError naming the preset or the field."""
    if preset not in PRESETS:
        raise ValueError(f"no timing preset {preset!r}; there are {', '.join(PRESETS)}")
    unknown = overrides.keys() - set(TimingModel.__dataclass_fields__)
    if unknown:
        raise ValueError(f"the timing model has no {min(unknown)!r}; it has {', '.join(TimingModel.__dataclass_fields__)}")
    return replace(PRESETS[preset], **overrides)


# Faults that the simulator can be told to have, in each shape real engines have shown.
#
# Token numbers count the answer from 0, emitted tokens of earlier runs included: a sequence that resumes at or behind the
# number has the fault at once, again, as a poisonous request would. `fresh_only` limits a fault to sequences that start at
# token 0.

NEVER = sys.maxsize  # the number of no token
TokenNumber = Annotated[int, msgspec.Meta(ge=0)]
Every = Annotated[int, msgspec.Meta(ge=1)] | None


class SequenceFaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Faults of single sequences; a request may bring its own where the engine's settings allow that."""

    reject: Literal["overloaded", "invalid", "unsupported", "dead"] | None = None  # `submit` raises
    stuck_at_token: TokenNumber | None = None  # keeps its slot and blocks and emits nothing more
    crash_at_token: TokenNumber | None = None  # the process kills itself (SIGKILL) instead of producing this token
    die_at_token: TokenNumber | None = (
        None  # the engine dies instead, the process lives, and this sequence is named as the cause
    )
    fault_at_token: TokenNumber | None = None  # an output with `fault` instead of this token
    fault_code: str = "injected"
    fault_retriable: bool = True
    peer_dead: bool = False  # a decode sequence does not reach the engine that has its blocks
    transfer_breaks: bool = False  # a decode sequence loses that engine at the end of the transfer
    stall_transfer: bool = False  # the transfer never ends, on whichever side the sequence is
    fresh_only: bool = False

    def next_at(self, start: int) -> int:
        """Return the first token number, from `start` on, that one of these faults replaces, or `NEVER`."""
        if self.fresh_only and start > 0:
            return NEVER
        at = NEVER
        for number in (self.stuck_at_token, self.crash_at_token, self.die_at_token, self.fault_at_token):
            if number is not None and number < at:
                at = number
        return max(at, start)


class Faults(SequenceFaults, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Faults of the engine: those of every sequence, and its own."""

    slow: Annotated[float, msgspec.Meta(gt=0)] = 1.0  # factor on the duration of every step
    slow_transfer: Annotated[float, msgspec.Meta(gt=0)] = 1.0  # factor on the duration of every transfer between engines
    kv_drop_every: Every = None  # every n-th batch of KV events is lost
    kv_reorder_every: Every = None  # every n-th batch of KV events comes after the next one
    silent_from_step: Annotated[int, msgspec.Meta(ge=0)] | None = None  # from this step on sequences get nothing
    die_at_step: Annotated[int, msgspec.Meta(ge=0)] | None = None  # the engine is dead from this step on, the process lives


def raise_rejection(faults: SequenceFaults, start: int) -> None:
    """Raise what `reject` asks for, if anything, for a sequence that starts at token `start`."""
    if faults.reject is None or (faults.fresh_only and start > 0):
        return
    errors = {
        "overloaded": EngineOverloaded,
        "invalid": RequestInvalid,
        "unsupported": UnsupportedByEngine,
        "dead": EngineDead,
    }
    raise errors[faults.reject](f"injected fault: {faults.reject}")


Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
BlockBytes = Annotated[int, msgspec.Meta(ge=0, le=64 << 20, multiple_of=64)]

DEFAULT_BLOCK_BYTES = 16384
_MOST_KV_BYTES = 4 << 30  # of real memory, per engine


class SimSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every engine argument of the simulator; `docs/simulator.md` explains them."""

    timing: str = "instant"
    timing_overrides: dict[str, float] = {}
    speedup: Annotated[float, msgspec.Meta(gt=0)] | None = None  # None = the preset's, 1
    block_size: Positive = 32  # tokens
    blocks: Positive = 4096
    slots: Positive = 64  # sequences running at once
    waiting: Positive = 1024  # sequences waiting for a slot; more are refused
    step_tokens: Positive = 8192  # prefill and decode tokens of one step
    context_length: Positive = 32768  # tokens, prompt and answer together
    mean_output_tokens: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # 0 = answers run to max_tokens
    tokenizer_dir: str | None = None  # None = the bundled one
    pooling: Literal["embed", "score", "classify"] | None = None  # make vectors instead of text
    vector_size: Annotated[int, msgspec.Meta(ge=1, le=16384)] = 64  # numbers in an embedding
    classes: Annotated[int, msgspec.Meta(ge=2, le=4096)] = 3  # number of classes of classify
    adapters: list[str] = []  # names that are served besides the model; their answers differ from its own
    media_tokens: Count = 64  # tokens of an image, video or sound in a prompt; 0 = none are taken
    host_blocks: Count = 0  # the tier below the device; 0 = none
    disk_blocks: Count = 0
    disagg: Literal["none", "params", "rendezvous"] | None = None  # hand-overs; None: none if it starts aggregated
    transfer_mode: Literal["push", "pull"] = "push"  # params: prefill pushes the blocks, or decode pulls them
    fabric: Literal["nixl", "local"] = "nixl"  # between processes, or within this one
    kv_block_bytes: BlockBytes | None = None  # real ones, moved by NIXL; 0 = a stamp; None = 16384, with the fabric local 0
    engine_id: str | None = None  # on the fabric; None = a random one
    lease_s: Seconds = 30.0  # how long a prefill engine keeps blocks that are not fetched
    handshake_timeout_s: Seconds = 5.0  # how long a decode engine tries to reach a dead one
    transfer_timeout_s: Seconds = 30.0  # how long one transfer may take
    room_timeout_s: Seconds = 30.0  # how long either side waits for the other
    load_failure: Literal["fail", "recompute"] = "fail"  # params: when blocks do not come
    kv_replay_batches: Count = 256  # KV event batches that can be asked for again
    sleep_frees_memory: bool = True
    script: str = ""  # a file of rules: which answer a prompt gets; empty = none
    profile_dir: str = ""  # where profiles of its steps are written; empty = none can be taken
    faults: Faults = Faults()
    allow_request_faults: bool = False

    def timing_model(self) -> TimingModel:
        """Build the timing model of these settings. Raises ValueError."""
        model = timing_model(self.timing, self.timing_overrides)
        return model if self.speedup is None else replace(model, speedup=self.speedup)

    @property
    def style(self) -> DisaggStyle:
        return DisaggStyle(self.disagg or "params")

    @property
    def block_bytes(self) -> int:
        """Real bytes of a block; 0 = only as many as are needed to tell blocks apart."""
        if self.kv_block_bytes is not None:
            return self.kv_block_bytes
        return DEFAULT_BLOCK_BYTES if self.fabric == "nixl" else 0

    def hands_over(self, role: Role) -> bool:
        """Return true when an engine started in this role can change roles. Raises EngineStartFailed for a contradiction."""
        if self.disagg == "none" and role is not Role.AGGREGATED:
            raise EngineStartFailed(f"an engine in the role {role.value} must hand over: disagg='none'")
        return self.disagg not in (None, "none") or role is not Role.AGGREGATED


def parse_settings(args: Mapping[str, Any]) -> SimSettings:
    """Read and validate engine arguments. Raises EngineStartFailed naming the argument and its value."""
    values = dict(args)
    for name in ("faults", "timing_overrides"):
        if isinstance(values.get(name), str):
            try:
                values[name] = msgspec.json.decode(values[name])
            except msgspec.DecodeError as error:
                raise EngineStartFailed(f"simulator argument {name}={values[name]!r} is not JSON: {error}") from None
    for name, value in values.items():
        if name not in SimSettings.__struct_fields__:
            close = difflib.get_close_matches(name.replace("-", "_"), SimSettings.__struct_fields__, n=3, cutoff=0.6)
            hint = f"close to it: {', '.join(close)}" if close else f"it has {', '.join(SimSettings.__struct_fields__)}"
            raise EngineStartFailed(f"the simulator has no argument {name!r}; {hint}")
        try:
            msgspec.convert({name: value}, SimSettings, strict=False)
        except msgspec.ValidationError as error:
            raise EngineStartFailed(f"simulator argument {name}={value!r}: {error}") from None
    settings = msgspec.convert(values, SimSettings, strict=False)
    try:
        settings.timing_model()
    except ValueError as error:
        raise EngineStartFailed(f"simulator timing: {error}") from None
    if 0 < settings.mean_output_tokens < 1:
        raise EngineStartFailed(
            f"simulator argument mean_output_tokens={settings.mean_output_tokens}: an answer has at least 1 token; "
            "0 lets answers run to max_tokens"
        )
    if settings.step_tokens < settings.slots:
        raise EngineStartFailed(
            f"step_tokens={settings.step_tokens} is below slots={settings.slots}: each running sequence takes a token of a step"
        )
    if settings.block_bytes * settings.blocks > _MOST_KV_BYTES:
        raise EngineStartFailed(
            f"kv_block_bytes={settings.block_bytes} × blocks={settings.blocks} is more than {_MOST_KV_BYTES >> 30} GiB"
        )
    room = settings.blocks * settings.block_size
    if settings.context_length > room:
        raise EngineStartFailed(
            f"context_length={settings.context_length} does not fit into blocks={settings.blocks} of "
            f"block_size={settings.block_size} ({room} tokens)"
        )
    return settings
