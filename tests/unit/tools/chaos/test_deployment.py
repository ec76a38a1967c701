"""A deployment is asked until it is at rest; a broker that elects its leader meanwhile is asked again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from headrace.jetstream.errors import RequestTimeout
from headrace.tools.chaos import deployment
from headrace.tools.chaos.deployment import Residue, until_at_rest

AT_REST = Residue({"queued": 0}, [])
QUEUED = Residue({"queued": 1}, [])
NOTHING = cast("Any", None)


def answers(patch: pytest.MonkeyPatch, given: Iterator[Residue | RequestTimeout]) -> None:
    async def residue(*_: object) -> Residue:
        answer = next(given)
        if isinstance(answer, RequestTimeout):
            raise answer
        return answer

    patch.setattr(deployment, "residue", residue)
    patch.setattr(deployment, "_POLL_S", 0.0)


async def test_a_broker_that_does_not_answer_at_once_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, iter([RequestTimeout("no leader"), QUEUED, AT_REST]))
    assert await until_at_rest(NOTHING, NOTHING, (), timeout_s=30) == AT_REST


async def test_one_that_never_answers_is_an_error_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, iter([RequestTimeout("no leader")]))
    with pytest.raises(RequestTimeout):
        await until_at_rest(NOTHING, NOTHING, (), timeout_s=0)


async def test_what_is_left_when_the_time_is_over_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, iter([QUEUED]))
    assert await until_at_rest(NOTHING, NOTHING, (), timeout_s=0) == QUEUED
