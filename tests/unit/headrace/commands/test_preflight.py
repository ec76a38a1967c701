"""Wrong settings end a command at once, with one sentence and code 78, before anything is started."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from headrace.cli import main
from headrace.config.options import all_options
from headrace.workers.errors import EngineStartFailed
from tests.support import tensorrt_llm_stand_in as stand_in


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for setting in all_options():
        monkeypatch.delenv(setting.env, raising=False)
    monkeypatch.delenv("HEADRACE_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its packages, which this environment may lack."""
    monkeypatch.setattr("headrace.workers.vllm.settings.SETTINGS.check_packages", lambda *_modules: None)
    monkeypatch.setattr(
        "headrace.workers.vllm.settings.SETTINGS.read", lambda: {"max_model_len": "int", "enforce_eager": "bool"}
    )


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of the error; what was logged before is JSON."""
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("{")]
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--model ./nope", "worker.model = './nope' (--model): there is no folder"),
        ("--model a/b/c", "worker.model = 'a/b/c' (--model): this is no Hugging Face id"),
        (
            "--model m --engine-arg max_len=1",
            "worker.engine_args = {'max_len': 1} (--engine-arg): vLLM has no setting 'max_len'; close to it: max_model_len",
        ),
        ("--model m --engine-arg max_model_len=4k", "vLLM takes a whole number as max_model_len, not '4k'"),
    ],
)
def test_up_says_which_setting_of_the_engine_is_wrong(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--port", "0", *flags.split()]) == 78
    line = said(capsys)
    assert line.startswith("headrace up: ")
    assert words in line
    assert not Path(".headrace/nats").exists()


@pytest.mark.parametrize("command", ["up --port 0", "worker --nats nats://127.0.0.1:1 --log-format json"])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--model evil/m", "worker.model = 'evil/m' (--model): models from hf://evil/m are not allowed here"),
        ("--model s3://b/m", "worker.model = 's3://b/m' (--model): models from s3://b/m are not allowed here"),
        ("--model good/m --engine-arg tokenizer=evil/t", "(--engine-arg): tokenizer: models from hf://evil/t are not allowed"),
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "my_engine:Mine"])
def test_a_model_from_elsewhere_than_the_operator_allows_is_refused_for_every_engine_that_loads_one(
    engine: str, flags: str, words: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*command.split(), "--engine", engine, "--model-sources", "hf://good,/models", *flags.split()]
    assert main(argv) == 78
    told = capsys.readouterr().err
    assert words in told
    assert "worker.model_sources allows: hf://good, /models" in told
    assert not Path(".headrace/nats").exists()


def test_a_rule_for_models_that_means_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["worker", "--engine", "sim", "--model-sources", "models", "--nats", "nats://127.0.0.1:1"]) == 78
    assert "model_sources: 'models' is neither a kind" in capsys.readouterr().err


def test_an_error_shows_no_secret_that_stands_beside_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--engine", "sim", "--engine-arg", "slotz=1", "--engine-arg", "hf_token=hunter2"]
    assert main(["up", "--port", "0", *flags]) == 78
    assert "'slotz': 1" in (line := said(capsys))
    assert "hunter2" not in line


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its packages, which this environment may lack."""
    monkeypatch.setattr("headrace.workers.sglang.settings.SETTINGS.check_packages", lambda: None)
    monkeypatch.setattr("headrace.workers.sglang.settings.SETTINGS.read", lambda: {"context_length": "int"})
    monkeypatch.setattr("headrace.commands.run.worker_python", lambda _engine: sys.executable)


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--engine sglang --model ./nope", "worker.model = './nope' (--model): there is no folder"),
        ("--engine sglang --model m --engine-arg contxt_length=1", "SGLang has no setting 'contxt_length'; close to it: cont"),
        ("--engine sglang --engine-arg context_length=4k", "SGLang takes a whole number as context_length, not '4k'"),
        ("--engine sim --engine-arg slotz=1", "the simulator has no argument 'slotz'; close to it: slots"),
        ("--engine sim --engine-arg slots=-4", "(--engine-arg): simulator argument slots=-4: Expected `int` >= 1"),
    ],
)
def test_up_says_so_for_other_engines_too(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--port", "0", *flags.split()]) == 78
    line = said(capsys)
    assert line.startswith("headrace up: ")
    assert words in line
    assert not Path(".headrace/nats").exists()


@pytest.mark.parametrize("command", ["up --port 0", "model prepare"])
def test_a_missing_engine_is_said_before_its_model_is_fetched(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_modules: str) -> None:
        raise EngineStartFailed("the Python package torch is not installed; install the extra")

    monkeypatch.setattr("headrace.workers.vllm.settings.SETTINGS.check_packages", missing)
    assert main(command.split()) == 78
    assert "worker.engine = 'vllm' (default): the Python package torch is not installed" in said(capsys)
    assert not Path(".headrace/models").exists()


@pytest.mark.parametrize("command", ["up --port 0", "worker --model m --nats nats://127.0.0.1:1 --log-format json"])
def test_tensorrt_llm_that_is_not_installed_is_said_with_what_the_machine_lacks(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--engine", "trtllm"]) == 78
    told = capsys.readouterr().err
    assert "worker.engine = 'trtllm' (--engine): TensorRT-LLM cannot run here." in told
    assert "The Python package tensorrt_llm is not installed." in told


@pytest.mark.parametrize("command", ["up --port 0", "worker --nats nats://127.0.0.1:1 --log-format json"])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--model ./nope", "worker.model = './nope' (--model): there is no folder"),
        ("--engine-arg max_batchsize=8", "TensorRT-LLM has no setting 'max_batchsize'; close to it: max_batch_size"),
    ],
)
def test_settings_of_tensorrt_llm_are_checked_before_it_is_imported(
    command: str, flags: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with stand_in.installed():
        assert main([*command.split(), "--engine", "trtllm", *flags.split()]) == 78
        assert "tensorrt_llm" not in sys.modules
    assert words in capsys.readouterr().err


@pytest.mark.usefixtures("vllm")
def test_a_worker_asks_the_hub_before_it_imports_its_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", "hf")
    assert main(["worker", "--model", "org/nope", "--log-format", "console"]) == 78
    lines = capsys.readouterr().err.splitlines()
    assert "headrace worker: worker.model = 'org/nope' (--model): it is not in the cache" in lines[-1]


def test_a_data_folder_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    assert main(["up", "--engine", "sim", "--port", "0", "--data-dir", "file/data"]) == 78
    assert f"data_dir = '{Path('file/data').resolve()}' (--data-dir): cannot be written: Not a directory" in said(capsys)


def test_a_full_disk_is_said_to_be_full(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(_fd: int, _offset: int, _length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("headrace.commands.run.os.posix_fallocate", full)
    assert main(["up", "--engine", "sim", "--port", "0"]) == 1
    assert f"the disk of the data folder {Path('.headrace').resolve()} is full" in said(capsys)
