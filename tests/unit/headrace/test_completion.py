"""A real bash, zsh or fish completes commands, their options and the values of those."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.cli import main

ASKED = [
    ("headrace worker dr", {"drain"}),
    ("headrace t", {"trace", "top", "tenant"}),
    ("headrace top --on", {"--once"}),
    ("headrace top --sort ", {"load", "kv", "tokens", "name"}),
    ("headrace up --log-format ", {"auto", "console", "json"}),  # its values stand in its metavar
    ("headrace worker drain w-1 --gra", {"--grace"}),
    ("headrace trace top --js", {"--json"}),
    ("headrace up --engine sim --routers 1 --work", {"--workers"}),
]


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with the script of each shell, and with a program `headrace` that is on the path."""
    program = tmp_path / "headrace"
    program.write_text(f"#!{sys.executable}\nfrom headrace.__main__ import run\nrun()\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        (tmp_path / shell).write_text(capsys.readouterr().out)
    return tmp_path


def needed(shell: str) -> str:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"{shell} is not installed")
    return found


@pytest.mark.parametrize(("line", "offered"), ASKED)
def test_bash_completes(scripts: Path, line: str, offered: set[str]) -> None:
    ask = f"source {scripts}/bash; COMP_LINE='{line}' COMP_POINT={len(line)} COMP_TYPE=9; _python_argcomplete headrace;"
    ask += "printf '%s\\n' \"${COMPREPLY[@]}\""
    done = subprocess.run([needed("bash"), "--norc", "-c", ask], capture_output=True, text=True, timeout=60, check=True)
    assert set(done.stdout.split()) == offered


@pytest.mark.parametrize(("line", "offered"), ASKED)
def test_fish_completes(scripts: Path, line: str, offered: set[str]) -> None:
    ask = f"source {scripts}/fish; complete -C '{line}'"
    done = subprocess.run([needed("fish"), "--no-config", "-c", ask], capture_output=True, text=True, timeout=60, check=True)
    assert {each.partition("\t")[0] for each in done.stdout.split("\n") if each} == offered


def test_zsh_completes(scripts: Path) -> None:
    zsh = needed("zsh")
    (scripts / "zsh").rename(scripts / "_headrace")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [zsh, "-f", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, cwd=scripts, env={**os.environ, "TERM": "dumb"}
    )
    os.close(theirs)
    seen = b""

    def until(text: bytes) -> None:
        nonlocal seen
        deadline = time.monotonic() + 60
        while text not in seen:
            assert time.monotonic() < deadline, seen[-2000:]
            if select.select([ours], [], [], 0.1)[0]:
                seen += os.read(ours, 4096)

    try:
        os.write(ours, b"fpath=($PWD $fpath); autoload -Uz compinit; compinit -u -d $PWD/dump; echo read''y\n")
        until(b"ready")
        seen = b""
        os.write(ours, b"headrace worker dra\t")
        until(b"drain")
    finally:
        process.kill()
        process.wait()
        os.close(ours)
