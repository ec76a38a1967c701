"""The decision log: bounded, and found by a request's id and by its client's."""

from __future__ import annotations

from headrace.router.placement.decision_log import EACH, DecisionLog, LoggedDecision


def decision(request_id: str, *, at_s: float, name: str = "", attempt: int = 1) -> LoggedDecision:
    return LoggedDecision(id=request_id, name=name, attempt=attempt, state="placed", reason="load", at_s=at_s, waited_s=0.0)


def test_the_oldest_requests_are_forgotten_with_the_client_s_ids_that_named_only_them() -> None:
    log = DecisionLog(2)
    for n, name in enumerate(["once", "twice", "twice"]):
        log.add(decision(f"r{n}", at_s=float(n), name=name))
    assert log.find("r0") == log.find("once") == []
    assert [found.id for found in log.find("twice")] == ["r1", "r2"]
    log.add(decision("r3", at_s=3.0))
    assert [found.id for found in log.find("twice")] == ["r2"]


def test_a_decision_renews_its_request() -> None:
    log = DecisionLog(2)
    log.add(decision("r0", at_s=0.0))
    log.add(decision("r1", at_s=1.0))
    log.add(decision("r0", at_s=2.0, attempt=2))
    log.add(decision("r2", at_s=3.0))
    assert [found.attempt for found in log.find("r0")] == [1, 2]
    assert log.find("r1") == []


def test_only_the_last_decisions_of_a_request_and_the_last_requests_of_a_client_s_id_are_kept() -> None:
    log = DecisionLog(100)
    for n in range(EACH + 3):
        log.add(decision("r", at_s=float(n), attempt=n + 1))
        log.add(decision(f"n{n}", at_s=float(n), name="same"))
    assert [found.attempt for found in log.find("r")] == list(range(4, EACH + 4))
    assert [found.id for found in log.find("same")] == [f"n{n}" for n in range(3, EACH + 3)]
