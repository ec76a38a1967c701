"""The policies that are compared; each makes the routers that have it."""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar, cast

import msgspec

from headrace.broker.messages.events import JobEvent
from headrace.router.errors import RouterError, SettingsInvalid
from headrace.router.index.types import CacheView, Tier
from headrace.router.index.view import Caches, create_index
from headrace.router.placement.scheduler import Scheduler
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.types import Waiting, WorkerInfo
from headrace.tools.replay_bench.classic import Classic, ClassicWeights, Router, Scheduling

# The policy `dynamo`: the selection core of NVIDIA Dynamo itself, in a process of its own, in the place of `classic`.
#
# It binds early, and is told what Dynamo's frontend and workers would tell it: cache changes as events, the end of a prefill
# and the end of a request. `dynamo_driver` drives it. Everything else is as Dynamo has it by default, so output blocks are
# not tracked, and placed blocks count only when an event says so. Beside each decision stands what `classic`, with the same
# events and without predictions, makes of it.

DRIVER = Path(__file__).with_name("dynamo_driver.py")
ANSWER_S = 60.0
SEND_BYTES = 1 << 16  # so much is gathered before it is sent

_SETTINGS = {"DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS": str(365 * 86_400), "DYN_LOG": "error"}


class DynamoFailed(RouterError):
    """Dynamo's selection core is not there, does not answer, or has failed."""


class DynamoFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Decisions of Dynamo's core, and how many of them agree with `classic` in the blocks that the chosen worker has cached and
    in use, and in that no worker costs less. `took_s` is the median from the call to the result, in Dynamo's process."""

    decisions: int
    same_cached: int
    same_in_use: int
    lowest: int
    took_s: float


class DynamoCore:
    """Runs the driver and speaks with it. One replay after the other can use it. Raises DynamoFailed, as all methods do."""

    def __init__(self, python: Path, driver: Path = DRIVER) -> None:
        if not python.is_file():
            raise DynamoFailed(f"no Dynamo: there is no {python}; `headrace bench compare dynamo` installs it")
        self._folder = tempfile.TemporaryDirectory()
        self._log = Path(self._folder.name, "log")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")} | _SETTINGS
        command = [str(python), "-P", str(driver), self._folder.name]  # our folder has modules of common names
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment
            )
        self._to = cast("IO[bytes]", self._process.stdin).fileno()
        self._from = cast("IO[bytes]", self._process.stdout).fileno()
        os.set_blocking(self._to, False)
        self._gathered = bytearray()
        self._counts = dict.fromkeys(("same_cached", "same_in_use", "lowest"), 0)
        self._took: list[float] = []

    def __enter__(self) -> DynamoCore:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        with self._process, self._folder:
            """Wait for its end, and remove its folder."""

    def tell(self, do: str, **more: object) -> None:
        """Send the driver a message without a reply, buffered."""
        self._gathered += msgspec.json.encode({"do": do, **more}) + b"\n"
        if len(self._gathered) >= SEND_BYTES:
            self._send()

    def select(self, **request: object) -> Mapping[str, Any]:
        self.tell("select", **request)
        self._send()
        line = bytearray()
        while not line.endswith(b"\n"):
            if not select.select([self._from], [], [], ANSWER_S)[0]:
                raise DynamoFailed(f"no answer from Dynamo within {ANSWER_S:g} s{self._last_words()}")
            part = os.read(self._from, SEND_BYTES)
            if not part:
                raise DynamoFailed(f"Dynamo's process has ended{self._last_words()}")
            line += part
        answer: dict[str, Any] = msgspec.json.decode(line)
        if "fault" in answer:
            raise DynamoFailed(f"Dynamo: {answer['fault']}")
        self._took.append(answer["took_s"])
        return answer

    def note(self, **agrees: bool) -> None:
        for name, agreed in agrees.items():
            self._counts[name] += agreed

    def facts(self) -> DynamoFacts:
        took = sorted(self._took)
        return DynamoFacts(decisions=len(took), took_s=took[len(took) // 2] if took else 0.0, **self._counts)

    def _send(self) -> None:
        left = memoryview(bytes(self._gathered))
        self._gathered.clear()
        while left:
            if not select.select([], [self._to], [], ANSWER_S)[1]:
                raise DynamoFailed(f"Dynamo has read nothing for {ANSWER_S:g} s{self._last_words()}")
            try:
                left = left[os.write(self._to, left) :]
            except BrokenPipeError:
                raise DynamoFailed(f"Dynamo's process has ended{self._last_words()}") from None

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""


class MirroredCaches(Caches):
    """Keeps the caches, and passes their changes on to Dynamo's core."""

    def __init__(self, core: DynamoCore) -> None:
        super().__init__(create_index())
        self._core = core

    def apply(
        self,
        worker: str,
        *,
        cleared: bool = False,
        removed: Mapping[Tier, Sequence[int]],
        stored: Mapping[Tier, Sequence[int]],
        now_s: float,
    ) -> None:
        super().apply(worker, cleared=cleared, removed=removed, stored=stored, now_s=now_s)
        changes = {"stored": list(stored.get("device", ())), "removed": list(removed.get("device", ()))}
        self._core.tell("cache", worker=worker_id(worker), **changes)


class Dynamo(Classic):
    """Places where Dynamo's core says. There can be one router."""

    least_uncached = 0

    def __init__(self, view: MirroredCaches, core: DynamoCore, *, weights: ClassicWeights, name: str = "") -> None:
        super().__init__(view, weights=weights, name=name)
        self._core = core
        core.tell("begin", scale=weights.scale, credit=weights.credit)

    def set_routers(self, names: Iterable[str]) -> None:
        """Refuse a second router. Raises SettingsInvalid."""
        if len(list(names)) > 1:
            raise SettingsInvalid("policy 'dynamo' has one router: its cores would have to be connected")

    def put_worker(self, info: WorkerInfo, now_s: float) -> None:
        if info.worker not in self._workers:
            sizes = {"block_size": info.block_size, "blocks": info.blocks, "step_tokens": info.step_tokens}
            self._core.tell("worker", id=worker_id(info.worker), **sizes)
        super().put_worker(info, now_s)

    def on_event(self, event: JobEvent, now_s: float) -> None:
        if event.kind in ("prefilled", "settled") and event.id in self._active:
            self._core.tell(event.kind, id=event.id)
        super().on_event(event, now_s)

    def choose(self, request: Waiting, held: Mapping[str, int]) -> str:
        answer = self._core.select(id=request.id, tokens=request.tokens, chain=list(request.chain))
        worker = next(name for name in self._workers if worker_id(name) == answer["worker"])
        costs = {name: self._cost(request, load, held[name]) for name, load in self._workers.items()}
        in_use = self._workers[worker].blocks
        self._core.note(
            same_cached=answer["cached"] == held[worker],
            same_in_use=answer["blocks"] == len(in_use) + sum(block not in in_use for block in request.chain),
            lowest=costs[worker] <= min(costs.values()) + 1e-9,
        )
        return worker

    def predict(self, worker: str, chain: Sequence[int], now_s: float) -> None:
        """Predict nothing, as Dynamo does by default."""


def worker_id(name: str) -> int:
    """Return Dynamo's number of a worker of the replay."""
    return int(name.rpartition("-")[2])


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
