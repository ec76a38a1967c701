"""The policies that are compared; each makes the routers that have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

from headrace.router.errors import SettingsInvalid
from headrace.router.index.factory import create_index
from headrace.router.index.types import CacheView
from headrace.router.index.view import Caches
from headrace.router.placement.scheduler import Scheduler
from headrace.router.placement.settings import SchedulerSettings
from headrace.tools.replay_bench.classic import Classic, ClassicWeights
from headrace.tools.replay_bench.dynamo import Dynamo, DynamoCore, MirroredCaches
from headrace.tools.replay_bench.ports import Router, Scheduling

T = TypeVar("T")

OURS = "kv"
CLASSIC = "classic"
OTHERS = ("least-loaded", "round-robin", "random", "power-of-two")
ALL = (OURS, CLASSIC, *OTHERS)
EARLY = "+early"
DYNAMO = "dynamo"  # beside ALL, where Dynamo is installed
SWEPT = (CLASSIC, DYNAMO)  # have weights, of which the best count


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy of the comparison. `name` is one of ALL, perhaps with EARLY behind it: a request goes to its worker at once.

    It may be DYNAMO, too, with Dynamo's `core`. `weights` are those of `classic` and `dynamo`, which are early by themselves;
    `settings` are further ones of the scheduler, by dotted name.
    `make_scheduler` and `make_view` replace the real scheduler and view.
    """

    name: str
    weights: ClassicWeights = field(default_factory=ClassicWeights)
    settings: Mapping[str, Any] = field(default_factory=dict)
    core: DynamoCore | None = None
    make_scheduler: Callable[[CacheView, str, int], Scheduling] | None = None
    make_view: Callable[[], CacheView] | None = None

    def __post_init__(self) -> None:
        if self.name == DYNAMO:
            if self.core is None:
                raise SettingsInvalid(f"policy {self.name!r} needs Dynamo's core")
            return
        if self.name.removesuffix(EARLY) not in ALL or self.name == CLASSIC + EARLY:
            raise SettingsInvalid(f"policy {self.name!r}: there are {', '.join(ALL)}, those of the scheduler also with {EARLY}")

    @property
    def label(self) -> str:
        return f"{self.name} ({self.weights})" if self.name in SWEPT else self.name

    def router(self, name: str, seed: int) -> Router:
        """Make a router with an empty view. Raises SettingsInvalid."""
        if self.core is not None:
            mirrored = MirroredCaches(self.core)
            return Router(name=name, scheduler=Dynamo(mirrored, self.core, weights=self.weights, name=name), view=mirrored)
        view = Caches(create_index()) if self.make_view is None else self.make_view()
        if self.name == CLASSIC:
            scheduler: Scheduling = Classic(view, weights=self.weights, name=name, seed=seed)
        elif self.make_scheduler is not None:
            scheduler = self.make_scheduler(view, name, seed)
        else:
            scheduler = Scheduler(self.scheduler_settings(), view, name=name, seed=seed)
        return Router(name=name, scheduler=scheduler, view=view)

    def scheduler_settings(self) -> SchedulerSettings:
        """Make the settings of the scheduler. Raises SettingsInvalid for one that does not exist or cannot have its value."""
        own = {"policy": self.name.removesuffix(EARLY)}
        if self.name.endswith(EARLY):
            own["binding"] = "early"
        return changed(SchedulerSettings(), {**self.settings, **own})


def changed(settings: T, values: Mapping[str, Any]) -> T:
    """Change values of a settings record; `a.b` is the field `b` of the record in the field `a`. Raises SettingsInvalid."""
    known = {f.name for f in fields(settings)}  # type: ignore[arg-type]  # every caller has a dataclass
    own: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        head, dot, rest = name.partition(".")
        if head not in known:
            raise SettingsInvalid(f"no setting {head!r} in {type(settings).__name__}; there are {', '.join(sorted(known))}")
        if dot:
            nested.setdefault(head, {})[rest] = value
        else:
            own[head] = value
    for head, inner in nested.items():
        record = own.get(head, getattr(settings, head))
        if not is_dataclass(record):
            raise SettingsInvalid(f"setting {head!r} of {type(settings).__name__} has no parts, so no {', '.join(inner)}")
        own[head] = changed(record, inner)
    try:
        return replace(settings, **own)  # type: ignore[type-var]
    except TypeError as error:
        raise SettingsInvalid(f"{own!r} do not fit {type(settings).__name__}: {error}") from None
