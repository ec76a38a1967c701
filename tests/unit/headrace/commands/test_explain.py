"""A router's decision, as people read it."""

from __future__ import annotations

import pytest

from headrace.broker.messages import Candidate, Explanation, PrefillDecision
from headrace.commands.explain import explained

TOLD = Explanation(id="r1", router="router-1", policy="kv", state="placed", worker="decode-1", reason="load")


@pytest.mark.parametrize(
    ("decision", "words"),
    [
        (PrefillDecision(remote=True, worker="prefill-2", reason="prefix"), "prompt computed by prefill-2, reason prefix"),
        (PrefillDecision(remote=True, reason="pays"), "prompt computed by any prefill worker, reason pays"),
        (PrefillDecision(reason="short"), "prompt computed by the worker that answers, reason short"),
        (PrefillDecision(), "prompt computed by the worker that answers"),
    ],
)
def test_where_the_prompt_is_computed_and_why(decision: PrefillDecision, words: str) -> None:
    told = Explanation(**{name: getattr(TOLD, name) for name in TOLD.__struct_fields__ if name != "prefill"}, prefill=decision)
    assert f"  {words}" in explained(told).splitlines()


def test_nothing_is_said_of_prefill_where_it_was_no_question() -> None:
    assert "prompt" not in explained(TOLD)


def test_the_chosen_worker_comes_first_and_is_marked() -> None:
    told = Explanation(
        id="r1",
        state="placed",
        worker="b",
        candidates=[Candidate(worker="a", cost_s=0.1, room=True), Candidate(worker="b", cost_s=0.2, room=True)],
    )
    rows = explained(told).splitlines()
    assert [row.split()[0] for row in rows[-2:]] == ["→", "a"]
    assert rows[-2].split()[1] == "b"
