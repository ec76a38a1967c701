"""The base of engines, and what adapters share: declared support, refusals, life and death, ports, and NIXL's pace.

A started engine declares what it can do as it was started (`Engine.capabilities`). `EngineSupport` is the union over all
configurations: the support table of the documentation is made from it, and the engine contract tests
(tests/engine_contract) compare both with what the engine does.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import structlog

from headrace.workers.engine import Capabilities, DisaggStyle, EngineInfo, KvBatch, Load, Pooled, PoolItem, Role, Sequence
from headrace.workers.errors import EngineDead, EngineStartFailed, UnsupportedByEngine, WorkerError
from headrace.workers.process_guard import ProcessTree

_log = structlog.get_logger()

GUIDED = frozenset({"json", "regex", "choice", "grammar", "json_object", "structural_tag"})
"""The kinds of structured output that vLLM, SGLang and TensorRT-LLM know."""
ADAPTER_OPERATIONS = frozenset({"load_adapter", "unload_adapter"})

_FLAGS = (
    "seeds",
    "resume",
    "resume_guided",
    "resume_penalties",
    "resume_repetition",
    "kv_events",
    "logprobs",
    "prompt_logprobs",
    "prompt_embeds",
    "cache_salt",
    "priority",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSupport:
    """The abilities of an engine over all of its configurations, as words (`words`)."""

    name: str  # as in `--engine`
    title: str  # with the version that the adapter is written for
    words: frozenset[str]
    conditions: Mapping[str, str] = field(default_factory=dict)  # word → the settings that it takes
    untried: Mapping[str, str] = field(default_factory=dict)  # word → why no contract test drives it

    def __post_init__(self) -> None:
        for given in (self.conditions, self.untried):
            if unknown := given.keys() - self.words:
                raise ValueError(f"engine {self.name!r}: {sorted(unknown)} are not among its words")


def words(capabilities: Capabilities, kinds: Iterable[str] = ()) -> frozenset[str]:
    """Return a word per ability: "logprobs", "guided json", "role prefill", "handover params", "kind embedding" …"""
    found = {name for name in _FLAGS if getattr(capabilities, name)}
    found |= {f"guided {kind}" for kind in capabilities.guided}
    found |= {f"media {kind}" for kind in capabilities.media}
    found |= {f"role {role.value}" for role in capabilities.roles}
    found |= {f"operation {name}" for name in capabilities.operations}
    found |= {f"sleep level {level}" for level in capabilities.sleep_levels}
    found |= {f"kind {kind}" for kind in kinds}
    if capabilities.disagg is not DisaggStyle.NONE:
        found.add(f"handover {capabilities.disagg.value}")
    if capabilities.lora != "none":
        found.add(f"lora {capabilities.lora}")
    return frozenset(found)


GUIDED_OPTIONS = frozenset({"disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"})


def refuse_undeclared(capabilities: Capabilities, sequence: Sequence) -> None:
    """Raise UnsupportedByEngine naming the first ability that the sequence needs and the engine does not declare.

    A priority is never refused: an engine without priorities serves in the order of arrival.
    """
    sampling = sequence.sampling
    needs: tuple[tuple[str, bool], ...] = (
        ("seed", sampling.seed is None or not sampling.temperature or capabilities.seeds),
        ("logprobs", sequence.logprobs is None or capabilities.logprobs),
        ("prompt_logprobs", sequence.prompt_logprobs is None or capabilities.prompt_logprobs),
        ("prompt_embeds", sequence.prompt_embeds is None or capabilities.prompt_embeds),
        ("cache_salt", sequence.cache_salt is None or capabilities.cache_salt),
        ("adapter", sequence.adapter is None or capabilities.lora != "none"),
        *[(kind, kind in capabilities.guided) for kind in sequence.guided or () if kind not in GUIDED_OPTIONS],
        *[(kind := str(item.get("kind")), kind in capabilities.media) for item in sequence.media],
    )
    for name, able in needs:
        if not able:
            raise UnsupportedByEngine(f"this worker's engine does not support {name!r}", param=name)
    if sequence.handover is not None and capabilities.disagg.value == "none":
        raise UnsupportedByEngine(f"this worker's engine hands nothing over: it cannot be the {sequence.handover.kind} side")


class EngineBase:
    """The members of `headrace.workers.engine.Engine` that are alike in most engines.

    An engine without cache events, hand-overs, vectors and operations writes `start`, `submit`, `abort`, `load` and `stop`.
    """

    NAME: ClassVar[str]
    """The engine's name in errors."""
    LOOK_EVERY_S: ClassVar[float | None] = None
    """How often `look` is asked whether the engine lives. None: it reports its death by itself."""

    capabilities: Any = Capabilities()

    def __init__(self) -> None:
        self._death: str | None = None
        self._dead = asyncio.Event()
        self._kv: Any = None  # the readers of KV events, by rank

    def _die(self, reason: str) -> bool:
        """Record the reason of the engine's death. Returns whether it is the first one, which counts."""
        first = self._death is None
        self._death = self._death or reason
        self._dead.set()
        return first

    def declare_dead(self, reason: str) -> None:
        if self._die(reason):
            _log.error("engine.died", reason=reason, sequences=self.dropped())

    def dropped(self) -> int:
        """Forget the sequences of an engine that has died, and return how many they were."""
        return 0

    def look(self) -> None:
        """Declare the engine dead if it is; for engines that do not report it."""

    def check_alive(self) -> None:
        """Raise EngineDead unless the engine can serve."""
        self.look()
        if self._death is not None:
            raise EngineDead(self._death)

    def _alive(self) -> Any:
        """Return the parts of the running engine that calls need. Raises EngineDead if it is not running."""
        self.check_alive()

    async def healthy(self) -> None:
        self._alive()

    async def died(self) -> str:
        while self._death is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.LOOK_EVERY_S):
                    await self._dead.wait()
            self.look()
        return self._death

    def blamed(self) -> frozenset[str]:
        return frozenset()

    def kv_events(self, rank: int = 0) -> AsyncGenerator[KvBatch]:
        reader: AsyncGenerator[KvBatch] = self._events_of(rank).read()
        return reader

    async def replay_kv(self, start: int, rank: int = 0) -> list[KvBatch]:
        kept: list[KvBatch] = await self._events_of(rank).replay(start)
        return kept

    def _events_of(self, rank: int) -> Any:
        self._alive()
        if self._kv is None:
            raise UnsupportedByEngine(f"this {self.NAME} was started without KV events")
        return self._kv[rank]

    def _deafen(self) -> None:
        """Stop listening to KV events."""
        if self._kv is not None:
            self._kv.close()
            self._kv = None

    def meet(self, peers: Mapping[str, bytes]) -> None:
        """Do nothing: engines that hand over find each other by the parameters of a hand-over."""

    async def release(self, sequence_id: str, params: Mapping[str, Any] | None) -> None:
        """Do nothing: no blocks are on offer."""
        self._alive()

    async def set_role(self, role: Role) -> None:
        self._alive()
        roles = self.capabilities.roles
        if role not in roles:
            able = ", ".join(sorted(roles))
            raise UnsupportedByEngine(f"this {self.NAME} was started so that it can be {able}, not {role.value}")

    async def pool(self, item: PoolItem) -> Pooled:
        raise UnsupportedByEngine(f"{self.NAME} makes no vectors here")

    async def control(self, op: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        self._alive()
        known = ", ".join(sorted(self.capabilities.operations)) or "none"
        raise UnsupportedByEngine(f"{self.NAME} as it was started has no operation {op!r}; it has: {known}")


class ProcessEngine(EngineBase):
    """An engine that starts processes of its own, of which none is left after it."""

    def __init__(self) -> None:
        super().__init__()
        self._processes = ProcessTree(os.getpid())

    async def _kill_processes(self, *, quiet: bool = False) -> None:
        left = await asyncio.to_thread(self._processes.kill)
        if left and not quiet:
            _log.warning("engine.processes_killed", count=left)


@contextmanager
def starting(engine: str, model: str) -> Iterator[None]:
    """Turn whatever an engine's constructor raises into EngineStartFailed."""
    try:
        yield
    except WorkerError:
        raise
    except Exception as error:
        raise EngineStartFailed(f"{engine} could not start {model}: {error}") from error


def not_installed(engine: str, error: ImportError, how: str) -> EngineStartFailed:
    return EngineStartFailed(f"{engine} is not installed or broken ({error}); {how} installs it")


def end_tokens(*given: Any) -> tuple[int, ...]:
    """Return the ids among these numbers, collections of numbers, and things that are none, each once and in this order."""
    several = [one if isinstance(one, list | tuple | set) else (one,) for one in given]
    return tuple(dict.fromkeys(token for part in several for token in part if type(token) is int))


def node_part(engine: str, version: str, *, context_length: int, block_size: int, blocks: int, node_rank: int) -> EngineInfo:
    """Describe a part of an engine on a node after the first, which has neither tokenizer nor requests."""
    return EngineInfo(
        engine=engine,
        version=version,
        tokenizer_dir="",
        context_length=context_length,
        block_size=block_size,
        blocks=blocks,
        slots=0,
        vocab_size=0,
        eos_token_ids=(),
        kinds=(),
        follows=True,
        extra={"node_rank": node_rank},
    )


def set_defaults(environ: MutableMapping[str, str], model: str, defaults: Mapping[str, str]) -> None:
    """Set the variables that an engine reads at import, unless the operator has set them. A model on disk needs no hub."""
    local = {"HF_HUB_OFFLINE": "1"} if Path(model).is_dir() else {}
    for name, value in {"TOKENIZERS_PARALLELISM": "false", **defaults, **local}.items():
        environ.setdefault(name, value)


def cores() -> str:
    """Return the number of cores that this process may use, as a variable's value."""
    return str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def summed(ranks: Iterable[Load], *, mine: int, blocks: int, queued: int) -> Load:
    """Return the load of an engine from that of its ranks. `mine` sequences are in it; the engine's numbers may be older.

    `queued`: prompt tokens that are still to be computed. A single rank is not listed.
    """
    known = tuple(ranks)
    running = min(mine, sum(rank.running for rank in known))
    return Load(
        running=running,
        waiting=max(mine - running, sum(rank.waiting for rank in known)),
        blocks_used=min(blocks, sum(rank.blocks_used for rank in known)),
        blocks_total=blocks,
        queued_prefill_tokens=queued,
        step_s=max((rank.step_s for rank in known), default=0.0),
        step_prefill_tokens=sum(rank.step_prefill_tokens for rank in known),
        step_decodes=sum(rank.step_decodes for rank in known),
        ranks=known if len(known) > 1 else (),
    )


# Reserves a TCP port for a server that an engine starts later: a bound socket keeps it from other processes until then.


def reserve_port(stack: ExitStack, host: str, port: int) -> int:
    """Bind a port until `stack` is closed, 0 = any free one, and return it. Raises OSError, OverflowError.

    A process that allows the reuse of addresses can listen on it all the same: this socket does so, too, and never listens.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    held = stack.enter_context(socket.socket(family, kind))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(address)
    return int(held.getsockname()[1])


# Makes NIXL's progress thread pause between two polls.
#
# NIXL's Python class starts a thread that looks for transfers without ever pausing: a whole core per engine, also while
# nothing is transferred. Beside a GPU that core is not missed. Where the engines themselves compute on the cores it is not:
# one prefill and one decode engine would leave each other nothing. The bindings have a setting for it (`pthrDelay`), which
# the class overwrites with 0; so the class is given a config object that does not take that.
#
# Imported in the processes of vLLM's workers and SGLang's schedulers, before they make their agent.

PAUSE_US = 200
"""Microseconds that the thread sleeps between two polls, by which transfers are seen later; they take milliseconds anyway."""


def pace_nixl() -> bool:
    """Have every agent that this process creates from now on pause its progress thread. Returns False without such a NIXL."""
    try:
        from nixl import _api
    except ImportError:
        return False
    bindings: Any = getattr(_api, "nixlBind", None)
    config: Any = getattr(bindings, "nixlAgentConfig", None)
    delay: Any = getattr(config, "pthrDelay", None)
    if config is None or not hasattr(delay, "__set__"):
        return False

    class Paced(config):  # type: ignore[misc]  # known at run time only
        def __init__(self) -> None:
            super().__init__()
            delay.__set__(self, PAUSE_US)

        @property
        def pthrDelay(self) -> object:  # noqa: N802 - NIXL's name
            return delay.__get__(self)

        @pthrDelay.setter
        def pthrDelay(self, value: object) -> None:  # noqa: N802
            """Ignore the value."""

    class PacedBindings:
        nixlAgentConfig = Paced  # noqa: N815 - NIXL's name

        def __getattr__(self, name: str) -> object:
            return getattr(bindings, name)

    _api.nixlBind = PacedBindings()
    return True
