"""Warms up each new prefill peer with one short prompt, because the first hand-over between two engines takes long.

The engines map memory, exchange metadata and connect. So a decode worker has every new prefill worker compute a short prompt
before a request does, and discards the answer. A failed warm-up has no effect on requests, which fall back to a local prefill.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

import structlog

from headrace.broker.codec import decode, encode, pack_u32, unpack_u32
from headrace.broker.messages import Generation, Sampling
from headrace.broker.messages.prefill import PrefillJob
from headrace.broker.prefill.errors import PrefillFailed
from headrace.workers import metrics
from headrace.workers.engine import DisaggStyle, Handover, Output, Sequence
from headrace.workers.handover.decode_side import HandoverDeps
from headrace.workers.handover.prefill_side import RawSequences

log = structlog.get_logger()

BLOCKS = 2
WITHIN_S = 30.0


class PeerWarmup:
    """Warms up the prefill workers that this worker has not met yet."""

    def __init__(self, deps: HandoverDeps, raw: RawSequences, *, decodes: Callable[[], bool]) -> None:
        """`decodes` returns whether this worker has the role `decode` and serves."""
        self._client = deps.client
        self._raw = raw
        self._info = deps.info
        self._style = deps.style
        self._worker = deps.worker
        self._decodes = decodes
        self._wall = deps.wall
        self._met: set[str] = set()
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Note that the members have changed."""
        self._changed.set()

    async def run(self) -> None:
        """Warm up new peers, one after the other, until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            peers = {peer.worker for peer in self._client.peers(self._info.handover)} if self._decodes() else set()
            self._met &= peers
            for peer in sorted(peers - self._met):
                self._met.add(peer)
                await self._warm_up(peer)

    async def _warm_up(self, peer: str) -> None:
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
        ids = [secrets.randbelow(self._info.vocab_size) for _ in range(length)]  # Random ids are in no cache.
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
        """Have `peer` compute the prompt and fetch its blocks. Raises PrefillFailed."""
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
