"""The command line: what it accepts, what it says, and that it is instant."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from importlib.metadata import EntryPoint, version
from typing import Any

import pytest

from headrace import cli
from headrace.cli import COMMAND_GROUP, build_parser, command_names, main
from headrace.commands.parts import USUAL
from headrace.config.build_settings import read_settings
from headrace.config.options import Command, all_options, options_of


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    for setting in all_options():
        monkeypatch.delenv(setting.env, raising=False)
    monkeypatch.delenv("HEADRACE_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)


def test_flags_become_settings() -> None:
    line = (
        "worker --engine sim --model M --served-name N --name ID --role aggregated --slots 4 --engine-arg a=1 --engine-arg b=x"
    )
    settings = read_settings(build_parser("worker").parse_args(line.split()), "worker")
    assert settings["worker.engine"] == "sim"
    assert settings["worker.engine_args"] == {"a": 1, "b": "x"}
    assert (settings["worker.model"], settings["worker.served_name"], settings["worker.name"]) == ("M", "N", "ID")
    assert settings["worker.slots"] == 4


def test_a_flag_before_a_nested_command_counts() -> None:
    parsed = build_parser("worker").parse_args(["worker", "--nats", "nats://a:1", "drain", "w-1"])
    assert parsed.worker == "w-1"
    assert read_settings(parsed, "control")["nats.url"] == ("nats://a:1",)


def test_a_wrong_setting_ends_with_78_and_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["worker", "--engine", "vlm"]) == 78
    assert capsys.readouterr().err == (
        "headrace worker: worker.engine = 'vlm' (--engine): expected one of vllm, sglang, sim, trtllm, diffusion, or "
        "MODULE:CLASS; did you mean vllm?\n"
    )


@pytest.mark.parametrize("command", ["up", "frontend", "worker", "router"])
def test_help_names_every_flag_with_its_variable_and_unit(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help-all"])
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    for setting in options_of(command):  # type: ignore[arg-type]
        if setting.flag:
            assert setting.flag in said
            assert setting.env in said
    assert "example" in said
    assert "exit codes" in said


def test_help_is_short_and_says_how_to_see_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for flag in ("--help", "-h", "--help-all"):
        with pytest.raises(SystemExit) as ended:
            main(["up", flag])
        assert ended.value.code == 0
        shown[flag] = capsys.readouterr().out
    assert shown["-h"] == shown["--help"]
    assert len(shown["--help"].splitlines()) < len(shown["--help-all"].splitlines()) / 2
    for usual in ("--engine", "--model", "--port", "-v, --verbose", "--help-all"):
        assert usual in shown["--help"]
    assert "--tier-weight" not in shown["--help"]
    assert "--tier-weight" in shown["--help-all"]


@pytest.mark.parametrize(("command", "usual"), USUAL.items())
def test_every_usual_flag_is_one_of_the_command(command: Command, usual: frozenset[str]) -> None:
    assert usual <= {"--config", *(setting.flag for setting in options_of(command))}


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        return capsys.readouterr().out

    assert said("help") == said("--help")
    assert said("help", "worker", "drain") == said("worker", "drain", "--help")
    with pytest.raises(SystemExit) as ended:
        main(["help", "nope"])
    assert ended.value.code == 2


def test_the_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"headrace {version('headrace')}\n"


def test_flags_of_one_command_do_not_clash() -> None:
    for command in ("up", "frontend", "worker", "router", "streams", "control", "model"):
        flags = [setting.flag for setting in options_of(command) if setting.flag]  # type: ignore[arg-type]
        assert len(flags) == len(set(flags)), command


def test_no_secret_has_a_flag_but_that_of_vllms_server() -> None:
    # `--api-key` is overwritten in what `ps` shows (`headrace.config.values.hide_arguments`)
    assert [setting.key for setting in all_options() if setting.setting.secret and setting.flag] == ["api_key"]


def test_help_loads_nothing_heavy() -> None:
    heavy = ("asyncio", "structlog", "nats", "msgspec", "uvicorn", "starlette", "tomllib", "torch", "vllm", "tokenizers")
    script = (
        "import sys\nbefore = set(sys.modules)\n"  # some are there when coverage is measured
        "from headrace.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {heavy!r} if name in sys.modules and name not in before], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_no_command_shows_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "headrace up" in capsys.readouterr().err


def test_config_is_toml_that_gives_the_same_settings_again(capsys: pytest.CaptureFixture[str], tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "headrace.toml").write_text('[worker]\nengine = "sim"\nengine_args = {a = 1}\n[frontend]\nport = 9001\n')
    assert main(["config", "up"]) == 0
    shown = capsys.readouterr().out
    assert "port = 9001  # headrace.toml" in shown
    (tmp_path / "again.toml").write_text(shown)
    assert main(["config", "up", "--config", "again.toml", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["frontend.port"] == {"value": 9001, "source": "again.toml"}
    assert values["worker.engine_args"]["value"] == {"a": 1}


def test_config_prints_every_setting_as_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--markdown"]) == 0
    shown = capsys.readouterr().out
    assert [option.key for option in all_options() if f"* `{option.key}`" not in shown] == []
    assert "* `frontend.port`, `--port` (`8000`): " in shown


def test_config_masks_secrets(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_NATS_PASSWORD", "hunter2")
    main(["config"])
    main(["config", "--json"])
    assert "hunter2" not in capsys.readouterr().out


def _installed(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    point = EntryPoint(name, value, COMMAND_GROUP)
    monkeypatch.setattr(cli, "entry_points", lambda *, group: [point] if group == COMMAND_GROUP else [])


def test_a_command_of_another_package_runs_by_its_entry_point(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = types.ModuleType("others_command")

    def add(commands: Any, about: str) -> None:
        parser = commands.add_parser("greet", help=about)
        parser.add_argument("name")
        parser.set_defaults(run=lambda parsed: len(parsed.name), prog="headrace greet")

    module.__dict__["add"] = add
    monkeypatch.setitem(sys.modules, "others_command", module)
    _installed(monkeypatch, "greet", "others_command:add")

    assert main(["greet", "you"]) == 3
    assert "greet" in command_names()
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "greet" in capsys.readouterr().out


def test_a_command_that_cannot_be_loaded_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _installed(monkeypatch, "broken", "no_such_module_here:add")

    assert main(["broken"]) == 1
    assert "command 'broken' (no_such_module_here:add) cannot be loaded" in capsys.readouterr().err


def test_a_built_in_command_cannot_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, "worker", "no_such_module_here:add")

    assert cli.installed_commands() == {}
