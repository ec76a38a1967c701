"""The policy `dynamo`: the selection core of NVIDIA Dynamo itself, in a process of its own, in the place of `classic`.

It binds early, and is told what Dynamo's frontend and workers would tell it: cache changes as events, the end of a prefill and
the end of a request. `dynamo_driver` drives it. Everything else is as Dynamo has it by default, so output blocks are not
tracked, and placed blocks count only when an event says so. Beside each decision stands what `classic`, with the same events
and without predictions, makes of it.
"""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

import msgspec

from headrace.broker.messages import JobEvent
from headrace.router.errors import RouterError, SettingsInvalid
from headrace.router.index.factory import create_index
from headrace.router.index.types import Tier
from headrace.router.index.view import Caches
from headrace.router.placement.types import Waiting, WorkerInfo
from headrace.tools.replay_bench.classic import Classic, ClassicWeights

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
        """Tell the driver something that has no answer, by and by."""
        self._gathered += msgspec.json.encode({"do": do, **more}) + b"\n"
        if len(self._gathered) >= SEND_BYTES:
            self._send()

    def select(self, **request: object) -> Mapping[str, Any]:
        """Ask for a decision."""
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
        """Note in what a decision agrees with `classic`."""
        for name, agreed in agrees.items():
            self._counts[name] += agreed

    def facts(self) -> DynamoFacts:
        """Sum up all decisions so far."""
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
