"""The logins that `headrace up` makes and gives its parts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.base.errors import StartFailed
from headrace.config.settings import Settings, load
from headrace.jetstream.subjects import pool_id
from headrace.up.parts import make_parts
from headrace.up.server_logins import ServerLogins, worker_login

VARIABLE = "HEADRACE_NATS_CONTEXT"


def settings(**flags: object) -> Settings:
    return load("up", flags={"worker.engine": "sim", **{name.replace("__", "."): value for name, value in flags.items()}})


def test_each_part_gets_the_login_of_its_role(tmp_path: Path) -> None:
    chosen = settings(up__workers="2")
    logins = ServerLogins(chosen, tmp_path, kind="roles")
    logins.server_config()
    logins.write_contexts("nats://127.0.0.1:4222")
    parts = make_parts(chosen, {}, port=1, logins=logins)
    given = {part.name: Path(part.env[VARIABLE]) for part in parts}
    worker = f"worker-{pool_id('sim')}.json"
    names = {"frontend": "ingress.json", "worker-1": worker, "worker-2": worker, "router-1": "router.json"}
    names["console"] = "operator.json"  # with its key it does what operators do
    assert {part: path.name for part, path in given.items()} == names
    for path in given.values():
        assert json.loads(path.read_text())["url"] == "nats://127.0.0.1:4222"
    assert not any("SU" in word for part in parts for word in part.argv)


def test_workers_of_a_further_pool_get_a_login_of_that_pool(tmp_path: Path) -> None:
    chosen = settings(up__pools='{"small": {"engine": "sim"}}')
    logins = ServerLogins(chosen, tmp_path, kind="roles")
    config = logins.server_config()
    workers = make_parts(chosen, {}, port=1, logins=logins).workers
    assert {Path(part.env[VARIABLE]).name for part in workers} == {
        f"worker-{pool_id('sim')}.json",
        f"worker-{pool_id('small')}.json",
    }
    assert f"# worker-{pool_id('small')}" in config


def test_an_engine_that_names_its_model_itself_gets_the_login_of_all_pools() -> None:
    chosen = load("up", flags={"worker.engine": "mine:Engine"})
    assert worker_login(chosen).name == "worker"


def test_without_logins_nothing_is_made_and_nothing_is_given(tmp_path: Path) -> None:
    chosen = settings()
    logins = ServerLogins(chosen, tmp_path / "nats", kind="none")
    assert logins.server_config() == ""
    logins.write_contexts("nats://127.0.0.1:4222")
    assert logins.operator_context is None
    assert not (tmp_path / "nats").exists()
    assert all(VARIABLE not in part.env for part in make_parts(chosen, {}, port=1, logins=logins))


def test_the_one_login_is_given_to_all_parts_and_its_seed_stays(tmp_path: Path) -> None:
    chosen = settings(up__workers="2")
    logins = ServerLogins(chosen, tmp_path, kind="one")
    config = logins.server_config()
    logins.write_contexts("nats://127.0.0.1:4222")
    context = tmp_path / "logins" / "deployment.json"
    parts = list(make_parts(chosen, {}, port=1, logins=logins))
    assert {part.env[VARIABLE] for part in parts} == {logins.operator_context} == {str(context)}
    assert logins.add_start("worker-1", parts[1].env) is None
    seed = tmp_path / "logins" / "deployment.nk"
    assert json.loads(context.read_text()) == {
        "description": "headrace",
        "url": "nats://127.0.0.1:4222",
        "nkey": str(seed),
    }
    assert {path.name for path in seed.parent.iterdir()} == {"deployment.json", "deployment.nk"}
    assert {path.stat().st_mode & 0o777 for path in (seed, context)} == {0o600}
    assert seed.parent.stat().st_mode & 0o777 == 0o700
    assert seed.read_text().strip() not in config
    assert ServerLogins(chosen, tmp_path, kind="one").server_config() == config


def test_a_seed_that_cannot_be_read_ends_the_start_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "logins").mkdir()
    (tmp_path / "logins" / "operator.nk").write_text("nonsense")
    (tmp_path / "logins" / "deployment.nk").write_text("nonsense")
    with pytest.raises(StartFailed, match=r"operator\.nk cannot be used"):
        ServerLogins(settings(), tmp_path, kind="roles").server_config()
    with pytest.raises(StartFailed, match=r"deployment\.nk cannot be used"):
        ServerLogins(settings(), tmp_path, kind="one").server_config()


def test_each_start_of_a_worker_gets_another_login_until_it_is_taken_back(tmp_path: Path) -> None:
    chosen = settings()
    logins = ServerLogins(chosen, tmp_path, kind="roles")
    logins.server_config()
    (part,) = make_parts(chosen, {}, port=1, logins=logins).workers
    first, second = (logins.add_start(part.name, part.env) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.scope == second.scope == pool_id("sim")
    assert first.member != second.member
    assert first.member.startswith("worker-1-")
    config = logins.server_config()
    assert f"# {first.name}" in config
    logins.write_context(first, "nats://127.0.0.1:4222")
    assert logins.variables(first) == {VARIABLE: str(tmp_path / "logins" / f"{first.name}.json")}
    assert json.loads(Path(logins.context(first)).read_text())["headrace_worker"] == first.member
    logins.remove_start(first)
    config = logins.server_config()
    assert f"# {first.name}" not in config
    assert f"# {second.name}" in config
    assert not list(tmp_path.glob(f"logins/{first.name}*"))
    assert list(tmp_path.glob(f"logins/worker-{pool_id('sim')}.*"))


def test_parts_that_are_no_workers_and_deployments_without_logins_get_none_for_a_start(tmp_path: Path) -> None:
    logins = ServerLogins(settings(), tmp_path, kind="roles")
    assert logins.add_start("router-1", logins.router()) is None
    assert ServerLogins(settings(), tmp_path, kind="none").add_start("worker-1", {}) is None


def test_logins_of_workers_that_a_killed_supervisor_left_are_removed(tmp_path: Path) -> None:
    (tmp_path / "logins").mkdir()
    left = tmp_path / "logins" / f"worker-{pool_id('sim')}.worker-1-6abc.nk"
    left.write_text("SU")
    ServerLogins(settings(), tmp_path, kind="roles").server_config()
    assert not left.exists()
