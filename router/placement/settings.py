"""Declares the settings of a scheduler. Each value is checked once, here; SettingsInvalid names the setting and the value."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import Annotated, Literal, get_args

from headrace.base.setting import Setting
from headrace.router.errors import need
from headrace.router.index.types import TIERS, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class FairClass:
    """A class of requests. Classes of equal rank are served as one."""

    name: str
    rank: int
    ageing_s: float = inf  # after this wait it is owed a share; inf = never
    always_first: bool = False


DEFAULT_CLASSES = (
    FairClass(name="re", rank=0, always_first=True),
    FairClass(name="hi", rank=1, ageing_s=20.0),
    FairClass(name="std", rank=2, ageing_s=60.0),
)
BATCH_RANKS = (FairClass(name="rb", rank=0), FairClass(name="batch", rank=1))  # behind all others, and without ageing


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessSettings:
    """Raises SettingsInvalid naming the setting and the value. A class that is not listed is treated as the last one."""

    classes: tuple[FairClass, ...] = DEFAULT_CLASSES
    aged_share: float = 0.25  # of the tokens placed, for requests that have aged while better classes wait
    batch_share: Annotated[
        float,
        Setting(
            "Share of the placed tokens for batch requests while interactive ones wait.",
            "--batch-share",
            least=0.0001,
            most=0.9999,
        ),
    ] = 0.02
    batch_patience_s: float = 1.0  # interactive requests must have waited so long before batch requests get their share
    weights: Annotated[
        Mapping[str, float],
        Setting(
            "Relative share of a tenant under load; 1 by default. Repeatable.",
            "--tenant-weight",
            metavar="TENANT=WEIGHT",
            names=True,
            key="tenant_weights",
        ),
    ] = field(default_factory=lambda: MappingProxyType({}))
    default_weight: float = 1.0
    slack_tokens: float = 32_768.0  # by tokens over weight
    tight_s: float = 30.0
    default_output_tokens: float = 256.0  # predicted before any answer was seen
    output_smoothing: float = 0.05
    idle_tenants: int = 4096  # remembered
    open_charges: int = 65_536  # placed requests whose charge can still be corrected

    def __post_init__(self) -> None:
        for name in ("aged_share", "batch_share"):
            need(0 < getattr(self, name) < 1, name, getattr(self, name), "between 0 and 1")
        need(0 < self.default_weight < inf, "default_weight", self.default_weight, "above 0")
        for tenant, weight in self.weights.items():
            need(0 < weight < inf, f"weights[{tenant!r}]", weight, "above 0")
        for name in ("slack_tokens", "tight_s", "default_output_tokens", "batch_patience_s"):
            need(0 <= getattr(self, name) < inf, name, getattr(self, name), "0 or more")
        need(0 < self.output_smoothing <= 1, "output_smoothing", self.output_smoothing, "above 0 and at most 1")
        for name in ("idle_tenants", "open_charges"):
            need(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        names = [one.name for one in self.classes]
        need(len(names) > 0 and len(set(names)) == len(names), "classes", names, "one or more, each once")
        for one in self.classes:
            need(one.ageing_s > 0, f"classes[{one.name!r}].ageing_s", one.ageing_s, "above 0")
        first = [one.rank for one in self.classes if one.always_first]
        others = [one.rank for one in self.classes if not one.always_first]
        need(not first or not others or max(first) < min(others), "classes", names, "ranked with always_first ones in front")


PolicyName = Literal["kv", "least-loaded", "round-robin", "random", "power-of-two", "direct"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
Binding = Literal["late", "early"]
PrefillMode = Literal["auto", "always", "never"]
Unready = Literal["local", "wait", "refuse"]

LEAST_S = 1e-9  # no coefficient of a worker's speed is smaller
MOST_S = 1e3  # no coefficient is larger

_NONE: Mapping[str, int] = MappingProxyType({})
_SHARES: Mapping[str, float] = MappingProxyType({"hi": 0.9, "std": 0.7})


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionSettings:
    """Limits of the backlog. Tokens are uncached prompt tokens; 0 tokens = no limit.

    Raises SettingsInvalid naming the setting and the value.

    The shares leave room in the window for others: a flood of one tenant, or of all worse classes together, does not shut out
    a better class, nor the other way round. A limit of tokens never refuses a request that would wait alone (of its tenant, of
    its class), however long it is.
    """

    window: int = 2048  # requests in all; those of protected classes are let in beyond it
    tenant_share: float = 0.7  # of the window, for one tenant
    tenant_requests: Annotated[
        int,
        Setting(
            "Most waiting requests of a tenant in a router while others wait; more are refused. 0: 70 % of the window.",
            "--tenant-requests",
            least=0,
        ),
    ] = 0  # 0 = by its share
    tenant_tokens: int = 0
    tenant_requests_of: Mapping[str, int] = field(default_factory=lambda: _NONE)  # of particular tenants instead
    tenant_tokens_of: Mapping[str, int] = field(default_factory=lambda: _NONE)
    class_share: Mapping[str, float] = field(default_factory=lambda: _SHARES)  # of the window; all of it for others
    class_requests: Mapping[str, int] = field(default_factory=lambda: _NONE)  # of particular classes instead
    class_tokens: Mapping[str, int] = field(default_factory=lambda: _NONE)
    protected: frozenset[str] = frozenset({"re", "rb", "batch"})  # classes refused for nothing but a deadline that has passed
    hopeless: bool = True  # refuse requests that are predicted to start after their deadline
    hopeless_factor: float = 1.0  # the prediction must exceed the time that is left by this factor
    drain_to: float = 0.75  # of a limit: "come back" when the backlog has fallen to that
    retry_least_s: float = 1.0
    retry_most_s: float = 60.0
    retry_unknown_s: float = 5.0  # while the pool's speed is not known
    jitter: float = 0.2  # up to this part longer, by request id, so that those refused together do not return together

    def __post_init__(self) -> None:
        need(self.window >= 1, "window", self.window, "1 or more")
        for name in ("tenant_requests", "tenant_tokens"):
            need(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        need(0 < self.tenant_share <= 1, "tenant_share", self.tenant_share, "above 0 and at most 1")
        for key, share in self.class_share.items():
            need(0 < share <= 1, f"class_share[{key!r}]", share, "above 0 and at most 1")
        for name in ("tenant_requests_of", "tenant_tokens_of", "class_requests", "class_tokens"):
            for key, value in getattr(self, name).items():
                need(value >= 0, f"{name}[{key!r}]", value, "0 or more")
        need(0 < self.hopeless_factor < inf, "hopeless_factor", self.hopeless_factor, "above 0")
        need(0 <= self.drain_to < 1, "drain_to", self.drain_to, "from 0 to below 1")
        need(0 <= self.jitter <= 1, "jitter", self.jitter, "from 0 to 1")
        need(0 < self.retry_least_s < inf, "retry_least_s", self.retry_least_s, "above 0")
        most = self.retry_most_s
        need(self.retry_least_s * (1 + self.jitter) <= most < inf, "retry_most_s", most, "above retry_least_s and its jitter")
        need(0 < self.retry_unknown_s < inf, "retry_unknown_s", self.retry_unknown_s, "above 0")

    def most_of_tenant(self, tenant: str) -> int:
        share = max(1, int(self.window * self.tenant_share))
        return self.tenant_requests_of.get(tenant, self.tenant_requests or share)

    def most_of_class(self, name: str) -> int:
        return self.class_requests.get(name, max(1, int(self.window * self.class_share.get(name, 1.0))))


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSettings:
    """Settings of the calibration. Raises SettingsInvalid naming the setting and the value.

    The first three are assumed of a worker that has reported nothing, while no other worker of the pool has either.
    """

    base_s: float = 0.008
    prefill_tokens_per_s: float = 24_000.0
    per_decode_s: float = 0.00008
    forgetting: float = 0.99  # per sample: about the last 100 count
    prior_samples: float = 4.0  # weight of the prior at first, in samples
    min_samples: int = 5  # before these the prior is used as it is
    most_step_s: float = 60.0  # a longer step is not believed

    def __post_init__(self) -> None:
        for name in ("base_s", "per_decode_s"):
            need(LEAST_S <= getattr(self, name) <= MOST_S, name, getattr(self, name), f"from {LEAST_S} to {MOST_S}")
        rate = self.prefill_tokens_per_s
        need(1 / MOST_S <= rate <= 1 / LEAST_S, "prefill_tokens_per_s", rate, f"from {1 / MOST_S} to {1 / LEAST_S:g}")
        need(0.5 <= self.forgetting < 1, "forgetting", self.forgetting, "from 0.5 to below 1")
        need(0 < self.prior_samples < inf, "prior_samples", self.prior_samples, "above 0")
        need(self.min_samples >= 1, "min_samples", self.min_samples, "1 or more")
        need(0 < self.most_step_s <= MOST_S, "most_step_s", self.most_step_s, f"above 0 and at most {MOST_S}")


def _tier_weights() -> Mapping[Tier, float]:
    return {"device": 1.0, "host": 0.75, "disk": 0.25}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Settings of placement. `docs/routing.md` explains each figure and its origin."""

    policy: Annotated[
        PolicyName | str,
        Setting(
            "Choice of a worker: by cached prefix and load, by load, in turn, at random, the better of two, as "
            "requests say, or a function of your own.",
            "--policy",
            other="MODULE:FUNCTION",
        ),
    ] = "kv"
    temperature: Annotated[
        float,
        Setting(
            "Softness of the choice: 0 is always the cheapest worker.",
            "--placement-temperature",
            least=0,
        ),
    ] = 0.0
    max_wait_s: Annotated[
        float,
        Setting(
            "Wait after which a request goes first and no longer waits for a cache.",
            least=0.1,
        ),
    ] = 60.0
    tiers: Annotated[
        Mapping[Tier, float],
        Setting(
            "Part of a block's prefill that a tier saves. Default: device=1, host=0.75, disk=0.25. Repeatable.",
            "--tier-weight",
            metavar="TIER=PART",
            key="tier_weights",
        ),
    ] = field(default_factory=_tier_weights)
    binding: Binding = "late"  # early: a request is placed when it comes, whether or not a worker has room
    candidates: int = 128  # waiting requests looked at in one decision
    lookahead: float = 0.1  # of a step's tokens: a worker with less pending prefill than that may get more
    lookahead_s: float = 0.02  # a worker with less than this of it may, too: a placement takes a few milliseconds to arrive
    batch_reserve: Annotated[
        float,
        Setting(
            "Part of a worker's slots and KV blocks that batch requests leave free.",
            least=0,
            most=0.9,
        ),
    ] = 0.02
    batch_lookahead_s: float = 0.01  # a worker with less prefill than this may get a batch request
    batch_quiet_s: float = 5.0  # without interactive work for so long, one with less than `lookahead` may get one
    spare_slots: int = 0  # requests that may be on their way to a worker whose slots are full
    thrift: float = 0.25  # cost of prefill work to requests that may come, even while nothing waits
    congestion: float = 5.0  # cost of prefill work to requests that wait, per waiting request and worker
    disturbance: float = 0.02  # cost of prefill to each request that runs beside it, in parts of itself
    balance: float = 1.5  # how strongly uneven shares of recent work repel, while nothing waits
    balance_horizon: float = 2000.0  # requests
    ageing: float = 0.01  # seconds of prefill that a second of waiting outweighs
    ttft_target_s: Annotated[
        float,
        Setting(
            "With several worker groups: default target of the time to first token.",
            "--ttft-target",
            least=0,
            after="router.prefill_unready",
        ),
    ] = 1.0
    itl_target_s: Annotated[
        float,
        Setting("Likewise: of the time between two tokens.", "--itl-target", least=0),
    ] = 0.1
    target_margin: float = 0.1  # part of a time to first token that is kept back for errors of its prediction
    promise: float = 0.15  # with several fleets: part of a predicted time to first token that later placements may add to it
    stale_s: float = 2.0  # of a worker whose last report is older nothing is predicted
    session_slack: float = 0.25  # a session's worker may cost so much more (relative) and is still preferred
    no_worker_s: float = 10.0  # a request that no live worker may take is given up after so long
    turn_s: float = 0.003  # with several routers: how long the others leave a worker that has just got room to one of them
    entry_expiry_s: float = 5.0  # a placement that is never confirmed counts so long
    explained: int = 4096  # requests whose decisions are remembered
    prefill: Annotated[
        PrefillMode,
        Setting(
            "Whether prefill workers compute prompts: when it pays, whenever they can, or never. `up` tells its workers.",
            "--prefill",
            after="router.start_timeout_s",
        ),
    ] = "auto"
    prefill_min_tokens: Annotated[
        int,
        Setting(
            "With auto: prompts with fewer uncached tokens are computed by the answering worker. `up` tells its workers.",
            "--prefill-min-tokens",
            least=0,
        ),
    ] = 128
    prefill_unready: Annotated[
        Unready,
        Setting(
            "Without a ready prefill worker, prompts are computed by the answering worker (local), wait, or are "
            "refused. `up` tells its workers, except wait.",
            "--prefill-unready",
        ),
    ] = "local"
    prefill_disturbance: float = 0.1  # cost of prefill to each sequence decoded beside it, in parts of itself
    prefill_itl_s: float = 0.05  # the longest time between two tokens that is thought good
    prefill_patience_s: float = 0.05  # delay of a first token that is worth it to leave sequences being decoded alone
    prefill_bearable_s: float = 1.5  # a first token may take so long remotely, before it makes a step too long for others
    prefill_late: float = 2.0  # cost of each step longer than `prefill_itl_s` to each sequence, in parts of the step
    prefill_lookahead_s: float = 0.1  # a prefill worker with less than this before it has room
    prefill_dispatch_s: float = 0.01  # from a placement until a prefill worker with nothing to do has its job
    prefill_wait_s: float = 10.0  # the longest a decode worker is told to wait for a prefill worker to take a job
    handover_s: float = 0.03  # assumed until reports tell: from blocks that are ready to the first token
    handover_token_s: float = 5e-6  # assumed likewise, for each token fetched
    prefill_zone_token_s: Annotated[
        float,
        Setting(
            "Additional seconds per token of a KV transfer between zones; 0: none.",
            least=0,
        ),
    ] = 2e-5
    fairness: FairnessSettings = field(default_factory=FairnessSettings)
    limits: AdmissionSettings = field(default_factory=lambda: AdmissionSettings(class_share={}))
    calibration: CalibrationSettings = field(default_factory=CalibrationSettings)

    def __post_init__(self) -> None:
        own = ":" in self.policy
        need(own or self.policy in POLICIES, "policy", self.policy, f"one of {', '.join(POLICIES)}, or MODULE:FUNCTION")
        need(self.binding in get_args(Binding), "binding", self.binding, "late or early")
        need(self.prefill in get_args(PrefillMode), "prefill", self.prefill, "auto, always or never")
        need(self.prefill_unready in get_args(Unready), "prefill_unready", self.prefill_unready, "local, wait or refuse")
        need(0 <= self.batch_reserve < 1, "batch_reserve", self.batch_reserve, "from 0 to below 1")
        need(0 <= self.target_margin < 1, "target_margin", self.target_margin, "from 0 to below 1")
        need(self.prefill_min_tokens >= 0, "prefill_min_tokens", self.prefill_min_tokens, "0 or more")
        for name in ("candidates", "explained"):
            need(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        for name in (
            "lookahead",
            "lookahead_s",
            "batch_lookahead_s",
            "batch_quiet_s",
            "balance_horizon",
            "max_wait_s",
            "no_worker_s",
            "entry_expiry_s",
            "prefill_lookahead_s",
            "prefill_wait_s",
            "handover_s",
            "handover_token_s",
            "stale_s",
        ):
            need(0 < getattr(self, name) < inf, name, getattr(self, name), "above 0")
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
            "ttft_target_s",
            "itl_target_s",
            "promise",
            "prefill_itl_s",
            "prefill_disturbance",
            "prefill_late",
            "prefill_patience_s",
            "prefill_bearable_s",
            "prefill_dispatch_s",
            "prefill_zone_token_s",
        ):
            need(0 <= getattr(self, name) < inf, name, getattr(self, name), "0 or more")
        for tier, weight in self.tiers.items():
            need(tier in TIERS, "tiers", tier, f"one of {', '.join(TIERS)}")
            need(0 <= weight <= 1, f"tiers[{tier!r}]", weight, "between 0 and 1")
