"""When a part of `headrace up` is started again, and when not."""

from __future__ import annotations

from headrace.up.restart_policy import Leave, Restart, RestartState


def _crash(
    state: RestartState, *, at_s: float, ran_s: float = 0.0, exit_code: int = 1, serving: bool = True
) -> Restart | Leave:
    state.started(at_s)
    return state.exited(at_s + ran_s, exit_code=exit_code, serving=serving)


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
