"""The simulator implements the `Engine` protocol: its scheduler runs in real time, inside the worker's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from headrace.workers.engine import (
    Capabilities,
    DisaggStyle,
    EngineConfig,
    EngineInfo,
    KvBatch,
    Load,
    Pooled,
    PoolItem,
    Role,
    Sequence,
    Sink,
)
from headrace.workers.errors import EngineDead, EngineStartFailed, RequestInvalid, UnsupportedByEngine
from headrace.workers.kit import EngineBase, EngineSupport, words
from headrace.workers.sim.answers import PRESCRIBED
from headrace.workers.sim.blocks import BlockManager
from headrace.workers.sim.control import (
    ADAPTER_OPERATIONS,
    HANDOVER_OPERATION,
    LEVELS,
    OPERATIONS,
    PROFILE_OPERATIONS,
    ROLES,
    FabricMember,
    Operations,
)
from headrace.workers.sim.fabric import PROCESS_FABRIC, Fabric, HandoverWire
from headrace.workers.sim.guided import KINDS
from headrace.workers.sim.run import MEDIA_KINDS, media_slots
from headrace.workers.sim.scheduler import SimScheduler, block_manager
from headrace.workers.sim.settings import SequenceFaults, SimSettings, parse_settings, raise_rejection
from headrace.workers.sim.step_driver import EventBuffer, StepDriver
from headrace.workers.sim.tokens import (
    BUNDLED_TOKENIZER,
    Vocabulary,
    bundled_vocabulary,
    has_chat_template,
    read_script,
    scripted,
)

if TYPE_CHECKING:
    from headrace.workers.sim.pooling import SimPooling


# The fabric that an engine opens beside its scheduler. NIXL is imported only by an engine that hands over through it.


def open_fabric(settings: SimSettings, clock: Callable[[], float]) -> Fabric:
    if settings.fabric == "local":
        return PROCESS_FABRIC
    from headrace.workers.sim.nixl_fabric import NixlFabric  # an engine without hand-overs must not load NIXL

    return NixlFabric(settings.blocks, settings.block_bytes, timeout_s=settings.transfer_timeout_s, clock=clock)


_GENERATING = Capabilities(
    roles=ROLES,
    disagg=DisaggStyle.PARAMS,
    resume_guided=True,
    resume_penalties=True,  # penalties change no answer
    resume_repetition=True,
    kv_events=True,
    logprobs=True,
    prompt_logprobs=True,
    guided=frozenset(KINDS),
    lora="dynamic",
    media=frozenset(MEDIA_KINDS),
    prompt_embeds=True,
    cache_salt=True,
    priority=True,
    sleep_levels=LEVELS,
    operations=OPERATIONS,
)

_HANDING_OVER = "`disagg`, or role `prefill` or `decode`"

SUPPORT = EngineSupport(
    name="sim",
    title="simulator",
    words=words(_GENERATING, ("chat", "completion", "embedding", "score", "classify")) | {"handover rendezvous"},
    conditions={
        "role prefill": _HANDING_OVER,
        "role decode": _HANDING_OVER,
        "handover params": "`disagg=params`",
        "handover rendezvous": "`disagg=rendezvous`",
        f"operation {HANDOVER_OPERATION}": "`disagg`",
        "operation start_profile": "`profile_dir`",
        "operation stop_profile": "`profile_dir`",
        "kind embedding": "`pooling=embed`",
        "kind score": "`pooling=score`",
        "kind classify": "`pooling=classify`",
        "media image": "`media_tokens` over 0",
        "media video": "`media_tokens` over 0",
        "media audio": "`media_tokens` over 0",
    },
)


VERSION = "1"  # version of the model: its answers and its timing

_log = structlog.get_logger()


def _kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class SimEngine(EngineBase):
    """A simulated engine. An injected crash calls `kill`; `fabric` replaces that of the settings."""

    NAME = "simulator"

    def __init__(self, *, kill: Callable[[], None] = _kill_self, fabric: Fabric | None = None) -> None:
        super().__init__()
        self._kill = kill
        self._fabric = fabric
        self._member: FabricMember | None = None
        self._operations: Operations | None = None
        self._disagg = DisaggStyle.NONE
        self._scheduler: SimScheduler | None = None
        self._task: asyncio.Task[None] | None = None
        self._work = asyncio.Event()
        self._blamed: frozenset[str] = frozenset()
        self._driver: StepDriver | None = None
        self._events = EventBuffer()
        self._pooling: SimPooling | None = None
        self._script: Callable[[Seq[int]], str | None] | None = None
        self._media = frozenset(MEDIA_KINDS)  # fewer if the tokenizer lacks placeholders
        self._adapters: dict[str, str] = {}  # name → where it was loaded from; answers differ by the name alone
        self._capabilities: Capabilities | None = None  # kept from the start on: every sequence asks for them

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities or self._declare()

    def _declare(self) -> Capabilities:
        operations = OPERATIONS if self._member is not None else OPERATIONS - {HANDOVER_OPERATION}
        if self._scheduler is None or not self._scheduler.settings.profile_dir:
            operations -= PROFILE_OPERATIONS
        if self._pooling is not None:
            return Capabilities(
                resume=False, seeds=False, priority=True, sleep_levels=LEVELS, operations=operations - ADAPTER_OPERATIONS
            )
        return replace(
            _GENERATING,
            roles=ROLES if self._member is not None else frozenset({Role.AGGREGATED}),
            disagg=self._disagg,
            media=self._media,
            operations=operations,
        )

    async def start(self, config: EngineConfig, sink: Sink) -> EngineInfo:
        settings = parse_settings(config.args)
        if config.role not in ROLES:
            raise EngineStartFailed(f"the simulator has no role {config.role.value!r}")
        folder = settings.tokenizer_dir or str(BUNDLED_TOKENIZER)
        vocabulary = bundled_vocabulary() if settings.tokenizer_dir is None else Vocabulary.load(folder)
        if settings.mean_output_tokens and vocabulary.eos is None:
            raise EngineStartFailed(
                f"mean_output_tokens needs an end token, and {folder} names none (eos_token in tokenizer_config.json)"
            )
        if settings.script:
            self._script = functools.partial(scripted, read_script(settings.script), vocabulary.table)
        if settings.pooling is not None:
            from headrace.workers.sim.pooling import SimPooling  # an engine without vectors must not load numpy

            self._pooling = SimPooling(settings.pooling, settings, special=vocabulary.table.special)
            sink = self._pooling.settle
        self._events = EventBuffer(replay=settings.kv_replay_batches, faults=settings.faults)
        self._scheduler = scheduler = self._make_scheduler(config, settings, vocabulary)
        self._adapters = dict.fromkeys(settings.adapters, "")
        slots = media_slots(vocabulary.table, settings.media_tokens) if self._pooling is None else {}
        self._media = frozenset(slots)
        self._capabilities = self._declare()
        self._driver = driver = StepDriver(scheduler, self._events, sink, self._work)
        self._operations = Operations(scheduler, driver, self._events, adapters=self._adapters, member=self._member)
        self._task = asyncio.create_task(self._drive(driver), name="sim-engine")
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
            step_tokens=settings.step_tokens,
            kinds=self._kinds(folder),
            adapters=tuple(settings.adapters),
            labels=self._pooling.labels if self._pooling is not None else (),
            handover=self._member.terms if self._member is not None else "",
            lease_s=settings.lease_s if self._member is not None else 0.0,
            address=self._member.engine if self._member is not None else "",
            lends=self._member is not None and self._member.lends,
            transfer_card=self._member.card if self._member is not None else b"",
            prompt_embeds=self._pooling is None,
            media=slots,
            hands_over_media=True,
            extra={"timing": settings.timing},
        )

    def _kinds(self, folder: str) -> tuple[str, ...]:
        if self._pooling is not None:
            return self._pooling.kinds
        return ("chat", "completion") if has_chat_template(folder) else ("completion",)

    def _make_scheduler(self, config: EngineConfig, settings: SimSettings, vocabulary: Vocabulary) -> SimScheduler:
        clock = asyncio.get_running_loop().time
        if self._pooling is not None:
            if settings.hands_over(config.role):
                raise EngineStartFailed(f"pooling={settings.pooling!r} hands nothing over: role aggregated, no disagg")
            if settings.adapters:
                raise EngineStartFailed(
                    f"pooling={settings.pooling!r} takes no adapters, these were given: {settings.adapters}"
                )
            settings = self._pooling.scheduler_settings(settings)
        manager = block_manager(settings)
        if not settings.hands_over(config.role):
            return SimScheduler(settings, vocabulary, manager=manager, clock=clock)
        wire = HandoverWire(
            model=config.served_name,
            role=config.role,
            settings=settings,
            timing=settings.timing_model(),
            manager=manager,
            clock=clock,
            wall_offset_s=time.time() - clock(),
        )
        scheduler = SimScheduler(settings, vocabulary, manager=manager, clock=clock, wire=wire)
        fabric = self._fabric or open_fabric(settings, clock)
        self._member = FabricMember(wire, scheduler, fabric, settings.engine_id or uuid.uuid4().hex, wake=self._work.set)
        self._disagg = settings.style
        return scheduler

    # -- sequences -------------------------------------------------------------------------------------------

    async def submit(self, sequence: Sequence) -> None:
        if self._pooling is not None:
            raise UnsupportedByEngine("this simulator makes vectors and generates nothing (pooling)")
        await self._submit(sequence)

    async def pool(self, item: PoolItem) -> Pooled:
        """Return the vector of an input, after as long as its prefill takes."""
        if self._pooling is None:
            raise UnsupportedByEngine("this simulator generates text; it makes vectors when started with pooling=embed")
        return await self._pooling.pool(item, submit=self._submit, abort=self._abort)

    async def _submit(self, sequence: Sequence) -> None:
        scheduler = self._alive()
        if sequence.adapter is not None and sequence.adapter not in self._adapters:
            raise RequestInvalid(f"this simulator has no adapter {sequence.adapter!r}", param="model")
        for item in sequence.media:
            if (kind := item.get("kind")) in MEDIA_KINDS and kind not in self._media:
                raise UnsupportedByEngine(f"this simulator takes no media of kind {kind!r} (media_tokens)", param="media")
        if self._script is not None and PRESCRIBED not in sequence.extra:
            answer = self._script(sequence.token_ids[: sequence.prompt_tokens])
            if answer is not None:
                sequence = msgspec.structs.replace(sequence, extra={**sequence.extra, PRESCRIBED: answer})
        speller = scheduler.speller
        if not speller.ready and (sequence.guided or PRESCRIBED in sequence.extra):
            await asyncio.to_thread(speller.prepare)
        faults = self._faults(scheduler, sequence)
        raise_rejection(faults, len(sequence.token_ids) - sequence.prompt_tokens)
        scheduler.submit(sequence, faults)
        self._work.set()

    def _faults(self, scheduler: SimScheduler, sequence: Sequence) -> SequenceFaults:
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
        self._abort(ids)

    def _abort(self, ids: Seq[str]) -> None:
        if self._driver is not None:
            self._driver.abort(ids)

    # -- the driver ------------------------------------------------------------------------------------------

    async def _drive(self, driver: StepDriver) -> None:
        end = await driver.run()
        if end.crash:
            self._kill()
        self._blamed = end.blamed
        self._die(end.died or "injected fault: crash")

    def _driver_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._die("stopped")
        elif (error := task.exception()) is not None:
            _log.error("engine.failed", engine="sim", exc_info=error)
            self._die(f"{type(error).__name__}: {error}")

    # -- life ------------------------------------------------------------------------------------------------

    def _die(self, reason: str) -> bool:
        first = super()._die(reason)
        if first and self._pooling is not None:
            self._pooling.died(reason)
        if first and self._member is not None:
            self._member.leave()
        return first

    def _alive(self) -> SimScheduler:
        if self._death is not None:
            raise EngineDead(f"the simulator is dead: {self._death}")
        if self._scheduler is None:
            raise EngineDead("the simulator was not started")
        return self._scheduler

    def load(self) -> Load:
        if self._scheduler is None or self._driver is None:
            return Load()
        return self._scheduler.load(self._driver.step_left_s)

    def blamed(self) -> frozenset[str]:
        return self._blamed

    def kv_events(self, rank: int = 0) -> AsyncGenerator[KvBatch]:
        """Read KV events, beginning with what is cached now. Only one reader at a time is supported."""
        manager = self._alive().manager
        return self._read(manager)

    async def _read(self, manager: BlockManager) -> AsyncGenerator[KvBatch]:
        async with contextlib.aclosing(
            self._events.read(manager.snapshot, ahead=self._driver is not None and self._driver.stepping)
        ) as batches:
            async for batch in batches:
                yield batch

    async def replay_kv(self, start: int, rank: int = 0) -> list[KvBatch]:
        return self._events.replay(start)

    def meet(self, peers: Mapping[str, bytes]) -> None:
        if self._member is not None:
            self._member.meet(peers)

    async def release(self, sequence_id: str, params: Mapping[str, Any] | None) -> None:
        self._alive()
        if self._member is not None:
            self._member.release_sequence(sequence_id, params)

    async def set_role(self, role: Role) -> None:
        self._alive()
        if self._member is not None:
            self._member.set_role(role)
        elif role is not Role.AGGREGATED:
            raise UnsupportedByEngine(
                f"this simulator was started without hand-over (disagg) and stays aggregated: it cannot be {role.value}"
            )

    async def control(self, op: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run one of `headrace.workers.sim.control.OPERATIONS`; see docs/simulator.md.

        Raises UnsupportedByEngine for other operations, RequestInvalid for wrong arguments.
        """
        self._alive()
        assert self._operations is not None  # of an engine that was started  # noqa: S101
        if self._pooling is not None and op in ADAPTER_OPERATIONS:
            raise UnsupportedByEngine(f"{op}: a simulator that makes vectors takes no adapters")
        return await self._operations.do(op, args)

    async def stop(self, grace_s: float) -> None:
        """Stop at once: there is nothing to wait for."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=grace_s)
        self._die("stopped")
