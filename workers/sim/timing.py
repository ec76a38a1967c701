"""The duration of a simulated step. `docs/simulator.md` gives the sources of the numbers and what they leave out.

    step = (base + prefill tokens / prefill rate + sequences × per sequence + context tokens × per context token) ÷ speed-up

`sequences` are those that decode in the step and `context tokens` is the sum of their lengths.  KV blocks that move between
tiers or engines take their bytes over the line's rate, and between engines some time per descriptor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal


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
        """True when no step takes any time."""
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
