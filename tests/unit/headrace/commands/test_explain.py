"""A router's decision, as people read it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from headrace.broker.messages import Candidate, Decided, Explanation, FleetDecision, FleetOption, PrefillDecision
from headrace.commands.explain import chronology, explained

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


def test_a_request_that_moved_shows_every_placement_in_order_of_time() -> None:
    first = replace(TOLD, at=10.0)
    second = replace(TOLD, at=14.0, attempt=2, worker="decode-2", waited_s=0.002, since_arrival_s=4.1, predicted_ttft_s=4.11)
    third = replace(TOLD, at=15.0, attempt=3, worker="decode-3", router="router-2")
    shown = chronology([third, replace(second, earlier=[Decided(**{f: getattr(first, f) for f in Decided.__struct_fields__})])])
    assert [one.worker for one in shown] == ["decode-1", "decode-2", "decode-3"]
    head, _, times = explained(second).splitlines()[:3]
    assert head == "r1, attempt 2: placed on decode-2"
    assert "waited 0.002 s in the window, 4.100 s after the request arrived" in times
    assert "predicted first token 0.010 s after the placement" in times


def test_one_that_waits_has_no_prediction_and_the_client_s_id_is_shown() -> None:
    text = explained(replace(TOLD, state="waiting", worker="", name="mine-1"))
    assert "the client's id is mine-1" in text
    assert "predicted" not in text


def test_the_fleet_is_shown_with_the_predictions_of_the_others() -> None:
    options = [
        FleetOption(fleet="cheap", price=1.0, rank=1, state="late", ttft_s=2.0, itl_s=0.02, late_s=1.1),
        FleetOption(fleet="dear", price=4.0, rank=0, state="meets", ttft_s=0.3, itl_s=0.01),
        FleetOption(fleet="new", price=4.0, rank=2, state="unknown", ttft_s=-1.0, itl_s=-1.0, late_s=-1.0),
    ]
    fleet = FleetDecision(fleet="dear", reason="meets", ttft_target_s=1.0, itl_target_s=0.05, options=options)
    line = "fleet dear, reason meets; targets 1 s to the first token, 0.05 s between two; dear meets (0.300 s, 0.010 s); "
    assert line + "cheap late (2.000 s, 0.020 s); new unknown" in explained(replace(TOLD, fleet=fleet))
