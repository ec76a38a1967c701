"""Windows that count: what was counted is sent once, and what comes back replaces it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.frontend.auth.usage_window import UsageWindow


def test_a_window_ends_with_its_time() -> None:
    window = UsageWindow(60.0, 10)
    window.add(120.0, 4)
    assert (window.used(179.9), window.room(179.9)) == (4, 6)
    assert (window.used(180.0), window.room(180.0)) == (0, 10)
    assert window.ends_in_s(150.0) == 30.0
    assert window.take(181.0) == [(2, 4)]  # the sum of the window that is over is still told


def test_the_sum_of_all_frontends_comes_back() -> None:
    window = UsageWindow(60.0, 10)
    window.add(0.0, 2)
    assert window.take(1.0) == [(0, 2)]
    window.add(2.0, 1)
    assert window.used(2.0) == 3
    window.learn(0, 7)
    assert window.used(3.0) == 8
    assert window.take(4.0) == [(0, 1)]
    window.failed(0, 1)
    assert window.used(5.0) == 8
    assert window.take(6.0) == [(0, 1)]
    window.learn(0, None)
    assert window.used(7.0) == 8


def test_another_limit_leaves_what_was_used() -> None:
    window = UsageWindow(60.0, 10)
    window.add(0.0, 8)
    window.limit_to(5)
    assert (window.used(1.0), window.room(1.0)) == (8, -3)
    assert window.take(1.0) == [(0, 8)]
    window.learn(0, 9)
    assert (window.used(2.0), window.room(2.0)) == (9, -4)
    assert (window.used(60.0), window.room(60.0)) == (0, 5)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 2), st.integers(1, 9)),
        st.tuples(st.just("share"), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("wait"), st.integers(1, 70), st.none()),
    ),
    max_size=60,
)


@given(STEPS)
def test_frontends_that_share_agree_with_the_exact_sum(steps: list[tuple[str, int, int | bool | None]]) -> None:
    """Three frontends, a server that adds, and messages that fail: nothing is counted twice, nothing is lost."""
    windows = [UsageWindow(60.0, 0) for _ in range(3)]
    server: dict[int, int] = {}
    exact: dict[int, int] = {}
    now = 0.0

    def share(window: UsageWindow, *, works: bool) -> None:
        for number, amount in window.take(now):
            if works:
                server[number] = server.get(number, 0) + amount
                window.learn(number, server[number])
            else:
                window.failed(number, amount)

    for kind, which, value in steps:
        if kind == "add":
            assert value is not None
            windows[which].add(now, int(value))
            exact[int(now // 60)] = exact.get(int(now // 60), 0) + int(value)
        elif kind == "share":
            share(windows[which], works=bool(value))
        else:
            now += which
        assert all(window.used(now) <= exact.get(int(now // 60), 0) for window in windows)
    for window in windows * 2:
        share(window, works=True)
    assert server == exact
    for window in windows:
        window.add(now, 1)
        share(window, works=True)
    share(windows[0], works=True)
    current = exact.get(int(now // 60), 0)
    assert windows[-1].used(now) == current + 3
