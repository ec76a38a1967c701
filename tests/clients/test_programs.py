"""Agents as their users run them: a task of six calls, and the same with parts of the deployment killed in the middle."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import CHAT, state_of
from programs.catalogue import ASIDE, DONE, LEDGER, PROGRAMS, QUIET, REPORT, Program
from programs.recorder import Asked, Recorder, recording, samples, written

BIN = Path(os.environ.get("PROGRAMS", "")).resolve() / "node_modules" / ".bin"
SAMPLES = os.environ.get("SAMPLES")  # a folder in which to write them
DEADLINE_S = 150

pytestmark = [
    pytest.mark.skipif(not (BIN / "codex").exists(), reason="the programs are missing, which npm installs"),
    pytest.mark.timeout(DEADLINE_S + 60),
]
each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)


def run(program: Program, url: str, folder: Path) -> str:
    """Let a program do its task in `folder`, and return what it prints."""
    home = folder.with_name(f"{folder.name}-home")
    for name, text in program.files(url).items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    folder.mkdir()
    for name, text in LEDGER.items():
        (folder / name).write_text(text)
    env = {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(home), "LANG": "C.UTF-8", **QUIET, **program.env(url, home)}
    words = [word.format(home=home) for word in program.words] + [program.task]
    ended = subprocess.run(
        words, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    return ended.stdout


def deployed(launch: Callable[..., Path], work: Path, *flags: str) -> Path:
    """Start a deployment that knows the tasks that are done in `work`."""
    script = work / "script.json"
    rules = [rule for program in PROGRAMS for rule in program.rules(work / program.name)]
    script.write_text(json.dumps([{"when": ASIDE, "say": "Nothing."}, *rules]))
    parsers = ("--tool-parser", "hermes", "--reasoning-parser", "think")
    args = (f"script={script}", "context_length=131072", "blocks=8192", *flags)
    return launch(CHAT, *parsers, *(word for arg in args for word in ("--engine-arg", arg)))


@pytest.fixture(scope="session")
def fast(launch: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    work = tmp_path_factory.mktemp("work")
    return deployed(launch, work), work


@pytest.fixture(scope="session")
def slow(launch: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same with answers that take some seconds."""
    work = tmp_path_factory.mktemp("slow")
    return deployed(launch, work, 'timing_overrides={"decode_base_s": 0.05}'), work


def turns(recorder: Recorder) -> list[Asked]:
    """What was asked for the task itself."""
    return [asked for asked in list(recorder.requests) if asked.body and not re.search(ASIDE, json.dumps(asked.body))]


def done(program: Program, recorder: Recorder, folder: Path) -> None:
    printed = run(program, recorder.url, folder)
    assert DONE in printed
    assert (folder / "report.txt").read_text() == REPORT
    assert {asked.status for asked in recorder.requests} == {200}
    bodies = [json.dumps(asked.body, sort_keys=True) for asked in turns(recorder)]
    assert len(bodies) > len(program.steps(folder))
    assert len(set(bodies)) == len(bodies)  # nothing was sent twice


@each_program
def test_a_task_is_done(program: Program, fast: tuple[Path, Path]) -> None:
    up, work = fast
    with recording(state_of(up)["url"]) as recorder:
        done(program, recorder, work / program.name)
    if SAMPLES:
        (Path(SAMPLES) / f"{program.name}.json").write_text(written(samples(recorder.requests)))


def kill_in_the_middle(up: Path, recorder: Recorder, killed: list[str]) -> None:
    """Kill a worker, the router and nats-server, each in the middle of an answer of its own."""
    for turn, part in enumerate(("worker", "router", "nats"), 1):
        deadline = time.monotonic() + DEADLINE_S
        while len(turns(recorder)) <= turn or turns(recorder)[turn].answer.count(b"data: ") < 5:
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
        state = state_of(up)
        os.kill((state["nats"] if part == "nats" else state[f"{part}s"][0])["pid"], signal.SIGKILL)
        if not turns(recorder)[turn].ended:
            killed.append(part)


@each_program
def test_an_agent_notices_nothing_of_parts_that_are_killed(program: Program, slow: tuple[Path, Path]) -> None:
    up, work = slow
    killed: list[str] = []
    with recording(state_of(up)["url"]) as recorder:
        killer = threading.Thread(target=kill_in_the_middle, args=(up, recorder, killed))
        killer.start()
        done(program, recorder, work / program.name)
        killer.join()
    assert killed == ["worker", "router", "nats"]
