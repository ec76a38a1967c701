"""The simulator as an engine: the scheduler driven in real time, inside the worker's event loop.

One task runs the steps.  Step ends lie on an absolute schedule, so that a late wake-up shortens the next sleep instead of
adding up; the modelled engine works beside the worker's process and is not slowed by it.  Without modelled delay the task still
gives way to the loop between any two steps.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
import structlog

from workers.engine import Capabilities, EngineConfig, EngineInfo, KvEvent, Load, Role, Sequence, Sink
from workers.errors import EngineDead, EngineStartFailed, RequestInvalid, UnsupportedByEngine
from workers.sim.events import EventBuffer
from workers.sim.faults import SequenceFaults, raise_rejection
from workers.sim.scheduler import Scheduler
from workers.sim.settings import parse_settings
from workers.sim.tokens import BUNDLED_TOKENIZER, Vocabulary, bundled_vocabulary, has_chat_template

VERSION = "1"  # of the model: what it answers and how long it takes

_MOST_LAG_S = 1.0  # how far behind its schedule an engine may fall and still catch up
_log = structlog.get_logger()


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class SimEngine:
    """Implements `workers.engine.Engine`. `kill` is what an injected crash calls."""

    def __init__(self, *, kill: Callable[[], None] = _kill_self) -> None:
        self._kill = kill
        self._scheduler: Scheduler | None = None
        self._task: asyncio.Task[None] | None = None
        self._work = asyncio.Event()
        self._dead = asyncio.Event()
        self._reason = ""
        self._aborted: set[str] = set()  # during the step that runs now
        self._events = EventBuffer()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(kv_events=True, logprobs=True, lora="static", cache_salt=True, priority=True)

    async def start(self, config: EngineConfig, sink: Sink) -> EngineInfo:
        settings = parse_settings(config.args)
        if config.role is not Role.AGGREGATED:
            raise EngineStartFailed(f"the simulator has no role {config.role.value!r}")
        folder = settings.tokenizer_dir or str(BUNDLED_TOKENIZER)
        vocabulary = bundled_vocabulary() if settings.tokenizer_dir is None else Vocabulary.load(folder)
        if settings.mean_output_tokens is not None and vocabulary.eos is None:
            raise EngineStartFailed(
                f"mean_output_tokens needs an end token, and {folder} names none (eos_token in tokenizer_config.json)"
            )
        self._scheduler = Scheduler(settings, vocabulary)
        self._task = asyncio.create_task(self._drive(self._scheduler, sink), name="sim-engine")
        self._task.add_done_callback(self._driver_ended)
        return EngineInfo(
            engine="sim",
            version=VERSION,
            tokenizer_dir=folder,
            context_length=settings.context_length,
            block_size=settings.block_size,
            blocks=settings.blocks,
            slots=settings.slots,
            vocab_size=vocabulary.size,
            eos_token_ids=() if vocabulary.eos is None else (vocabulary.eos,),
            kinds=("chat", "completion") if has_chat_template(folder) else ("completion",),
            extra={"timing": settings.timing},
        )

    # -- sequences -------------------------------------------------------------------------------------------

    async def submit(self, sequence: Sequence) -> None:
        scheduler = self._alive()
        for name, given in (
            ("guided", sequence.guided),
            ("prompt_logprobs", sequence.prompt_logprobs),
            ("media", sequence.media),
            ("handover", sequence.handover),
        ):
            if given:
                raise UnsupportedByEngine(f"the simulator cannot do {name}")
        faults = self._faults(scheduler, sequence)
        raise_rejection(faults, len(sequence.token_ids) - sequence.prompt_tokens)
        scheduler.submit(sequence, faults)
        self._work.set()

    def _faults(self, scheduler: Scheduler, sequence: Sequence) -> SequenceFaults:
        settings = scheduler.settings
        if "sim" not in sequence.extra:
            return settings.faults
        if not settings.allow_request_faults:
            raise RequestInvalid("this simulator takes no faults from requests (allow_request_faults)", param="sim")
        try:
            return msgspec.convert(sequence.extra["sim"], SequenceFaults)
        except msgspec.ValidationError as error:
            raise RequestInvalid(f"sim: {error}", param="sim") from None

    async def abort(self, ids: Seq[str]) -> None:
        if self._scheduler is not None:
            self._scheduler.abort(ids)
            self._aborted.update(ids)  # what the running step made of them is not yet out of the door
            self._work.set()

    # -- the driver ------------------------------------------------------------------------------------------

    async def _drive(self, scheduler: Scheduler, sink: Sink) -> None:
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            self._aborted.clear()
            result = scheduler.step()
            if result is None:
                self._publish(scheduler, scheduler.manager.take_events())
                self._work.clear()
                await self._work.wait()
                due = clock()
                continue
            if result.crash:
                self._kill()
                self._die("injected fault: crash")
                return
            if result.died is not None:
                self._die(result.died)
                return
            due = max(due, clock() - _MOST_LAG_S) + result.duration_s
            await asyncio.sleep(max(0.0, due - clock()) if result.duration_s else 0)
            outputs = result.outputs
            if self._aborted:
                outputs = [output for output in outputs if output.id not in self._aborted]
            if outputs:
                sink(outputs)
            if result.events:
                self._publish(scheduler, result.events)

    def _publish(self, scheduler: Scheduler, events: list[KvEvent]) -> None:
        if events:
            self._events.put(events, scheduler.manager.inventory)

    def _driver_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._die("stopped")
        elif (error := task.exception()) is not None:
            _log.error("engine.failed", engine="sim", exc_info=error)
            self._die(f"{type(error).__name__}: {error}")

    # -- life ------------------------------------------------------------------------------------------------

    def _die(self, reason: str) -> None:
        if not self._dead.is_set():
            self._reason = reason
            self._dead.set()

    def _alive(self) -> Scheduler:
        if self._dead.is_set():
            raise EngineDead(f"the simulator is dead: {self._reason}")
        if self._scheduler is None:
            raise EngineDead("the simulator was not started")
        return self._scheduler

    def load(self) -> Load:
        return self._scheduler.load() if self._scheduler is not None else Load()

    async def healthy(self) -> None:
        self._alive()

    async def died(self) -> str:
        await self._dead.wait()
        return self._reason

    def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        """One reader at a time; it begins with what is cached now."""
        return self._events.read(self._alive().manager.inventory)

    async def embed(self, token_ids: Seq[Seq[int]], *, dimensions: int | None = None) -> list[list[float]]:
        raise UnsupportedByEngine("the simulator makes no embeddings")

    async def control(self, op: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """`reset_prefix_cache` forgets all cached blocks; `stats` tells counters."""
        scheduler = self._alive()
        if op == "reset_prefix_cache":
            scheduler.manager.clear()
            self._work.set()
            return {"ok": True}
        if op == "stats":
            return {"preemptions": scheduler.preemptions, "cached_blocks": scheduler.manager.cached}
        raise UnsupportedByEngine(f"the simulator has no operation {op!r}")

    async def stop(self, grace_s: float) -> None:
        """Ends at once: there is nothing to wait for."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=grace_s)
        self._die("stopped")
