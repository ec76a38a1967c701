"""Coordinates a worker's hand-overs: decides where each prompt is computed, and reports the last hand-over."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headrace.broker.messages import Generation, LoadReport, PrefillDecision
from headrace.broker.protocol.run import Run
from headrace.workers.engine import EngineInfo, Role
from headrace.workers.handover.decision import Situation, decide
from headrace.workers.handover.decode_side import HandoverDeps, HandoverSettings, LastHandover, RemotePrefillRun, pick
from headrace.workers.handover.prefix_lending import PrefixLender
from headrace.workers.runtime.choice import ChoiceRun
from headrace.workers.settings import WorkerSettings


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
        """Create the remote prefill of a run. The caller runs it."""
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
