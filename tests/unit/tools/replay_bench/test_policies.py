import pytest

from headrace.router.errors import SettingsInvalid
from headrace.router.index.view import Caches
from headrace.router.placement.scheduler import Scheduler
from headrace.router.placement.settings import SchedulerSettings
from headrace.tools.replay_bench.classic import Classic, ClassicWeights
from headrace.tools.replay_bench.policies import ALL, Policy, changed


@pytest.mark.parametrize("name", ALL)
def test_every_policy_makes_a_router(name):
    router = Policy(name=name).router("me", 3)
    assert isinstance(router.view, Caches)
    assert isinstance(router.scheduler, Classic if name == "classic" else Scheduler)
    if name != "classic":
        assert router.scheduler.settings.policy == name


def test_early_binding_by_name():
    assert Policy(name="round-robin+early").scheduler_settings() == SchedulerSettings(policy="round-robin", binding="early")
    assert Policy(name="round-robin").scheduler_settings() == SchedulerSettings(policy="round-robin")


@pytest.mark.parametrize("name", ["best", "classic+early", "direct", "kv+late", ""])
def test_other_names_are_refused(name):
    with pytest.raises(SettingsInvalid, match=f"policy '{name}'".replace("+", r"\+")):
        Policy(name=name)


def test_labels():
    assert Policy(name="kv").label == "kv"
    assert Policy(name="classic", weights=ClassicWeights(scale=4)).label == "classic (scale 4, credit 1)"


def test_settings_by_dotted_name():
    settings = Policy(name="kv", settings={"ageing": 0.5, "fairness.slack_tokens": 7.0}).scheduler_settings()
    assert (settings.ageing, settings.fairness.slack_tokens) == (0.5, 7.0)


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
