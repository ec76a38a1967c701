"""A worker's row says what its lease and its last load report say, and that there is none."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.messages.events import LoadReport
from headrace.broker.messages.members import WorkerMember
from headrace.top import LEAST_WIDTH, ORDERS, STALE_S, Order, PoolRow, Snapshot, State, StreamRow, WorkerRow, draw, worker_row


def member(**more: Any) -> WorkerMember:
    return WorkerMember(worker="w", pool="p", model="m", slots=8, **more)


def report(at: float = 100.0, **more: Any) -> LoadReport:
    return LoadReport(**({"worker": "w", "epoch": 1, "n": 1, "at": at, "slots": 8, "running": 4, "waiting": 1} | more))


def test_a_row_has_the_load_of_the_last_report() -> None:
    row = worker_row(member(), report(blocks_total=200, blocks_used=50, step_s=0.02, step_decodes=4, tiers=[9, 1, 0]), 100.5)
    assert (row.state, row.running, row.slots, row.waiting) == ("serving", 4, 8, 1)
    assert (row.kv_used, row.tokens_s, row.step_s, row.report_age_s) == (0.25, 200.0, 0.02, 0.5)
    assert row.tiers == [9, 1, 0]


def test_an_idle_worker_makes_no_tokens_whatever_its_last_step_was() -> None:
    assert worker_row(member(), report(running=0, step_s=0.02, step_decodes=4), 100.0).tokens_s == 0.0


def test_a_worker_whose_reports_stopped_is_named() -> None:
    assert worker_row(member(), report(), 100.0 + STALE_S).state == "serving"
    assert worker_row(member(), report(), 100.1 + STALE_S).state == "no report"
    assert worker_row(member(), None, 100.0).state == "no report"


@pytest.mark.parametrize(
    ("lease", "state"),
    [
        ({"draining": True}, "draining"),
        ({"draining": True, "sleeping": 1}, "asleep"),
        ({"draining": True, "sleeping": 1, "waking": True}, "waking"),
        ({"draining": True, "paused": True}, "paused"),
    ],
)
def test_a_worker_that_takes_no_requests_says_why(lease: dict[str, Any], state: str) -> None:
    assert worker_row(member(**lease), report(), 100.0).state == state


STATES: tuple[State, ...] = get_args(State)
ANSI = re.compile(r"\x1b\[\d+m")


def worker(name: str = "w-1", **more: Any) -> WorkerRow:
    return WorkerRow(**({"worker": name, "pool": "p", "model": "m", "role": "aggregated", "state": "serving"} | more))


def snapshot(*workers: WorkerRow, **more: Any) -> Snapshot:
    return Snapshot(
        **(
            {
                "at": 1e9,
                "frontends": 1,
                "pools": (PoolRow(pool="p", routers=1, stored={"std": 3, "batch": 0}),),
                "workers": workers,
                "streams": (StreamRow(stream="REQ", messages=3), StreamRow(stream="DLQ")),
            }
            | more
        )
    )


BUSY = worker("worker-2-6b07214711a8", running=6, slots=64, waiting=2, kv_used=0.5, tokens_s=1234.0, step_s=0.0123)
IDLE = worker("idle", slots=8, kv_used=0.75)

WORKERS = st.builds(
    WorkerRow,
    worker=st.text(max_size=70),
    pool=st.just("p"),
    model=st.just("m"),
    role=st.sampled_from(["aggregated", "prefill", "decode"]),
    state=st.sampled_from(STATES),
    running=st.integers(0, 10**9),
    slots=st.integers(0, 10**9),
    waiting=st.integers(0, 10**9),
    kv_used=st.none() | st.floats(0, 2),
    tokens_s=st.floats(0, 1e9),
    step_s=st.floats(0, 1e3),
)


@given(
    st.lists(WORKERS, max_size=60),
    st.integers(LEAST_WIDTH, 200),
    st.integers(3, 60),
    st.sampled_from(ORDERS),
    st.booleans(),
    st.text(max_size=99),
)
def test_any_state_fits_the_terminal(
    rows: list[WorkerRow], width: int, height: int, order: Order, colour: bool, trouble: str
) -> None:
    lines = draw(snapshot(*rows), width=width, height=height, order=order, colour=colour, trouble=trouble)
    assert len(lines) <= height
    plain = [ANSI.sub("", line) for line in lines]
    assert max(map(len, plain)) <= width
    assert all(line.isprintable() for line in plain)
    assert colour or plain == lines
    assert plain == draw(snapshot(*rows), width=width, height=height, order=order, trouble=trouble)


def test_a_terminal_of_80_by_24_shows_all_columns_of_a_usual_worker() -> None:
    text = "\n".join(draw(snapshot(BUSY, IDLE), width=80, height=24))
    assert re.search(r"^WORKER +ROLE +STATE +RUN +WAIT +KV +TOK/S +STEP$", text, re.MULTILINE)
    assert re.search(r"^worker-2-6b07214711a8 +agg +serving +6/64 +2 +##\.\.\. +50% +1,234 +12\.3ms$", text, re.MULTILINE)
    assert re.search(r"^idle +agg +serving +0/8 +0 +####\. +75% +- +-$", text, re.MULTILINE)
    assert "1 frontend, 1 router, 2 of 2 workers serving   6 of 72 slots   1,234 tokens/s" in text
    assert "pool p (m): 2 workers, 1 router, waiting: 3 std" in text
    assert "stored: REQ 3  DLQ ?" in text


def test_fleets_of_a_pool_have_a_line_of_their_own() -> None:
    rows = [worker(f"w{n}", slots=8, running=n, fleet="dear" if n == 3 else "cheap") for n in range(4)]
    text = draw(snapshot(*rows), width=80, height=24)
    assert "  fleets: cheap 3 of 3 serving 3/24, dear 1 of 1 serving 3/8" in text
    assert not any("fleets" in line for line in draw(snapshot(BUSY, IDLE), width=80, height=24))


def test_tiers_are_shown_where_a_worker_uses_one_below_the_device_and_there_is_room() -> None:
    tiered = worker("tiered", slots=8, kv_used=0.5, tiers=[120, 300, 0])
    wide = "\n".join(draw(snapshot(tiered, IDLE), width=100, height=24))
    assert re.search(r"^WORKER +ROLE +STATE +RUN +WAIT +KV +TIERS +TOK/S +STEP$", wide, re.MULTILINE)
    assert re.search(r"^tiered .* 120/300/0 +- +-$", wide, re.MULTILINE)
    assert "TIERS" not in "\n".join(draw(snapshot(tiered, IDLE), width=60, height=24))
    assert "TIERS" not in "\n".join(draw(snapshot(worker(tiers=[120, 0, 0]), IDLE), width=100, height=24))


@pytest.mark.parametrize(("order", "first"), [("load", "w"), ("kv", "i"), ("tokens", "w"), ("name", "i")])
def test_workers_are_sorted_as_asked(order: Order, first: str) -> None:
    lines = draw(snapshot(IDLE, BUSY), width=80, height=24, order=order)
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("WORKER")) + 1 :]
    assert "".join(line[0] for line in table) == ("wi" if first == "w" else "iw")


def test_workers_that_do_not_fit_are_counted() -> None:
    lines = draw(snapshot(*(worker(f"w-{n:02}") for n in range(50))), width=80, height=24)
    assert len(lines) == 24
    shown = sum(line.startswith("w-") for line in lines)
    assert lines[-1] == f"… and {50 - shown} workers more, sorted by load"


def test_without_a_height_every_worker_is_shown() -> None:
    lines = draw(snapshot(*(worker(f"w-{n:02}") for n in range(50))), width=80, height=None)
    assert sum(line.startswith("w-") for line in lines) == 50


def test_a_state_that_is_not_current_says_why() -> None:
    assert "NOT CURRENT: no answer within 5 s" in draw(snapshot(), width=80, height=24, trouble="no answer within 5 s")[0]


def test_a_deployment_without_workers_says_so() -> None:
    lines = draw(snapshot(pools=()), width=80, height=24)
    assert lines[-1] == "no worker holds a lease"


def test_names_cannot_write_control_codes() -> None:
    text = "\n".join(draw(snapshot(worker("a\x1b[2Jb")), width=80, height=24))
    assert "\x1b" not in text
    assert "a?[2Jb" in text
