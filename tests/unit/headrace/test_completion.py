"""A real bash, zsh or fish completes commands, their options and the values of those, for every command there is."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from headrace.cli import all_words, bash_script, build_parser, command_names, fish_script, main, zsh_script

BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="bash is not installed")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "headrace"
    path.write_text(bash_script(all_words(build_parser, command_names())))
    return path


def complete(script: Path, *words: str) -> list[str]:
    """What bash offers for the last of these words behind `headrace`."""
    asked = " ".join(f"'{word}'" for word in ("headrace", *words))
    ask = f"source {script}; COMP_WORDS=({asked}); COMP_CWORD={len(words)}; _headrace; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    assert BASH is not None
    done = subprocess.run([BASH, "--norc", "-c", ask], capture_output=True, text=True, timeout=30, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_commands_are_completed(script: Path) -> None:
    assert set(complete(script, "t")) == {"trace", "top", "tenant"}
    assert set(command_names()) <= set(complete(script, ""))
    assert complete(script, "worker", "dr") == ["drain"]


def test_options_of_the_command_are_completed(script: Path) -> None:
    assert complete(script, "top", "--on") == ["--once"]
    assert complete(script, "up", "--engine", "sim", "--routers", "1", "--work") == ["--workers"]
    assert complete(script, "worker", "drain", "w-1", "--gra") == ["--grace"]
    assert complete(script, "top", "--work") == []


def test_values_of_an_option_are_completed(script: Path) -> None:
    assert complete(script, "top", "--sort", "") == ["load", "kv", "tokens", "name"]
    assert "sim" in complete(script, "up", "--engine", "")


def test_a_value_that_may_be_anything_is_left_to_bash(script: Path) -> None:
    assert complete(script, "up", "--data-dir", "") == []


def test_a_value_that_is_named_like_a_command_changes_nothing(script: Path) -> None:
    assert complete(script, "trace", "top", "--js") == ["--json"]


def test_every_command_has_its_words() -> None:
    words = {one.path: one for one in all_words(build_parser, command_names())}
    assert set(command_names()) <= set(words)
    assert "worker drain" in words
    assert all("--help" in one.options for one in words.values())


def test_the_command_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    assert "complete -o bashdefault -o default -F _headrace headrace" in capsys.readouterr().out


@pytest.fixture(scope="module")
def fish_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    path = tmp_path_factory.mktemp("fish") / "headrace.fish"
    path.write_text(fish_script(all_words(build_parser, command_names())))
    return path


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("headrace worker dr", {"drain"}),
        ("headrace top --sort ", {"load", "kv", "tokens", "name"}),
        ("headrace top --on", {"--once"}),
        ("headrace worker drain w-1 --gra", {"--grace"}),
        ("headrace trace top --js", {"--json"}),
    ],
)
def test_fish_completes(fish_file: Path, line: str, offered: set[str]) -> None:
    ask = f"source {fish_file}; complete -C '{line}'"
    done = subprocess.run(["fish", "--no-config", "-c", ask], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    assert {each.partition("\t")[0] for each in done.stdout.split("\n") if each} == offered


def test_zsh_completes(tmp_path: Path) -> None:
    zsh = shutil.which("zsh")
    if zsh is None:
        pytest.skip("zsh is not installed")
    (tmp_path / "_headrace").write_text(zsh_script(all_words(build_parser, command_names())))
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [zsh, "-f", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, env={**os.environ, "TERM": "dumb"}
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
