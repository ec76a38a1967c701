from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.broker.messages import Generation, Sampling
from headrace.broker.protocol.run import Run
from headrace.workers.engine import Capabilities
from headrace.workers.runtime.refusal import cannot_resume

LESS = Capabilities()
ALL = Capabilities(resume_penalties=True, resume_repetition=True)


def run(*ids: int) -> Run:
    return cast("Run", SimpleNamespace(choices=[SimpleNamespace(ids=list(ids), settled=False)]))


def generation(**sampling: Any) -> Generation:
    return Generation(token_ids=[1], sampling=Sampling(max_tokens=8, **sampling))


@pytest.mark.parametrize(
    ("sampling", "word"),
    [
        ({"repetition_penalty": 1.2}, "repetition"),
        ({"presence_penalty": 0.1}, "presence"),
        ({"frequency_penalty": -1}, "frequency"),
    ],
)
def test_penalties_that_the_engine_cannot_carry_over_stop_a_resume_by_name(sampling: dict[str, float], word: str) -> None:
    reason = cannot_resume(run(5), generation(**sampling), LESS)
    assert reason is not None
    assert word in reason
    assert cannot_resume(run(), generation(**sampling), LESS) is None, "nothing was emitted, so it begins again"
    assert cannot_resume(run(5), generation(**sampling), ALL) is None


def test_a_plain_answer_is_resumed() -> None:
    assert cannot_resume(run(5), generation(), LESS) is None
