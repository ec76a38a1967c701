"""Rules of counting crashes, each with a way to take it out of force."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.broker.ingress import inbox
from headrace.broker.messages.control import HistoryEntry
from headrace.broker.protocol import job_record, judge
from headrace.broker.protocol.judge import Judge
from tests.simulation.protocol.guards.registry import guard


@guard
def suspicions_are_not_crashes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(job_record, "counted", lambda history, held, accounted: list(history))


@guard
def who_is_back_has_not_crashed(patch: pytest.MonkeyPatch) -> None:
    real = job_record.counted
    patch.setattr(job_record, "counted", lambda history, held, accounted: real(history, held, lambda worker: False))


@guard
def who_drains_has_not_crashed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(inbox, "drained_key", lambda worker: f"nothing.{worker}")


@guard
def the_death_of_an_engine_counts(patch: pytest.MonkeyPatch) -> None:
    real = job_record.counted

    def processes_only(history: Any, held: Any, accounted: Any) -> list[HistoryEntry]:
        return real([entry for entry in history if "#" not in entry.worker], held, accounted)

    patch.setattr(job_record, "counted", processes_only)


@guard
def a_started_event_is_evidence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Judge, "on_event", lambda self, event: None)


@guard
def crashes_end_a_request(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(judge, "is_poison", lambda crashes: False)
