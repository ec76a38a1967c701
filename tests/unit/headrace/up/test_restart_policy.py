"""When a part of `headrace up` is started again, and when not."""

from __future__ import annotations

from headrace.up.restart_policy import Backoff, Leave, Restart, RestartState


def _crash(
    state: RestartState, *, at_s: float, ran_s: float = 0.0, exit_code: int = 1, serving: bool = True
) -> Restart | Leave:
    state.started(at_s)
    return state.exited(at_s + ran_s, exit_code=exit_code, serving=serving)


def test_waits_double_up_to_the_limit() -> None:
    state = RestartState(essential=False)
    waits = [decision.after_s for _ in range(9) if isinstance(decision := _crash(state, at_s=0.0), Restart)]
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_the_last_part_of_its_kind_does_not_wait_long_once_the_deployment_was_ready() -> None:
    waits: dict[tuple[bool, bool], list[float]] = {}
    for ready, last in ((True, True), (True, False), (False, True)):
        state = RestartState(essential=False)
        for _ in range(6):
            state.started(0.0)
            decision = state.exited(0.0, exit_code=-9, serving=False, ready=ready, last=last)
            assert isinstance(decision, Restart)
            waits.setdefault((ready, last), []).append(decision.after_s)
    assert waits[True, True] == [0.5, 1.0, 2.0, 2.0, 2.0, 2.0]
    assert waits[True, False] == waits[False, True] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]


def test_a_healthy_minute_forgets_earlier_crashes() -> None:
    state = RestartState(essential=False)
    for _ in range(5):
        _crash(state, at_s=0.0)
    assert _crash(state, at_s=100.0, ran_s=59.9) == Restart(16.0, 6)
    assert _crash(state, at_s=200.0, ran_s=60.0) == Restart(0.5, 1)


def test_thousands_of_crashes_keep_the_longest_wait() -> None:
    state = RestartState(essential=False, backoff=Backoff(most_s=5.0))
    decision = None
    for _ in range(3000):
        decision = _crash(state, at_s=0.0)
    assert decision == Restart(5.0, 3000)


def test_a_killed_part_is_restarted() -> None:
    assert isinstance(_crash(RestartState(essential=False), at_s=0.0, exit_code=-9), Restart)


def test_a_wanted_end_is_left_alone_whatever_its_code() -> None:
    for code in (0, 1, -9, 78):
        state = RestartState(essential=True)
        state.stop_asked()
        assert _crash(state, at_s=0.0, exit_code=code) == Leave("asked")


def test_a_drained_worker_stays_away_but_an_essential_part_comes_back() -> None:
    assert _crash(RestartState(essential=False), at_s=0.0, exit_code=0) == Leave("drained")
    assert isinstance(_crash(RestartState(essential=True), at_s=0.0, exit_code=0), Restart)


def test_wrong_settings_end_everything_unless_others_serve() -> None:
    worker = RestartState(essential=False)
    assert _crash(worker, at_s=0.0, exit_code=78, serving=False) == Leave("configuration", fatal=True, exit_code=78)
    assert _crash(worker, at_s=0.0, exit_code=78, serving=True) == Leave("configuration", fatal=False, exit_code=78)
    frontend = RestartState(essential=True)
    assert _crash(frontend, at_s=0.0, exit_code=78, serving=True) == Leave("configuration", fatal=True, exit_code=78)


def test_a_deployment_that_was_ready_never_ends_since_a_part_refuses_to_go_on() -> None:
    for essential in (False, True):
        state = RestartState(essential=essential)
        state.started(0.0)
        assert state.exited(1.0, exit_code=78, serving=False, ready=True) == Restart(0.5, 1)
