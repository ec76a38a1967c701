"""Limits the time for which decode sequences wait for blocks of another engine, and reclaims the blocks of aborted ones.

vLLM reports a transfer that fails. It waits without end for one that never comes (the prefill side died after the handshake, or
has dropped the blocks), and the blocks of an aborted sequence stay in use until the transfer comes. Here such a wait has a
limit, and the blocks are reclaimed once no engine can write into them: when the prefill side's lease has run out, which the
decode side renews until the sequence is aborted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import structlog

from headrace.workers.engine import DisaggStyle, Output, Role, Sequence
from headrace.workers.errors import EngineStartFailed, TransferFailed, UnsupportedByEngine
from headrace.workers.kit import reserve_port
from headrace.workers.vllm import transfer_connector
from headrace.workers.vllm.transfer_connector import ConnectorChoice

STALL_S = 10.0  # vLLM gives a handshake five seconds; moving 1,500 tokens of a small model takes some tens of milliseconds
GRACE_S = 5.0  # beyond the lease, for transfers that had begun before its end


class Fetches:
    """Keeps the waiting times of fetches. Sans-io."""

    def __init__(self, *, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._waiting: dict[str, float | None] = {}  # by request id: the start of vLLM's wait for blocks, if it waits
        self._abandoned: dict[str, float] = {}  # by request id: the time from which its blocks may be reclaimed

    def __bool__(self) -> bool:
        return bool(self._waiting or self._abandoned)

    @property
    def waiting(self) -> list[str]:
        """Return the requests that may wait for blocks. `look` needs their state."""
        return list(self._waiting)

    def began(self, request_id: str) -> None:
        self._waiting[request_id] = None

    def ended(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)

    def aborted(self, request_id: str) -> None:
        """Record that a sequence was aborted; if it was still waiting its blocks may be stuck."""
        if request_id in self._waiting:
            del self._waiting[request_id]
            self._abandoned[request_id] = self._clock() + self._lease_s + GRACE_S

    def look(self, receiving: Mapping[str, bool]) -> dict[str, str]:
        """Update the waits: `receiving` has the requests that wait for blocks, and whether the other side is reachable.

        Returns the requests that need not wait any longer, with the reasons. A sequence that waits for a slot or for memory of
        its own is not receiving yet, and its time does not run.
        """
        now = self._clock()
        hopeless = {}
        for request_id, since in self._waiting.items():
            if request_id not in receiving:
                self._waiting[request_id] = None
            elif not receiving[request_id]:
                hopeless[request_id] = "the prefill side cannot be reached any more"
            elif since is None:
                self._waiting[request_id] = now
            elif now - since >= STALL_S:
                hopeless[request_id] = f"no blocks came from the prefill side for {STALL_S:.0f} s"
        return hopeless

    def due(self) -> list[str]:
        """Return and forget the abandoned requests whose blocks no engine can write into any more."""
        now = self._clock()
        ripe = [request_id for request_id, when in self._abandoned.items() if when <= now]
        for request_id in ripe:
            del self._abandoned[request_id]
        return ripe


# Reserves the side channel's address, at which vLLM gives other engines its memory's metadata: a port per engine process.
#
# vLLM takes it from two environment variables and listens in a thread; if the port is taken that thread dies and the start
# never ends. So the port is reserved first: a bound socket keeps it from other processes until vLLM has started, and as both
# allow the reuse of addresses and ours never listens, vLLM can bind it all the same.

HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
LOOPBACK = "127.0.0.1"
_TRIES = 50


@contextmanager
def side_channel(environ: MutableMapping[str, str], *, host: str = LOOPBACK, ranks: int = 1) -> Iterator[int]:
    """Set both variables while an engine is started; the operator's settings win. Yields the port.

    `host`: the address at which other engines reach this one. Every data parallel rank takes a port, counted from the first.
    Raises EngineStartFailed if the ports are taken.
    """
    before = {name: environ.get(name) for name in (HOST, PORT)}
    host = environ.setdefault(HOST, host)
    with ExitStack() as reserved:
        given = environ.get(PORT)
        port = _reserve(reserved, host, int(given), ranks) if given else _reserve_any(reserved, host, ranks)
        environ[PORT] = str(port)
        try:
            yield port
        finally:
            for name, value in before.items():
                if value is None:
                    del environ[name]
                else:
                    environ[name] = value


def _reserve_any(reserved: ExitStack, host: str, ranks: int) -> int:
    for _ in range(_TRIES):
        attempt = ExitStack()
        try:
            port = reserve_port(attempt, host, 0)
            for rank in range(1, ranks):
                reserve_port(attempt, host, port + rank)
        except (OSError, OverflowError):
            attempt.close()
            continue
        reserved.push(attempt)
        return port
    raise EngineStartFailed(f"no {ranks} free ports in a row on {HOST}={host!r}; is that an address of this machine?")


def _reserve(reserved: ExitStack, host: str, port: int, ranks: int) -> int:
    for rank in range(ranks):
        try:
            reserve_port(reserved, host, port + rank)
        except (OSError, OverflowError) as error:
            raise EngineStartFailed(f"{PORT}={port} on {host}: port {port + rank} cannot be used: {error}") from error
    return port


_log = structlog.get_logger()

POLL_S = 1.0  # seconds between two checks of sequences that wait for blocks
_LOOKS = 2  # vLLM notifies its workers of an abort one step later.
_RELEASES = 4096  # most releases that wait to be passed on: an engine offers far fewer prompts than that
_LET_GO_TRIES = 20
_LET_GO_PAUSE_S = 0.05
_RPC_TIMEOUT_S = 60.0  # A step with long prompts may delay a call.
_NEEDED = {"prefill": Role.PREFILL, "decode": Role.DECODE, "lend": Role.DECODE}


class Hits(NamedTuple):
    """Numbers of a prompt's tokens that need not be computed: in this engine's cache, and in another engine."""

    local: int
    fetched: int


class VllmKvTransfer:
    """The KV transfers of an engine. Without a connector it refuses every hand-over. Used on the event loop only."""

    def __init__(
        self, llm: Any, transfer: ConnectorChoice | None, *, block_size: int, stalled: Callable[[str, str], Awaitable[None]]
    ) -> None:
        """`stalled` gets the id of a sequence whose blocks do not come, and the reason, and aborts the sequence."""
        self._llm = llm
        self._transfer = transfer
        self._block_size = block_size
        self._stalled = stalled
        self._fetches = Fetches(lease_s=transfer.lease_s if transfer else 0.0)
        self._fetching: dict[str, Sequence] = {}  # by request id: fetching sequences without a token
        self._hits: dict[str, Hits] = {}
        self._lent_at: dict[str, float] = {}  # by request id, of sequences that are to lend their blocks
        self._unstarted: dict[str, int] = {}  # fetches that were aborted, perhaps before they began, with the checks left
        self._work = asyncio.Event()
        self._releases: asyncio.Queue[tuple[str, Mapping[str, Any] | None]] = asyncio.Queue(_RELEASES)
        self._tasks: list[asyncio.Task[None]] = []
        if transfer is None:
            return
        self._listen_for_hits()
        if transfer.extended:
            self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._let_go())]
        else:
            _log.warning("engine.handovers_unwatched", reason="worker_extension_cls is the operator's own")

    @property
    def roles(self) -> frozenset[Role]:
        return self._transfer.roles if self._transfer else frozenset({Role.AGGREGATED})

    @property
    def style(self) -> DisaggStyle:
        return DisaggStyle.PARAMS if self._transfer else DisaggStyle.NONE

    def admit(self, sequence: Sequence) -> tuple[str, dict[str, Any] | None]:
        """Return the request id for vLLM and its `kv_transfer_params`. Raises UnsupportedByEngine, TransferFailed."""
        asked = sequence.handover
        if asked is None:
            return sequence.id, None
        if self._transfer is None or _NEEDED[asked.kind] not in self._transfer.roles:
            raise UnsupportedByEngine(f"this vLLM worker does not serve a handover of the kind {asked.kind!r}")
        if asked.kind == "lend" and not self._transfer.lends:
            raise UnsupportedByEngine("this vLLM worker lends no blocks: its connector is not the one that pulls")
        if asked.kind != "decode":
            return transfer_connector.prefill_id(sequence.id), self._prefill_params(sequence)
        params = transfer_connector.checked(
            asked.params,
            mode=self._transfer.mode,
            prompt_tokens=len(sequence.token_ids),
            block_size=self._block_size,
        )
        return transfer_connector.base_id(params["remote_request_id"]), params

    def _prefill_params(self, sequence: Sequence) -> dict[str, Any]:
        asked = sequence.handover
        assert self._transfer is not None and asked is not None  # noqa: PT018, S101  # a hand-over was asked for
        if asked.params is None or not self._transfer.reads:
            return dict(transfer_connector.ASK)
        return transfer_connector.borrowed(asked.params, prompt_tokens=len(sequence.token_ids))

    def began(self, request_id: str, sequence: Sequence) -> None:
        """Record a sequence that is about to be submitted. One that fetches blocks is watched from now on."""
        asked = sequence.handover
        if asked is None:
            return
        if asked.kind == "lend":
            self._lent_at[request_id] = time.perf_counter()
        elif asked.kind == "decode" or (asked.params is not None and self._transfer is not None and self._transfer.reads):
            self._fetching[request_id] = sequence
            self._fetches.began(request_id)
            self._work.set()

    def arrived(self, request_id: str) -> Hits | None:
        """Record the first output or the end of a sequence. Returns where the tokens of a fetched prompt were."""
        self._fetches.ended(request_id)
        fetching = self._fetching.pop(request_id, None)
        if fetching is None:
            return None
        found = self._hits.pop(request_id, None)
        return found if found is not None else Hits(local=0, fetched=len(fetching.token_ids) - 1)

    def finish(self, request_id: str, output: Output, hits: Hits | None) -> None:
        """Complete the output of a prefill: what it has read, and until when lent blocks stay."""
        if output.handover is None:
            return
        if (at := self._lent_at.pop(request_id, None)) is not None and self._transfer is not None:
            output.handover = transfer_connector.lent(output.handover, until=at + self._transfer.lease_s)
        if hits is not None:
            output.extra = {**(output.extra or {}), "remote_tokens": hits.fetched}

    def aborted(self, request_id: str, sequence: Sequence) -> None:
        if request_id in self._fetching:
            self._unstarted[request_id] = _LOOKS
        self._fetches.aborted(request_id)
        self.arrived(request_id)
        self._lent_at.pop(request_id, None)
        if sequence.handover is not None and sequence.handover.kind != "decode":
            self.release(sequence.id, None)  # The prefill may have ended a moment ago.
        self._work.set()

    def release(self, sequence_id: str, params: Mapping[str, Any] | None) -> None:
        """Release blocks as `Engine.release` does, between two steps, without waiting."""
        if not self._tasks:
            return
        try:
            self._releases.put_nowait((sequence_id, None if params is None else transfer_connector.reachable(params)))
        except TransferFailed as error:
            _log.warning("engine.release_unreadable", sequence=sequence_id, error=str(error))
        except asyncio.QueueFull:  # The lease ends anyway, only later.
            _log.warning("engine.release_left_out", sequence=sequence_id)

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _let_go(self) -> None:
        while True:
            wanted = [await self._releases.get()]
            while not self._releases.empty():
                wanted.append(self._releases.get_nowait())
            try:
                if declined := [dict(params) for _, params in wanted if params is not None]:
                    await self._call("headrace_decline", declined)
                coming = {sequence_id for sequence_id, params in wanted if params is None}
                for _ in range(_LET_GO_TRIES if coming else 0):
                    coming = {found for rank in await self._call("headrace_let_go", list(coming)) for found in rank}
                    if not coming:
                        break
                    await asyncio.sleep(_LET_GO_PAUSE_S)
            except Exception as error:  # the engine is dying, or is too busy to answer
                _log.warning("engine.release_failed", sequences=len(wanted), error=repr(error))

    async def _watch(self) -> None:
        while True:
            if not (self._fetches or self._unstarted):
                self._work.clear()
                await self._work.wait()
            await asyncio.sleep(POLL_S)
            try:
                await self._look()
            except Exception as error:  # the engine is dying, or is too busy to answer: it is asked again
                _log.warning("engine.handover_watch_failed", error=repr(error))

    async def _look(self) -> None:
        if self._unstarted:
            await self._call("headrace_decline_unstarted", list(self._unstarted))
            self._unstarted = {request_id: looks - 1 for request_id, looks in self._unstarted.items() if looks > 1}
        if waiting := self._fetches.waiting:
            receiving: dict[str, bool] = {}
            for rank in await self._call("headrace_receiving", waiting):
                for request_id, reachable in rank:
                    receiving[request_id] = receiving.get(request_id, True) and reachable
            for request_id, reason in self._fetches.look(receiving).items():
                sequence = self._fetching.get(request_id)
                if sequence is None:  # The sequence has ended meanwhile.
                    continue
                _log.warning("engine.fetch_stalled", sequence=sequence.id, reason=reason)
                await self._stalled(sequence.id, reason)
        if due := self._fetches.due():
            taken = max(await self._call("headrace_give_up", due), default=0)
            if taken:
                _log.warning("engine.fetch_blocks_taken_back", sequences=taken)

    async def _call(self, method: str, *args: Any) -> list[Any]:
        async with asyncio.timeout(_RPC_TIMEOUT_S):
            return list(await self._llm.collective_rpc(method, args=args))

    def _listen_for_hits(self) -> None:
        """Read local cache hits from vLLM's inner records, because its outputs count fetched tokens as cached."""
        processor = self._llm.output_processor
        process = processor.process_outputs

        def listening(outputs: list[Any], *args: Any, **options: Any) -> Any:
            if self._fetching:
                for output in outputs:
                    stats = output.prefill_stats
                    if stats is not None and (request_id := transfer_connector.base_id(output.request_id)) in self._fetching:
                        self._hits[request_id] = Hits(stats.num_local_cached_tokens, stats.num_external_cached_tokens)
            return process(outputs, *args, **options)

        processor.process_outputs = listening
