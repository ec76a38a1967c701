"""From the table of settings to the settings of each package: nothing is unreachable, nothing differs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import get_args

import pytest

import headrace.router.placement.settings
import headrace.workers.settings
from headrace.base.errors import SettingsError
from headrace.config.build_settings import (
    connect_options,
    frontend_settings,
    needs_bundled_model,
    router_options,
    scheduler_settings,
    server_settings,
    subjects,
    worker_settings,
)
from headrace.config.options import all_options
from headrace.config.settings import load
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.context import ConnectOptions
from headrace.jetstream.settings import ServerSettings
from headrace.jetstream.subjects import tenant_token
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.settings import RouterOptions
from headrace.workers import bundled_model
from headrace.workers.engine import SERVING_ROLES, Role
from headrace.workers.settings import WorkerSettings

BY_KEY = {option.key: option for option in all_options()}


def test_every_frontend_setting_is_reachable_with_the_same_default() -> None:
    assert frontend_settings(load("frontend")) == FrontendSettings()
    for field in dataclasses.fields(FrontendSettings):
        assert f"frontend.{field.name}" in BY_KEY or field.name in BY_KEY


def test_every_worker_setting_is_reachable_with_the_same_default() -> None:
    composed = worker_settings(load("worker", flags={"worker.model": "m"}))
    own = WorkerSettings(engine="vllm", model="m")
    assert composed == own
    for field in dataclasses.fields(WorkerSettings):
        key = {"worker_name": "worker.name", "namespace": "namespace"}.get(field.name, f"worker.{field.name}")
        assert key in BY_KEY


def test_every_router_setting_is_reachable_with_the_same_default() -> None:
    assert router_options(load("router")) == dataclasses.replace(RouterOptions(), namespace="default")
    for field in dataclasses.fields(RouterOptions):
        assert field.name == "session" or f"router.{field.name}" in BY_KEY or field.name in BY_KEY
    composed, own = scheduler_settings(load("router")), SchedulerSettings()
    for field in dataclasses.fields(SchedulerSettings):
        if field.name != "limits":
            assert getattr(composed, field.name) == getattr(own, field.name), field.name
    # each class has a window of its own, of which one tenant gets its share
    assert composed.limits == dataclasses.replace(own.limits, window=5 * 2048, tenant_requests=1433)


def test_router_settings_reach_the_scheduler() -> None:
    flags = {
        "router.policy": "power-of-two",
        "router.temperature": "0.5",
        "router.window": "100",
        "router.tier_weights": ["host=0.5"],
        "router.tenant_weights": ["Team A=3", "b=2"],
        "router.tenant_requests": "7",
        "router.tuning": ["congestion=2.5", "binding=early"],
    }
    settings = load("router", flags=flags)
    composed = scheduler_settings(settings)
    assert (composed.policy, composed.temperature, composed.congestion, composed.binding) == ("power-of-two", 0.5, 2.5, "early")
    assert composed.tiers == {"device": 1.0, "host": 0.5, "disk": 0.25}
    assert composed.fairness.weights == {tenant_token("Team A"): 3, "b": 2}
    assert (composed.limits.window, composed.limits.tenant_requests) == (500, 7)
    assert router_options(settings).session.window == 100


def test_settings_of_prefill_reach_workers_and_routers() -> None:
    given = {
        "role": "decode",
        "prefill": "always",
        "prefill_min_tokens": "12",
        "prefill_unready": "refuse",
        "prefill_wait_s": "0.5",
        "prefill_budget_tokens": "4096",
        "transfer_timeout_s": "3",
    }
    worker = worker_settings(load("worker", flags={f"worker.{name}": value for name, value in given.items()}))
    assert (worker.role, worker.prefill, worker.prefill_min_tokens, worker.prefill_unready) == (
        "decode",
        "always",
        12,
        "refuse",
    )
    assert (worker.prefill_wait_s, worker.prefill_budget_tokens, worker.transfer_timeout_s) == (0.5, 4096, 3.0)
    flags = {"router.prefill": "never", "router.prefill_min_tokens": "9", "router.prefill_unready": "wait"}
    deciding = scheduler_settings(load("router", flags=flags))
    assert (deciding.prefill, deciding.prefill_min_tokens, deciding.prefill_unready) == ("never", 9, "wait")


def test_the_choices_of_prefill_are_those_that_the_packages_know() -> None:
    for key, known in (
        ("worker.prefill", headrace.workers.settings.PrefillMode),
        ("worker.prefill_unready", headrace.workers.settings.Unready),
        ("router.prefill", headrace.router.placement.settings.PrefillMode),
        ("router.prefill_unready", headrace.router.placement.settings.Unready),
    ):
        assert BY_KEY[key].choices == get_args(known), key
    assert set(BY_KEY["worker.role"].choices) >= SERVING_ROLES | {Role.PREFILL}


def test_every_connect_option_is_reachable_with_the_same_default() -> None:
    assert connect_options(load("worker"), name="x") == ConnectOptions(name="x")
    for field in dataclasses.fields(ConnectOptions):
        assert field.name in ("servers", "name") or f"nats.{field.name}" in BY_KEY


def test_every_setting_of_the_embedded_server_is_reachable_with_the_same_default() -> None:
    assert server_settings(load("up")) == ServerSettings()
    for field in dataclasses.fields(ServerSettings):
        assert field.name == "extra" or f"server.{field.name}" in BY_KEY


def test_values_reach_the_packages() -> None:
    environ = {
        "HEADRACE_NATS_URL": "nats://a:1,nats://b:2",
        "HEADRACE_NATS_TOKEN": "t",
        "HEADRACE_FRONTEND_DEADLINE_S": "12",
        "HEADRACE_NAMESPACE": "lab",
        "HEADRACE_PREFIX": "lab1",
        "HEADRACE_WORKER_SLOTS": "7",
        "HEADRACE_WORKER_ENGINE": "sim",
        "HEADRACE_WORKER_MODEL": "m",
    }
    settings = load("worker", environ=environ)
    options = connect_options(settings, name="x")
    assert (options.servers, options.token) == (("nats://a:1", "nats://b:2"), "t")
    assert (frontend_settings(settings).deadline_s, frontend_settings(settings).namespace) == (12.0, "lab")
    assert subjects(settings).prefix == "lab1"
    worker = worker_settings(settings)
    assert (worker.model, worker.namespace, dict(worker.engine_args)) == ("m", "lab", {"slots": 7})


def test_slots_become_the_setting_that_the_engine_knows_and_do_not_overrule_it() -> None:
    settings = load("worker", flags={"worker.slots": "7", "worker.model": "m"})
    assert worker_settings(settings).engine_args == {"max_num_seqs": 7}
    settings = load("worker", flags={"worker.slots": "7", "worker.model": "m", "worker.engine_args": ["max_num_seqs=9"]})
    assert worker_settings(settings).engine_args == {"max_num_seqs": 9}


def test_vllm_without_a_model_runs_the_bundled_one_under_its_name(tmp_path: Path) -> None:
    settings = load("worker", flags={"data_dir": str(tmp_path)})
    worker = worker_settings(settings)
    assert needs_bundled_model(settings)
    assert Path(worker.model) == tmp_path / "models" / bundled_model.NAME
    assert worker.served_name == bundled_model.NAME


def test_the_simulator_needs_no_model() -> None:
    settings = load("worker", flags={"worker.engine": "sim"})
    assert not needs_bundled_model(settings)
    assert worker_settings(settings).served_name


def test_a_context_is_read_and_flags_win_over_it(tmp_path: Path) -> None:
    context = tmp_path / "site.json"
    context.write_text(json.dumps({"url": "nats://site:4222", "user": "u", "password": "p"}))
    options = connect_options(load("worker", flags={"nats.context": str(context), "nats.user": "me"}), name="x")
    assert (options.servers, options.user, options.password) == (("nats://site:4222",), "me", "p")


def test_a_missing_context_is_a_settings_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="context"):
        connect_options(load("worker", flags={"nats.context": str(tmp_path / "no.json")}), name="x")


def test_values_that_contradict_each_other_are_a_settings_error() -> None:
    with pytest.raises(SettingsError, match="deadline_s"):
        frontend_settings(load("frontend", flags={"frontend.deadline_s": "100", "frontend.max_deadline_s": "10"}))


def test_a_prefix_that_is_no_token_is_a_settings_error() -> None:
    with pytest.raises(SettingsError, match=r"prefix = 'a\.b'"):
        subjects(load("worker", flags={"prefix": "a.b"}))


def test_labels_reach_the_worker_and_a_wrong_one_is_named() -> None:
    given = {"worker.model": "m", "worker.labels": "zone=a,big"}
    assert worker_settings(load("worker", flags=given)).labels == ("zone=a", "big")
    with pytest.raises(SettingsError, match=r"label 'x{65}'"):
        worker_settings(load("worker", flags=given | {"worker.labels": "x" * 65}))


def test_an_engine_of_the_users_own_names_its_model_and_gets_slots_by_that_name() -> None:
    settings = worker_settings(load("worker", flags={"worker.engine": "my_engine:Engine", "worker.slots": "4"}))
    assert (settings.engine, settings.model, settings.served_name) == ("my_engine:Engine", "", None)
    assert settings.engine_args == {"slots": 4}
