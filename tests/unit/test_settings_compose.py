"""From the table of settings to the settings of each package: nothing is unreachable, nothing differs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from frontend.settings import FrontendSettings
from headrace.catalogue import BY_KEY
from headrace.compose import connect_options, frontend_settings, needs_bundled_model, server_settings, subjects, worker_settings
from headrace.errors import SettingsError
from headrace.settings import load
from jetstream.context import ConnectOptions
from jetstream.server import ServerSettings
from workers import bundled
from workers.settings import WorkerSettings


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
    assert Path(worker.model) == tmp_path / "models" / bundled.NAME
    assert worker.served_name == bundled.NAME


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
