"""The simulator's engine arguments, checked at start.

Values may come as text (from a command line): numbers, booleans and, for `timing_overrides` and `faults`, JSON objects in text
are understood.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec

from headrace.workers.engine import DisaggStyle, Role
from headrace.workers.errors import EngineStartFailed
from headrace.workers.sim.faults import Faults
from headrace.workers.sim.timing import TimingModel, timing_model

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
        """The style of its hand-overs, if it has any."""
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
