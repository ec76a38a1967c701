"""Where commands look for the deployment that they ask."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest

from headrace.cli import build_parser, main
from headrace.commands.control import located_settings, looked_for, part_settings
from headrace.config.options import all_options
from headrace.config.settings import Settings, load
from headrace.jetstream.subjects import pool_id
from headrace.up.server_logins import logins_by_hand

DEAD = 2**22 + 1  # above the largest process id


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for setting in all_options():
        monkeypatch.delenv(setting.env, raising=False)
    monkeypatch.delenv("HEADRACE_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)


def runs(data_dir: str, *, url: str | None = "nats://127.0.0.1:1", pid: int = DEAD, **more: object) -> Path:
    path = Path(data_dir).resolve() / "run" / "up.json"
    path.parent.mkdir(parents=True)
    state = {"pid": pid, "prefix": "p", "namespace": "n", "nats": {"url": url, "pid": None, "context": None, **more}}
    path.write_text(json.dumps(state))
    return path


def status(*flags: str) -> argparse.Namespace:
    return build_parser("worker").parse_args(["worker", "status", *flags])


def test_without_an_address_the_run_file_of_the_data_folder_has_it() -> None:
    path = runs(".headrace")
    settings = located_settings(status())
    assert (settings["nats.url"], settings["prefix"], settings["namespace"]) == (("nats://127.0.0.1:1",), "p", "n")
    assert settings.source("nats.url") == str(path)


def test_the_data_folder_is_the_one_that_was_named_by_flag_variable_or_file(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(("flag", "variable", "file"), 1):
        runs(name, url=f"nats://127.0.0.1:{number}")
    Path("headrace.toml").write_text('data_dir = "file"\n')
    assert located_settings(status())["nats.url"] == ("nats://127.0.0.1:3",)
    monkeypatch.setenv("HEADRACE_DATA_DIR", "variable")
    assert located_settings(status())["nats.url"] == ("nats://127.0.0.1:2",)
    assert located_settings(status("--data-dir", "flag"))["nats.url"] == ("nats://127.0.0.1:1",)


def test_what_was_given_wins_over_the_run_file() -> None:
    runs(".headrace")
    given = located_settings(status("--nats", "nats://other:4222"))
    assert (given["nats.url"], given["prefix"]) == (("nats://other:4222",), "hr")
    assert located_settings(status("--prefix", "mine"))["prefix"] == "mine"
    assert located_settings(status("--nats-context", "prod"))["nats.url"] == ()


def test_a_masked_password_is_not_sent_and_a_context_is_used() -> None:
    runs("masked", url="nats://********@a:1,nats://b:2")
    runs("context", url=None, context="prod")
    assert located_settings(status("--data-dir", "masked"))["nats.url"] == ("nats://a:1", "nats://b:2")
    assert located_settings(status("--data-dir", "context"))["nats.context"] == "prod"


def asks_for_logins(*logins: str) -> Path:
    """An `up` whose server has these logins. Returns their folder."""
    folder = Path(".headrace").resolve() / "nats" / "logins"
    runs(".headrace", context=str(folder / "operator.json"))
    folder.mkdir(parents=True)
    for login in ("operator", *logins):
        (folder / f"{login}.json").write_text("{}")
    return folder


def test_the_address_of_the_running_server_alone_comes_with_the_login_of_its_operator() -> None:
    folder = asks_for_logins()
    for given in ("nats://127.0.0.1:1", "localhost:1"):
        assert located_settings(status("--nats", given))["nats.context"] == str(folder / "operator.json")
    assert located_settings(status("--nats", "nats://127.0.0.1:2"))["nats.context"] is None
    assert located_settings(status("--nats", "nats://127.0.0.1:1", "--nats-user", "me"))["nats.context"] is None
    assert located_settings(status("--nats-context", "prod"))["nats.context"] == "prod"


def test_a_command_with_a_login_of_its_own_has_that_and_the_operators_where_there_is_none() -> None:
    wanted = ("console", "operator")
    folder = asks_for_logins("console")
    for given in ((), ("--nats", "localhost:1")):
        assert located_settings(status(*given), logins=wanted)["nats.context"] == str(folder / "console.json")
    (folder / "console.json").unlink()
    assert located_settings(status(), logins=wanted)["nats.context"] == str(folder / "operator.json")


def test_where_there_is_one_login_every_command_and_part_has_it_and_none_that_an_earlier_start_left() -> None:
    folder = asks_for_logins("console", "worker", "deployment")
    run_file = folder.parents[1] / "run" / "up.json"
    run_file.write_text(run_file.read_text().replace("operator.json", "deployment.json"))
    one = str(folder / "deployment.json")
    for given in ((), ("--nats", "localhost:1")):
        assert located_settings(status(*given), logins=("console", "operator"))["nats.context"] == one
    assert part_settings(worker(nats__url="nats://127.0.0.1:1"), ("worker",))["nats.context"] == one
    assert part_settings(worker(nats__url="nats://127.0.0.1:2"), ("worker",))["nats.context"] is None


def worker(**flags: object) -> Settings:
    return load("worker", flags={"worker.engine": "sim", **{name.replace("__", "."): value for name, value in flags.items()}})


def test_a_worker_that_is_started_by_hand_gets_the_login_of_its_pool_or_else_that_of_all() -> None:
    own = f"worker-{pool_id('sim')}"
    folder = asks_for_logins("worker", own)
    here = {"nats__url": "nats://127.0.0.1:1"}

    def found(settings: Settings) -> object:
        return part_settings(settings, logins_by_hand(settings))["nats.context"]

    assert found(worker(**here)) == str(folder / f"{own}.json")
    assert found(worker(**here, worker__served_name="other")) == str(folder / "worker.json")
    assert found(worker(**here, nats__nkey_seed="my.nk")) is None
    assert found(worker(nats__url="nats://127.0.0.1:2")) is None
    assert found(worker()) is None


def test_where_nothing_runs_the_error_says_where_it_looked() -> None:
    settings = located_settings(status())
    assert settings["nats.url"] == ()
    assert f"no `headrace up` runs with the data folder {Path('.headrace').resolve()}" in looked_for(settings)
    assert "--data-dir" in looked_for(settings)
    assert looked_for(located_settings(status("--nats", "nats://other:4222"))) == ""


def test_an_address_of_a_deployment_that_is_gone_is_said_to_be_one() -> None:
    path = runs(".headrace")
    assert looked_for(located_settings(status())).endswith(f"from {path}, whose `headrace up` (pid {DEAD}) no longer runs")
    path.write_text(path.read_text().replace(str(DEAD), str(os.getpid())))
    assert looked_for(located_settings(status())).endswith(f"(pid {os.getpid()}) still runs")


@pytest.mark.parametrize(
    "command",
    [
        "worker status",
        "worker drain w",
        "worker role w decode",
        "worker adapter load a /a --model m",
        "router status",
        "router explain r",
        "streams status",
        "dlq ls",
        "dlq retry 1",
        "model ls",
        "replay index --model m",
    ],
)
def test_every_command_that_connects_looks_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = runs(".headrace")
    assert main(command.split()) == 69
    said = capsys.readouterr().err
    assert "no NATS server answers at nats://127.0.0.1:1: " in said
    assert str(path) in said
    assert len(said.splitlines()) == 1
