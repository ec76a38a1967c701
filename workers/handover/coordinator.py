"""What a worker knows of hand-overs: its role, who its peers are, what is decided, and how the last one went."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import msgspec

from headrace.broker.messages import Generation, LoadReport, PrefillDecision
from headrace.broker.prefill.client import PrefillClient
from headrace.broker.protocol.run import Run
from headrace.workers.engine import DisaggStyle, EngineInfo, Role
from headrace.workers.handover.decision import Situation, decide
from headrace.workers.handover.decode_side import Engines, Handed, HandoverSettings, RemotePrefill, pick
from headrace.workers.runtime.choice import ChoiceRun
from headrace.workers.settings import WorkerSettings


class HandoverCoordinator:
    """Implements `headrace.workers.runtime.runs.Remotes`."""

    def __init__(
        self,
        client: PrefillClient,
        engines: Engines,
        info: EngineInfo,
        settings: WorkerSettings,
        *,
        style: DisaggStyle,
        worker: str,
        role: Callable[[], str],
        rng: random.Random | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`role()`: the present one. `rng` chooses among prefill workers that are alike."""
        self._client = client
        self._engines = engines
        self._info = info
        self._settings = settings
        self._style = style
        self._worker = worker
        self._role = role
        self._rng = rng or random.Random()  # noqa: S311 - choices, no secrets
        self._wall = wall
        self._last = Handed()

    def decide(self, run: Run, choices: list[ChoiceRun], generation: Generation) -> PrefillDecision:
        """Where the prompt of these choices of one run is computed."""
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
            directed=pick(able, self._client.peers(self._info.handover), self._rng),
            tokens=choice.tokens,
            uncached=choice.uncached,
            block_size=self._info.block_size,
            needs_own_prefill=_own_prefill(generation, self._info),
        )
        decision = decide(run.prefill, here, mode=settings.prefill, min_tokens=settings.prefill_min_tokens)
        if decision.reason == "no_prefill_worker" and settings.prefill_unready == "refuse":
            return msgspec.structs.replace(decision, refuse=True)
        return decision

    def remote(self, choices: list[ChoiceRun], decision: PrefillDecision, payload: bytes) -> RemotePrefill:
        """One that is ready to run."""
        return RemotePrefill(
            choices,
            decision,
            payload,
            client=self._client,
            engines=self._engines,
            info=self._info,
            style=self._style,
            worker=self._worker,
            settings=HandoverSettings(wait_s=self._settings.prefill_wait_s, transfer_s=self._settings.transfer_timeout_s),
            last=self._last,
            rng=self._rng,
            wall=self._wall,
        )

    def load(self, report: LoadReport) -> LoadReport:
        """Fill in what load reports say of hand-overs."""
        if not self._last.tokens:
            return report
        return msgspec.structs.replace(report, handover_s=self._last.took_s, handover_tokens=self._last.tokens)


def _own_prefill(generation: Generation, info: EngineInfo) -> str:
    """What of a request another worker cannot compute for this one."""
    if generation.media and not info.hands_over_media:
        return "media"
    if generation.prompt_logprobs is not None:
        return "prompt_logprobs"
    return "prompt_embeds" if generation.prompt_embeds is not None else ""
