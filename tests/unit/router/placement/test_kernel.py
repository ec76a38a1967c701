"""The kernel, interpreted and compiled, chooses to the last bit as the arrays of all costs do."""

from __future__ import annotations

import importlib.util
import random
from math import inf

import pytest

from headrace.router.index.types import Overlap
from headrace.router.placement import kernel as interpreted
from headrace.router.placement import policies, worker_view
from headrace.router.placement.calibration import SpeedEstimate
from headrace.router.placement.cost import CostMatrix
from headrace.router.placement.load import LoadTable
from headrace.router.placement.policies import KvPolicy
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.transfer import PrefillPool
from headrace.router.placement.types import Waiting, WorkerInfo
from headrace.router.placement.worker_view import WorkerView

NOW_S = 1000.0
COMPILED = "headrace.router.placement._kernel"


@pytest.fixture(params=["interpreted", "compiled"])
def kernel(request, monkeypatch):
    if request.param == "compiled" and importlib.util.find_spec(COMPILED) is None:
        pytest.skip("the kernel was not compiled")
    form = interpreted if request.param == "interpreted" else importlib.import_module(COMPILED)
    monkeypatch.setattr(policies, "kernel", form)
    monkeypatch.setattr(worker_view, "kernel", form)
    return form


def state(rng):
    """A window with some requests, and workers in any condition. Round numbers, so that many things are equal."""
    loads = LoadTable()
    names = [f"w{n}" for n in range(rng.randint(1, 6))]
    for name in names:
        labels = frozenset(rng.sample(["a", "b"], rng.randint(0, 2)))
        info = WorkerInfo(worker=name, slots=8, blocks=100, block_size=16, labels=labels, draining=rng.random() < 0.1)
        loads.put(info, SpeedEstimate(0.01, 20_000.0, 1e-4))
    settings = SchedulerSettings(
        ageing=rng.choice([0.0, 0.02, 0.5]), max_wait_s=rng.choice([5.0, 60.0]), thrift=rng.choice([0.0, 0.25])
    )
    window = CostMatrix(loads, PrefillPool(5.0), settings.tiers)
    group = []
    for n in range(rng.randint(1, 8)):
        request = Waiting(
            id=str(n),
            tokens=rng.choice([1, 16, 160, 1600, 1601, 16_000]),
            max_tokens=rng.choice([0, 16, 4000]),
            block_size=16 if rng.random() < 0.9 else 0,
            priority=rng.choice([0, 0, 0, 1]),
            arrived_s=NOW_S - rng.choice([0.0, 0.5, 4.0, 30.0, 61.0, 100.0]),
            deadline_s=NOW_S + rng.choice([0.5, 2.2, 10.0, inf]),
            require=frozenset({"a"} if rng.random() < 0.1 else ()),
            prefer={"b": 1.0} if rng.random() < 0.2 else {},
        )
        held = rng.sample(names, rng.randint(0, len(names)))
        overlaps = {name: Overlap(*rng.choice([(10, 0, 0), (100, 0, 0), (5, 3, 2), (0, 8, 0)])) for name in held}
        window.add(request, overlaps, NOW_S)
        group.append(request)
    return window, group, workers(rng, len(names)), settings


def workers(rng, count):
    def each(*values):
        return [rng.choice(values) for _ in range(count)]

    running = each(0, 3, 8)
    return WorkerView(
        all_wait_s=each(0.0, 0.0, 0.02, 0.3, 1.7),
        all_pending=each(0.0, 400.0),
        all_token_s=each(1 / 20_000.0, 1 / 24_000.0 + 0.00064 / 8192, 1 / 7000.0),
        all_step_s=each(0.008, 0.012, 0.0137),
        all_room=each(True, True, False),
        all_blocks_free=each(inf, 1000.0, 10.0),
        all_running=running,
        all_unevenness=each(1.0, 1.3, 2.7),
        all_disturbed=[0.02 * one for one in running],
    )


@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_requests_are_placed_as_by_all_costs(seed, arrays, kernel, monkeypatch):
    monkeypatch.setattr(policies, "MOST_PAIRS", 10_000)
    rng = random.Random(seed)
    placed = waited = 0
    for _ in range(150):
        window, group, now, settings = state(rng)
        congestion = rng.choice([0.0, 0.25, 2.75, 13.1])
        policy = KvPolicy(settings, random.Random(0))
        expected = policy._pick_by_all_costs(group, window, as_arrays(now), congestion, NOW_S)
        passed_up, policy.passed_up = policy.passed_up, False
        found = policy.pick(group, window, as_arrays(now) if arrays else now, congestion, NOW_S)
        assert (found, policy.passed_up) == (expected, passed_up)
        placed += expected is not None
        waited += passed_up
    assert placed > 30
    assert waited > 3


def as_arrays(now):
    return WorkerView(**{name[4:]: getattr(now, name[4:]) for name in [*now.__dict__] if name.startswith("all_")})


def test_a_worker_that_is_closed_gets_nothing(kernel):
    rng = random.Random(0)
    window, group, now, settings = state(rng)
    for form in (now, as_arrays(now)):
        form.all_room[:] = [True] * window.width
        policy = KvPolicy(settings, rng)
        columns = set()
        while (pick := policy.pick(group, window, form, 0.0, NOW_S)) is not None:
            assert pick.column not in columns
            columns.add(pick.column)
            form.close(pick.column)
        assert columns
        assert not form.room[sorted(columns)].any()
