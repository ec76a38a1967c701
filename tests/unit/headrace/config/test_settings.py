"""Settings: which source wins, what is refused and how, what is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.base.errors import SettingsError
from headrace.config.options import all_options, find
from headrace.config.settings import load
from headrace.config.values import MASK, as_text, parse_assignment


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    file = tmp_path / "headrace.toml"
    file.write_text('[frontend]\nport = 7001\n[worker]\nengine = "sim"\n[worker.engine_args]\nseed = 1\nspeed = 2.0\n')
    return file


def test_flags_win_over_environment_over_file_over_defaults(toml: Path) -> None:
    environ = {"HEADRACE_FRONTEND_PORT": "7002"}
    by_flag = load("up", flags={"frontend.port": "7003"}, environ=environ, config=str(toml))
    by_environment = load("up", environ=environ, config=str(toml))
    by_file = load("up", config=str(toml))
    by_default = load("up", folder=toml.parent / "empty")
    assert [s["frontend.port"] for s in (by_flag, by_environment, by_file, by_default)] == [7003, 7002, 7001, 8000]
    assert by_flag.source("frontend.port") == "--port"
    assert by_environment.source("frontend.port") == "HEADRACE_FRONTEND_PORT"
    assert by_file.source("frontend.port") == str(toml)
    assert by_default.source("frontend.port") == "default"


def test_the_file_in_the_folder_is_found_without_being_named(toml: Path) -> None:
    settings = load("up", folder=toml.parent)
    assert settings.file == toml
    assert settings["worker.engine"] == "sim"


def test_the_file_can_be_named_by_environment(toml: Path) -> None:
    assert load("up", environ={"HEADRACE_CONFIG": str(toml)})["frontend.port"] == 7001


def test_engine_arguments_are_merged_key_by_key(toml: Path) -> None:
    settings = load("worker", flags={"worker.engine_args": ["speed=3", "x=a=b"]}, config=str(toml))
    assert settings["worker.engine_args"] == {"seed": 1, "speed": 3, "x": "a=b"}


@pytest.mark.parametrize(
    ("key", "raw", "words"),
    [
        ("frontend.port", "eighty", ["whole number"]),
        ("frontend.port", "70000", ["65535"]),
        ("frontend.port", "-1", ["least is 0"]),
        ("up.grace_s", "soon", ["seconds"]),
        ("up.grace_s", "nan", ["finite"]),
        ("up.grace_s", "-1", ["least is 0"]),
        ("nats.tls_first", "maybe", ["true or false"]),
        ("worker.engine", "vlm", ["vllm", "did you mean"]),
        ("worker.engine_args", "{", ["JSON object"]),
        ("worker.model", "", []),
    ],
)
def test_a_wrong_value_is_refused_naming_key_value_and_source(key: str, raw: str, words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        load("up", flags={key: raw})
    for word in [key, repr(raw), find(key).flag, *words]:
        assert word in str(caught.value)


def test_a_wrong_secret_is_refused_without_showing_it(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text("[nats]\npassword = 12345678\n")
    with pytest.raises(SettingsError) as caught:
        load("up", folder=tmp_path)
    assert "nats.password" in str(caught.value)
    assert "12345678" not in str(caught.value)


@pytest.mark.parametrize("value", ['"8000"', "true", "8000.5", "[8000]"])
def test_a_file_must_have_the_right_type_or_a_text_that_reads_as_it(tmp_path: Path, value: str) -> None:
    (tmp_path / "headrace.toml").write_text(f"[frontend]\nport = {value}\n")
    if value == '"8000"':
        assert load("up", folder=tmp_path)["frontend.port"] == 8000
    else:
        with pytest.raises(SettingsError, match=r"frontend\.port"):
            load("up", folder=tmp_path)


def test_an_unknown_key_in_the_file_is_refused_with_close_names(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text("[frontend]\nprot = 1\n")
    with pytest.raises(SettingsError, match=r"unknown setting 'frontend\.prot'; did you mean frontend\.port"):
        load("up", folder=tmp_path)


def test_an_unknown_section_is_refused(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text("[fronted]\nport = 1\n")
    with pytest.raises(SettingsError, match=r"'fronted'"):
        load("up", folder=tmp_path)


def test_a_missing_or_broken_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere\.toml.*--config"):
        load("up", config=str(tmp_path / "nowhere.toml"))
    (tmp_path / "headrace.toml").write_text("port = = 1")
    with pytest.raises(SettingsError, match="not TOML"):
        load("up", folder=tmp_path)


def test_a_folder_that_may_not_be_looked_into_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", denied)
    with pytest.raises(SettingsError, match=r"cannot read the settings file .*headrace\.toml .*Permission denied"):
        load("up", folder=tmp_path)


def test_an_unknown_variable_is_a_warning_with_close_names() -> None:
    settings = load("up", environ={"HEADRACE_FRONTEND_PROT": "1", "HEADRACE_SUPERVISOR_PID": "1", "OTHER": "x"})
    assert len(settings.warnings) == 1
    assert "HEADRACE_FRONTEND_PROT; did you mean HEADRACE_FRONTEND_PORT" in settings.warnings[0]


def test_an_empty_variable_counts_as_not_set() -> None:
    assert load("up", environ={"HEADRACE_FRONTEND_PORT": ""})["frontend.port"] == 8000


def test_secrets_are_masked_wherever_settings_are_shown() -> None:
    settings = load(
        "up",
        environ={
            "HEADRACE_NATS_PASSWORD": "hunter2",
            "HEADRACE_NATS_TOKEN": "hunter2",
            "HEADRACE_NATS_URL": "nats://me:hunter2@broker:4222,nats://other:4222",
            "HEADRACE_WORKER_ENGINE_ARGS": '{"hf_token": "hunter2", "seed": 1}',
        },
    )
    shown = settings.masked()
    assert "hunter2" not in str(shown)
    assert shown["nats.url"] == [f"nats://{MASK}@broker:4222", "nats://other:4222"]
    assert shown["worker.engine_args"] == {"hf_token": MASK, "seed": 1}
    assert set(shown) == {"nats.password", "nats.token", "nats.url", "worker.engine_args"}


def test_what_flags_said_reaches_a_child_by_its_environment(toml: Path) -> None:
    flags = {
        "nats.url": "nats://a:1, nats://b:2",
        "worker.engine_args": ["k=[1,2]"],
        "nats.tls_first": True,
        "up.grace_s": "2.5",
    }
    parent = load("up", flags=flags, config=str(toml))
    child = load("up", environ=parent.environment())
    assert child.file is not None
    for key in [*flags, "frontend.port"]:
        assert child[key] == parent[key], key


@pytest.mark.parametrize("option", all_options(), ids=lambda o: o.key)
def test_every_default_is_valid_and_survives_the_way_through_the_environment(option) -> None:  # type: ignore[no-untyped-def]
    if option.default in (None, (), {}):
        return
    again = load("up", environ={option.env: as_text(option, option.default)})
    assert again[option.key] == option.default


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("a=1", ("a", 1)),
        ("max-model-len=2048", ("max_model_len", 2048)),
        ("flag=true", ("flag", True)),
        ("name=abc", ("name", "abc")),
        ('name="1"', ("name", "1")),
        ("a=", ("a", "")),
        ('config={"x": [1]}', ("config", {"x": [1]})),
    ],
)
def test_an_engine_argument_is_json_when_it_can_be(text: str, parsed: tuple[str, object]) -> None:
    assert parse_assignment(text) == parsed


@pytest.mark.parametrize("text", ["a", "=1", ""])
def test_an_engine_argument_without_key_or_equals_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"worker\.engine_args.*KEY=VALUE"):
        load("worker", flags={"worker.engine_args": [text]})


def test_an_engine_of_the_users_own_is_named_by_module_and_class() -> None:
    assert load("up", flags={"worker.engine": "my_engine:Engine"})["worker.engine"] == "my_engine:Engine"
    with pytest.raises(SettingsError, match=r"expected one of vllm, sglang, sim, trtllm, diffusion, or MODULE:CLASS"):
        load("up", flags={"worker.engine": "my_engine"})
    with pytest.raises(SettingsError, match="expected one of"):
        load("up", flags={"log.level": "my_level:Level"})
