"""Two engines that have never met take long over their first hand-over: memory is mapped, metadata exchanged, connections made.

So a decode worker has every new prefill worker compute one short prompt for it before a request does, and throws the answer
away.  Whether that works says nothing about requests: they have their own way back.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

import structlog

from headrace.broker.codec import decode, encode, pack_u32, unpack_u32
from headrace.broker.messages import Generation, Sampling
from headrace.broker.messages.prefill import PrefillJob
from headrace.broker.prefill.client import PrefillClient
from headrace.broker.prefill.errors import PrefillFailed
from headrace.workers import metrics
from headrace.workers.engine import DisaggStyle, EngineInfo, Handover, Output, Sequence
from headrace.workers.handover.prefill_side import RawSequences

log = structlog.get_logger()

BLOCKS = 2
WITHIN_S = 30.0


class PeerWarmup:
    """The prefill workers that this one has met."""

    def __init__(
        self,
        client: PrefillClient,
        raw: RawSequences,
        info: EngineInfo,
        *,
        style: DisaggStyle,
        worker: str,
        decodes: Callable[[], bool],
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`decodes()`: this worker is in the role `decode` and serves."""
        self._client = client
        self._raw = raw
        self._info = info
        self._style = style
        self._worker = worker
        self._decodes = decodes
        self._wall = wall
        self._met: set[str] = set()
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Somebody has come or gone."""
        self._changed.set()

    async def run(self) -> None:
        """Meet whoever is new, one after the other, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            peers = {peer.worker for peer in self._client.peers(self._info.handover)} if self._decodes() else set()
            self._met &= peers
            for peer in sorted(peers - self._met):
                self._met.add(peer)
                await self._meet(peer)

    async def _meet(self, peer: str) -> None:
        began_s = self._wall()
        job = self._job(peer)
        try:
            async with asyncio.timeout(WITHIN_S):
                await self._hand_over(job, peer)
        except (PrefillFailed, TimeoutError) as error:
            metrics.PREFILL_FAILURES.labels("acquaintance").inc()
            log.warning("peer.not_met", peer=peer, why=str(error) or type(error).__name__)
        else:
            log.info("peer.met", peer=peer, took_s=round(self._wall() - began_s, 3))
        finally:
            self._raw.abort_raw(job.job)
            self._client.settle(job.job)

    def _job(self, peer: str) -> PrefillJob:
        length = max(2, min(BLOCKS * self._info.block_size + 1, self._info.context_length - 1))
        ids = [secrets.randbelow(self._info.vocab_size) for _ in range(length)]  # cached by nobody
        name = f"meet-{secrets.token_hex(6)}"
        return PrefillJob(
            job=f"{name}-1-{secrets.token_hex(2)}-0",
            id=name,
            attempt=1,
            decode=self._worker,
            deadline=self._wall() + WITHIN_S,
            created=self._wall(),
            tokens=length,
            uncached=length,
            room=secrets.randbits(62) if self._style is DisaggStyle.RENDEZVOUS else None,
            payload=encode(Generation(token_ids=pack_u32(ids), sampling=Sampling(temperature=0.0, max_tokens=1))),
        )

    async def _hand_over(self, job: PrefillJob, peer: str) -> None:
        """Raises PrefillFailed."""
        await self._client.publish(job, directed=peer)
        taken = await self._client.taken(job.job, wait_s=WITHIN_S)
        if self._style is DisaggStyle.RENDEZVOUS:
            ended = self._submit(job, Handover(kind="decode", room=job.room, peer=taken.address))
            await self._client.done(job.job)
        else:
            done = await self._client.done(job.job)
            ended = self._submit(job, Handover(kind="decode", params=done.params))
        output = await ended
        if output.fault is not None:
            raise PrefillFailed("transfer_failed", output.fault.message)

    def _submit(self, job: PrefillJob, handover: Handover) -> asyncio.Future[Output]:
        ended: asyncio.Future[Output] = asyncio.get_running_loop().create_future()

        def on_output(output: Output) -> None:
            if (output.finish is not None or output.fault is not None) and not ended.done():
                ended.set_result(output)

        ids = unpack_u32(decode(Generation, job.payload).token_ids)
        self._raw.submit_raw(
            Sequence(
                id=job.job,
                token_ids=ids,
                prompt_tokens=len(ids),
                sampling=Sampling(temperature=0.0, max_tokens=1),
                handover=handover,
            ),
            on_output,
        )
        return ended
