"""What a scheduler can be told. Every value is checked once, here; SettingsInvalid names the setting and the value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal, get_args

from headrace.router.errors import SettingsInvalid
from headrace.router.index.types import TIERS, Tier
from headrace.router.placement.admission import AdmissionSettings
from headrace.router.placement.calibration import CalibrationSettings
from headrace.router.placement.fairness.settings import FairnessSettings

PolicyName = Literal["kv", "least-loaded", "round-robin", "random", "power-of-two", "direct"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
Binding = Literal["late", "early"]
PrefillMode = Literal["auto", "always", "never"]
Unready = Literal["local", "wait", "refuse"]


def _tier_weights() -> Mapping[Tier, float]:
    return {"device": 1.0, "host": 0.75, "disk": 0.25}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """How requests are placed. `docs/routing.md` explains each figure and where it comes from."""

    policy: PolicyName = "kv"
    binding: Binding = "late"  # early: a request is placed when it comes, whether or not a worker has room
    candidates: int = 128  # waiting requests looked at in one decision
    lookahead: float = 0.1  # of a step's tokens: a worker with less prefill before it than that may get more …
    lookahead_s: float = 0.02  # … or with less than this many seconds of it: a placement takes a few milliseconds to arrive
    spare_slots: int = 0  # requests that may be on their way to a worker whose slots are full
    thrift: float = 0.25  # what prefill work costs those who may come, even while nothing waits
    congestion: float = 5.0  # what prefill work costs those who wait, per waiting request and worker
    disturbance: float = 0.02  # what prefill costs each request that runs beside it, in parts of itself
    balance: float = 1.5  # how strongly uneven shares of recent work repel, while nothing waits
    balance_horizon: float = 2000.0  # requests
    ageing: float = 0.01  # seconds of prefill that a second of waiting outweighs
    max_wait_s: float = 60.0  # after which a request comes before all that have waited less, and waits for no cache
    tiers: Mapping[Tier, float] = field(default_factory=_tier_weights)  # part of the prefill that a block of a tier saves
    temperature: float = 0.0  # 0: always the cheapest; above: softly, cheaper ones more often
    session_slack: float = 0.25  # a session's worker may cost so much more (relative) and is still preferred
    no_worker_s: float = 10.0  # a request that no live worker may take is given up after so long
    turn_s: float = 0.003  # with several routers: how long the others leave a worker that has just got room to one of them
    entry_expiry_s: float = 5.0  # a placement that nobody confirms counts so long
    explained: int = 4096  # decisions remembered
    prefill: PrefillMode = "auto"  # whether prefill workers compute prompts: when it pays, whenever they can, or not at all
    prefill_unready: Unready = "local"  # while none is ready: compute the prompt where it is answered, wait, or refuse
    prefill_min_tokens: int = 128  # `auto` leaves prompts with less than this uncached to the worker that answers them
    prefill_disturbance: float = 0.1  # what prefill costs each sequence decoded beside it, in parts of itself
    prefill_itl_s: float = 0.05  # the longest time between two tokens that is thought good …
    prefill_patience_s: float = 0.05  # how much later a first token may come, so that those who decode are left in peace
    prefill_bearable_s: float = 1.5  # a first token may take so long elsewhere, before others get too long a step for its sake
    prefill_late: float = 2.0  # … and what each longer step costs each sequence, in parts of the step
    prefill_lookahead_s: float = 0.1  # a prefill worker with less than this before it has room
    prefill_dispatch_s: float = 0.01  # from a placement until a prefill worker with nothing to do has its job
    prefill_wait_s: float = 10.0  # the longest a decode worker is told to wait for somebody to take a job
    handover_s: float = 0.03  # assumed until reports tell: from blocks that are ready to the first token …
    handover_token_s: float = 5e-6  # … and for each token fetched
    fairness: FairnessSettings = field(default_factory=FairnessSettings)
    limits: AdmissionSettings = field(default_factory=lambda: AdmissionSettings(class_share={}))
    calibration: CalibrationSettings = field(default_factory=CalibrationSettings)

    def __post_init__(self) -> None:
        _need(self.policy in POLICIES, "policy", self.policy, f"one of {', '.join(POLICIES)}")
        _need(self.binding in get_args(Binding), "binding", self.binding, "late or early")
        _need(self.prefill in get_args(PrefillMode), "prefill", self.prefill, "auto, always or never")
        _need(self.prefill_unready in get_args(Unready), "prefill_unready", self.prefill_unready, "local, wait or refuse")
        _need(self.prefill_min_tokens >= 0, "prefill_min_tokens", self.prefill_min_tokens, "0 or more")
        for name in ("candidates", "explained"):
            _need(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        for name in (
            "lookahead",
            "lookahead_s",
            "balance_horizon",
            "max_wait_s",
            "no_worker_s",
            "entry_expiry_s",
            "prefill_lookahead_s",
            "prefill_wait_s",
            "handover_s",
            "handover_token_s",
        ):
            _need(0 < getattr(self, name) < inf, name, getattr(self, name), "above 0")
        for name in (
            "spare_slots",
            "thrift",
            "congestion",
            "disturbance",
            "balance",
            "ageing",
            "temperature",
            "session_slack",
            "turn_s",
            "prefill_itl_s",
            "prefill_disturbance",
            "prefill_late",
            "prefill_patience_s",
            "prefill_bearable_s",
            "prefill_dispatch_s",
        ):
            _need(0 <= getattr(self, name) < inf, name, getattr(self, name), "0 or more")
        for tier, weight in self.tiers.items():
            _need(tier in TIERS, "tiers", tier, f"one of {', '.join(TIERS)}")
            _need(0 <= weight <= 1, f"tiers[{tier!r}]", weight, "between 0 and 1")


def _need(holds: bool, name: str, value: object, what: str) -> None:
    if not holds:
        raise SettingsInvalid(f"{name} must be {what}, got {value!r}")
