from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.router.errors import SettingsInvalid
from headrace.router.index.view import Caches
from headrace.router.placement.scheduler import Scheduler
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.types import Waiting, WorkerInfo
from headrace.tools.replay_bench import policies as subject
from headrace.tools.replay_bench.classic import Classic, ClassicWeights
from headrace.tools.replay_bench.engine import EngineModel
from headrace.tools.replay_bench.policies import ALL, Dynamo, DynamoCore, DynamoFailed, MirroredCaches, Policy, changed
from headrace.tools.replay_bench.replay import ReplayPool, replay
from headrace.tools.replay_bench.trace import generate


@pytest.mark.parametrize("name", ALL)
def test_every_policy_makes_a_router(name):
    router = Policy(name=name).router("me", 3)
    assert isinstance(router.view, Caches)
    assert isinstance(router.scheduler, Classic if name == "classic" else Scheduler)
    if name != "classic":
        assert router.scheduler.settings.policy == name


@pytest.mark.parametrize("name", ["best", "classic+early", "direct", "kv+late", ""])
def test_other_names_are_refused(name):
    with pytest.raises(SettingsInvalid, match=f"policy '{name}'".replace("+", r"\+")):
        Policy(name=name)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"agein": 1}, "no setting 'agein' in SchedulerSettings"),
        ({"fairness.x": 1}, "no setting 'x' in FairnessSettings"),
        ({"ageing.x": 1}, "'ageing' of SchedulerSettings has no parts, so no x"),
        ({"ageing": "much"}, "do not fit SchedulerSettings"),
        ({"ageing": -1.0}, "ageing"),
    ],
)
def test_a_wrong_setting_is_named(values, told):
    with pytest.raises(SettingsInvalid, match=told):
        changed(SchedulerSettings(), values)


STAND_IN = Path(__file__).parents[3] / "support" / "router" / "dynamo_stand_in"
PYTHON = Path(sys.executable)


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Iterator[DynamoCore]:
    pytest.importorskip("zmq")  # comes with the engines
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    with DynamoCore(PYTHON) as core:
        yield core


def pool(**more: int) -> ReplayPool:
    trace = generate("conversations", requests=80, seed=1)
    return ReplayPool(trace=trace, workers=3, model=EngineModel(blocks=400), **more)


def policy(core: DynamoCore, scale: float = 2.0) -> Policy:
    return Policy(name="dynamo", core=core, weights=ClassicWeights(scale=scale))


def scripted(tmp_path: Path, script: str) -> DynamoCore:
    """Return a core whose driver is this script."""
    driver = tmp_path / "driver.py"
    driver.write_text(script)
    return DynamoCore(PYTHON, driver)


def test_every_decision_rests_on_all_events_before_it(core: DynamoCore) -> None:
    """The stand-in has the cost function of `classic`, so wherever it knew all that was told, nothing differs."""
    one = pool()
    done = replay(one, policy(core), rate=8.0, limit=one.ceiling())
    facts = core.facts()
    assert (facts.decisions, facts.same_cached, facts.same_in_use, facts.lowest) == (80, 80, 80, 80)
    assert facts.took_s > 0
    assert done.summary.policy == "dynamo (scale 2, credit 1)"
    assert done.summary.hit_rate > 0.1


@pytest.mark.parametrize("weights", [ClassicWeights(scale=0.5), ClassicWeights(scale=16, credit=1.5)])
def test_weights_reach_the_core(core: DynamoCore, weights: ClassicWeights) -> None:
    one = pool()
    replay(one, replace(policy(core), weights=weights), rate=8.0, limit=one.ceiling())
    facts = core.facts()
    assert facts.lowest == facts.decisions == 80


def test_a_decision_that_classic_would_not_make_is_counted(tmp_path: Path) -> None:
    answer = json.dumps({"worker": 1, "cached": 3, "uncached": 0, "blocks": 9, "took_s": 0.5})
    with scripted(
        tmp_path, f"import sys\nfor line in sys.stdin:\n  if 'select' in line: print('{answer}', flush=True)"
    ) as core:
        scheduler = Dynamo(MirroredCaches(core), core, weights=ClassicWeights())
        for name in ("worker-0", "worker-1"):
            scheduler._view.add_worker(name)
            scheduler.put_worker(WorkerInfo(worker=name, slots=1, block_size=512), 0.0)
        scheduler.offer(Waiting(id="7", tokens=1024, chain=[5, 6], block_size=512), 0.0)
        assert [placement.worker for placement in scheduler.decide(0.0)] == ["worker-1"]
        facts = core.facts()
        assert (facts.decisions, facts.same_cached, facts.same_in_use, facts.lowest) == (1, 0, 0, 1)
        scheduler.offer(Waiting(id="8", tokens=512, chain=[8], block_size=512), 0.0)
        scheduler.decide(0.0)
        assert core.facts().lowest == 1  # worker 0 was idle


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("raise SystemExit('no such module')", "Dynamo's process has ended: no such module"),
        ("import time; time.sleep(60)", "no answer from Dynamo within 0.2 s"),
    ],
)
def test_a_driver_that_fails_is_named(script: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "sleep" in script:
        monkeypatch.setattr(subject, "ANSWER_S", 0.2)
    with scripted(tmp_path, script) as core, pytest.raises(DynamoFailed, match=told):
        core.select(id="1")


def test_a_driver_that_reads_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "ANSWER_S", 0.2)
    much = list(range(1_000_000))  # more than a pipe holds
    with (
        scripted(tmp_path, "import time; time.sleep(60)") as core,
        pytest.raises(DynamoFailed, match=r"Dynamo has read nothing for 0\.2 s"),
    ):
        core.tell("cache", stored=much)


def test_there_is_one_router(core: DynamoCore) -> None:
    one = pool(routers=2)
    with pytest.raises(SettingsInvalid, match="policy 'dynamo' has one router"):
        replay(one, policy(core), rate=1.0, limit=one.ceiling())


def test_the_policy_needs_a_core() -> None:
    with pytest.raises(SettingsInvalid, match="policy 'dynamo' needs Dynamo's core"):
        Policy(name="dynamo")
