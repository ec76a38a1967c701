"""Settings of one worker process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

MOST_LABEL = 64  # characters

SAMPLING = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids"}
)
"""What may have a default of the model's own."""

PrefillMode = Literal["auto", "always", "never"]
Unready = Literal["local", "refuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a worker runs and how. Durations in seconds."""

    engine: str = "sim"
    model: str = ""  # folder or hub id; empty = the engine's bundled one
    served_name: str | None = None  # the name clients use; None = derived from the model
    namespace: str = "default"
    role: str = "aggregated"
    worker_name: str | None = None  # a stable name; the process start is appended. None = random
    drain_grace_s: float = 60.0
    start_timeout_s: float = 900.0  # loading a large model takes minutes
    stall_s: float = 120.0  # the engine has work and reports nothing for so long: it is dead
    first_token_s: float = 300.0  # a sequence that has not got its first token for so long is tried elsewhere …
    token_s: float = 120.0  # … and one that has not got another
    canary_s: float = 30.0  # an engine that had nothing to do for so long gets a request of one token; 0 = never …
    canary_timeout_s: float = 20.0  # … and is dead when that is not answered
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    tool_parser: str = "auto"  # auto: by the model's files; none; or a name that the engine knows
    reasoning_parser: str = "auto"
    metrics_port: int | None = None  # None = no metrics endpoint, 0 = any free port
    separate_frames: bool = False  # token frames on a connection of their own: measured slower, docs/performance.md
    # of the pool's card, which the worker that starts last decides
    aliases: Sequence[str] = ()  # more names that clients may use
    default_sampling: Mapping[str, Any] = field(default_factory=dict)  # over the model's own
    default_max_tokens: int | None = None  # of requests that do not say; None = what fits
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # for the chat template; requests may say otherwise
    labels: Sequence[str] = ()  # what requests may ask for: zone, rack, kind of GPU, …
    # of a decode worker, where no router has decided
    prefill: PrefillMode = "auto"
    prefill_min_tokens: int = 256  # auto: shorter prompts, less what is cached here, are computed here
    prefill_unready: Unready = "local"  # when no prefill worker is ready
    # of every hand-over
    prefill_wait_s: float = 2.0  # how long a decode worker waits for somebody to take the job, at least
    transfer_timeout_s: float = 10.0  # from the hand-over to the first token
    prefill_budget_tokens: int = 0  # what a prefill worker takes at once; 0 = two engine steps

    def __post_init__(self) -> None:
        if self.prefill not in get_args(PrefillMode):
            raise ValueError(f"prefill {self.prefill!r} is none of {', '.join(get_args(PrefillMode))}")
        if self.prefill_unready not in get_args(Unready):
            raise ValueError(f"prefill_unready {self.prefill_unready!r} is none of {', '.join(get_args(Unready))}")
        for name in ("prefill_min_tokens", "prefill_budget_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.canary_s < 0:
            raise ValueError(f"canary_s must be 0 or more, got {self.canary_s}")
        for name in ("prefill_wait_s", "transfer_timeout_s", "first_token_s", "token_s", "canary_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.default_max_tokens is not None and self.default_max_tokens < 1:
            raise ValueError(f"default_max_tokens must be 1 or more, got {self.default_max_tokens}")
        if unknown := self.default_sampling.keys() - SAMPLING:
            raise ValueError(f"default_sampling {min(unknown)!r} is none of {', '.join(sorted(SAMPLING))}")
        for name, value in self.default_sampling.items():
            numbers = value if name == "stop_token_ids" and isinstance(value, Sequence) else (value,)
            if any(isinstance(number, bool | str) or not isinstance(number, int | float) for number in numbers):
                raise ValueError(f"default_sampling {name} must be a number, got {value!r}")
        for label in self.labels:
            if not label.strip() or len(label) > MOST_LABEL or "," in label:
                raise ValueError(f"label {label!r}: 1 to {MOST_LABEL} characters, no comma")
