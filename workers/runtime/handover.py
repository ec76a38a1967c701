"""Decides where a decode worker has a prompt computed: the router's decision if it is still possible, else a plain rule.

The decision is a pure function. Its reasons are the router's (`router/placement/transfer.py`) and label the metric.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import structlog

from headrace.broker.codec import decode, encode, pack_u32, unpack_u32
from headrace.broker.messages.events import LoadReport
from headrace.broker.messages.prefill import PrefillJob
from headrace.broker.messages.requests import Generation, PrefillDecision, Sampling
from headrace.broker.prefill_client import PrefillFailed
from headrace.broker.protocol.run import Run
from headrace.broker.worker.session import WorkerSession
from headrace.workers import metrics
from headrace.workers.engine import DisaggStyle, Engine, EngineInfo, Handover, Output, Role
from headrace.workers.engine import Sequence as EngineSequence
from headrace.workers.runtime.choice import ChoiceRun
from headrace.workers.runtime.decode_side import HandoverDeps, HandoverSettings, LastHandover, RemotePrefillRun, pick
from headrace.workers.runtime.prefill_side import PrefillSide, PrefixLender
from headrace.workers.runtime.runtime import Runtime
from headrace.workers.runtime.sequences import RawSubmissions
from headrace.workers.settings import PrefillMode, WorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The state of a decode worker when a run starts."""

    role: Role
    hands_over: bool  # whether the engine can hand over
    peers: frozenset[str]  # prefill workers that are ready
    tokens: int  # tokens that must be in the cache before the first token
    uncached: int  # those of `tokens` that this engine's cache lacks
    block_size: int
    directed: str = ""  # the one of `peers` to direct the job to, if others that may accept it cannot do it; empty = any
    needs_own_prefill: str = ""  # the part of the request that needs the whole prompt computed here, if any


def decide(routed: PrefillDecision | None, here: Situation, *, mode: PrefillMode, min_tokens: int) -> PrefillDecision:
    """Decide where to compute a prompt. `mode` and `min_tokens` count if no router has decided."""
    if here.role is not Role.DECODE or not here.hands_over:
        return _local("aggregated")
    if routed is not None and not routed.remote:
        return routed
    if routed is None and mode == "never":
        return _local("never")
    if here.needs_own_prefill:
        return _local(here.needs_own_prefill)
    if not here.peers:
        return _local("no_prefill_worker")
    if here.uncached <= here.block_size:
        # There is no whole block to fetch.
        return _local("cached" if here.tokens > here.block_size else "short")
    if routed is not None:
        if routed.worker in here.peers:
            return routed
        if routed.worker:
            return PrefillDecision(remote=True, reason=routed.reason, worker=here.directed)
        return msgspec.structs.replace(routed, worker=here.directed) if here.directed else routed
    if mode == "always":
        return PrefillDecision(remote=True, reason="always", worker=here.directed)
    if here.uncached < min_tokens:
        return _local("short" if here.tokens < min_tokens else "cached")
    return PrefillDecision(remote=True, reason="pays", worker=here.directed)


def _local(reason: str) -> PrefillDecision:
    return PrefillDecision(remote=False, reason=reason)


class HandoverCoordinator:
    """Implements `headrace.workers.runtime.runs.RemotePrefills`."""

    def __init__(self, deps: HandoverDeps, settings: WorkerSettings, *, role: Callable[[], str], lender: PrefixLender) -> None:
        """`role` returns the present role."""
        self._deps = deps
        self._client = deps.client
        self._info = deps.info
        self._settings = settings
        self._role = role
        self._last = LastHandover()
        self._lender = lender

    def decide(self, run: Run, choices: list[ChoiceRun], generation: Generation) -> PrefillDecision:
        """Decide where the prompt of these choices of a run is computed."""
        role = Role(self._role())
        if role is not Role.DECODE:
            return PrefillDecision(reason="aggregated")
        choice = choices[0]
        settings = self._settings
        able = self._client.peers(self._info.handover, generation.adapter)
        here = Situation(
            role=role,
            hands_over=bool(self._info.handover),
            peers=frozenset(peer.worker for peer in able),
            directed=pick(able, self._client.peers(self._info.handover), self._deps.rng),
            tokens=choice.tokens,
            uncached=choice.uncached,
            block_size=self._info.block_size,
            needs_own_prefill=_own_prefill(generation, self._info),
        )
        decision = decide(run.prefill, here, mode=settings.prefill, min_tokens=settings.prefill_min_tokens)
        if decision.reason == "no_prefill_worker" and settings.prefill_unready == "refuse":
            return msgspec.structs.replace(decision, refuse=True)
        return decision

    def remote(self, choices: list[ChoiceRun], decision: PrefillDecision, payload: bytes) -> RemotePrefillRun:
        return RemotePrefillRun(
            choices,
            decision,
            payload,
            self._deps,
            settings=HandoverSettings(wait_s=self._settings.prefill_wait_s, transfer_s=self._settings.transfer_timeout_s),
            last=self._last,
            lender=self._lender,
        )

    def load(self, report: LoadReport) -> LoadReport:
        """Fill in the hand-over fields of a load report."""
        if not self._last.tokens:
            return report
        return msgspec.structs.replace(report, handover_s=self._last.took_s, handover_tokens=self._last.tokens)


def _own_prefill(generation: Generation, info: EngineInfo) -> str:
    """Return the part of a request that another worker cannot compute for this one, or nothing."""
    if generation.media and not info.hands_over_media:
        return "media"
    if generation.guided is not None and info.prefill_samples:  # A parser may have chosen the grammar, here.
        return "guided"
    if generation.prompt_logprobs is not None:
        return "prompt_logprobs"
    return "prompt_embeds" if generation.prompt_embeds is not None else ""


# Warms up each new prefill peer with one short prompt, because the first hand-over between two engines takes long.
#
# The engines map memory, exchange metadata and connect. So a decode worker has every new prefill worker compute a short
# prompt before a request does, and discards the answer. A failed warm-up has no effect on requests, which fall back to a
# local prefill.

log = structlog.get_logger()

BLOCKS = 2
WITHIN_S = 30.0


class PeerWarmup:
    """Warms up the prefill workers that this worker has not met yet."""

    def __init__(self, deps: HandoverDeps, raw: RawSubmissions, *, decodes: Callable[[], bool]) -> None:
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
            EngineSequence(
                id=job.job,
                token_ids=ids,
                prompt_tokens=len(ids),
                sampling=Sampling(temperature=0.0, max_tokens=1),
                handover=handover,
            ),
            on_output,
        )
        return ended


def create_prefill_side(
    engine: Engine, info: EngineInfo, runtime: Runtime, *, worker: str, caches: Sequence[Callable[[], Container[int]]]
) -> PrefillSide | None:
    """Create the prefill side, or return None for an engine without hand-overs."""
    return PrefillSide(engine, info, runtime.raw, worker=worker, caches=caches) if info.handover else None


class Handovers:
    """The decode side of a worker's hand-overs. The runtime uses `coordinator`."""

    def __init__(
        self,
        session: WorkerSession,
        engine: Engine,
        info: EngineInfo,
        runtime: Runtime,
        settings: WorkerSettings,
    ) -> None:
        self._session = session
        self._engine = engine
        state = session.presence
        self._cards: Mapping[str, bytes] = {}
        deps = HandoverDeps(
            client=session.prefill_client,
            engines=runtime.sequences,
            info=info,
            style=engine.capabilities.disagg,
            worker=state.worker,
        )
        lender = PrefixLender(runtime.raw, info)
        self.coordinator = HandoverCoordinator(deps, settings, role=lambda: state.member.role, lender=lender)
        self._warmup = PeerWarmup(
            deps, runtime.raw, decodes=lambda: state.member.role == Role.DECODE and state.taking and session.presence.lease.held
        )
        session.presence.members.on_change(self._on_members)

    async def run(self) -> None:
        await self._warmup.run()

    def _on_members(self) -> None:
        own = self._session.presence.worker
        cards = {
            member.worker: member.transfer_card
            for member in self._session.presence.members.workers(self._session.presence.pool).values()
            if member.transfer_card and member.worker != own
        }
        if cards != self._cards:
            self._cards = cards
            self._engine.meet(cards)
        self._warmup.changed()
