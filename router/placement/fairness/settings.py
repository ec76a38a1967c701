"""Declares the settings of fairness: classes of requests and weights of tenants."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import Annotated

from headrace.base.setting import Setting
from headrace.router.errors import need


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
