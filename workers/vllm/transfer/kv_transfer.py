"""Handles the KV transfers of a started engine: sequences that fetch blocks, and blocks that are offered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import structlog

from headrace.workers.engine import DisaggStyle, Output, Role, Sequence
from headrace.workers.errors import TransferFailed, UnsupportedByEngine
from headrace.workers.vllm.transfer import transfer_params
from headrace.workers.vllm.transfer.connector import ConnectorChoice
from headrace.workers.vllm.transfer.remote_fetches import Fetches

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
            return transfer_params.prefill_id(sequence.id), self._prefill_params(sequence)
        params = transfer_params.checked(
            asked.params,
            mode=self._transfer.mode,
            prompt_tokens=len(sequence.token_ids),
            block_size=self._block_size,
        )
        return transfer_params.base_id(params["remote_request_id"]), params

    def _prefill_params(self, sequence: Sequence) -> dict[str, Any]:
        asked = sequence.handover
        assert self._transfer is not None and asked is not None  # noqa: PT018, S101  # a hand-over was asked for
        if asked.params is None or not self._transfer.reads:
            return dict(transfer_params.ASK)
        return transfer_params.borrowed(asked.params, prompt_tokens=len(sequence.token_ids))

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
            output.handover = transfer_params.lent(output.handover, until=at + self._transfer.lease_s)
        if hits is not None:
            output.extra = {**(output.extra or {}), "remote_tokens": hits.fetched}

    def aborted(self, request_id: str, sequence: Sequence) -> None:
        """Record that a sequence was aborted in vLLM."""
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
            self._releases.put_nowait((sequence_id, None if params is None else transfer_params.reachable(params)))
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
                    if stats is not None and (request_id := transfer_params.base_id(output.request_id)) in self._fetching:
                        self._hits[request_id] = Hits(stats.num_local_cached_tokens, stats.num_external_cached_tokens)
            return process(outputs, *args, **options)

        processor.process_outputs = listening
