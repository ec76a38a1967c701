"""Children of `headrace up`: their output arrives, and nothing of them stays."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from headrace.up.process import Child, headrace_command, last_words


def _gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


async def _until_gone(pid: int) -> None:
    async with asyncio.timeout(5):
        while not _gone(pid):
            await asyncio.sleep(0.005)


async def _start(script: str, lines: list[str]) -> Child:
    return await Child.start(["/bin/sh", "-c", script], env=dict(os.environ), on_lines=lines.extend)


async def test_both_outputs_arrive_line_by_line_and_the_tail_is_kept() -> None:
    lines: list[str] = []
    child = await _start("echo one; echo two >&2; printf three; exit 3", lines)
    assert await child.wait() == 3
    assert lines == ["one", "two", "three"] == list(child.tail)


async def test_of_a_progress_bar_the_last_state_is_kept() -> None:
    lines: list[str] = []
    child = await _start("printf '0%%\\r50%%\\r100%%\\n'; printf '\\rdone\\n'", lines)
    await child.wait()
    assert lines == ["100%", "done"]


async def test_a_line_beyond_all_limits_does_not_stop_the_pump() -> None:
    lines: list[str] = []
    child = await _start("head -c 3000000 /dev/zero | tr '\\0' x; echo; echo after", lines)
    await child.wait()
    assert lines[-1] == "after"


async def test_a_child_leads_its_own_group_and_its_children_end_with_it() -> None:
    lines: list[str] = []
    child = await _start("sleep 60 & echo $!; wait", lines)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(child.wait())
        while not lines:
            await asyncio.sleep(0.005)
        assert os.getpgid(child.pid) == child.pid != os.getpgrp()
        os.kill(child.pid, signal.SIGKILL)
    assert waiting.result() == -signal.SIGKILL
    await _until_gone(int(lines[0]))


async def test_a_child_that_ignores_sigterm_is_killed_after_its_grace_period() -> None:
    lines: list[str] = []
    child = await _start("trap '' TERM; echo ready; while :; do sleep 60; done", lines)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(child.wait())
        while not lines:
            await asyncio.sleep(0.005)
        await child.stop(grace_s=0.05)
    assert waiting.result() == -signal.SIGKILL


async def test_a_child_that_still_works_gets_a_second_signal_before_it_is_killed() -> None:
    lines: list[str] = []
    script = "trap 'echo working; trap \"echo bye; exit 0\" TERM' TERM; echo ready; while :; do sleep 0.01; done"
    child = await _start(script, lines)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(child.wait())
        while not lines:
            await asyncio.sleep(0.005)
        await child.stop(grace_s=60.5, margin_s=60)
    assert waiting.result() == 0
    assert lines == ["ready", "working", "bye"]


async def test_a_child_that_obeys_is_given_the_time_to() -> None:
    lines: list[str] = []
    child = await _start("trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.01; done", lines)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(child.wait())
        while not lines:
            await asyncio.sleep(0.005)
        await child.stop(grace_s=10)
    assert waiting.result() == 0
    assert lines == ["ready", "bye"]


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        ([], "it said nothing"),
        (["Segmentation fault"], "Segmentation fault"),
        (["x", "headrace worker: no such model", "Killed"], "no such model"),
        (['{"event": "worker.failed", "error": "no such model"}', '{"event": "bye"}', "{broken"], "no such model"),
    ],
)
def test_the_last_words_of_a_part_are_its_own_error_message(tail: list[str], words: str) -> None:
    assert last_words(tail) == words


def test_a_part_shows_in_ps_as_headrace_and_its_command() -> None:
    assert " ".join(headrace_command("worker", "--engine", "sim")).endswith("-m headrace worker --engine sim")


@pytest.mark.skipif(not os.path.exists("/proc/self"), reason="parent-death signals are Linux's")
async def test_a_part_dies_with_its_supervisor_however_that_dies() -> None:
    part = "from headrace.up.process import end_with_supervisor as e; e(); import time; print('up', flush=True); time.sleep(60)"
    script = (
        "import asyncio, os, sys\n"
        "from headrace.up.process import Child\n"
        f"part = [sys.executable, '-c', {part!r}]\n"
        "async def main():\n"
        "    child = await Child.start(part, env=dict(os.environ), on_lines=lambda _: print(child.pid, flush=True))\n"
        "    await child.wait()\n"
        "asyncio.run(main())\n"
    )
    lines: list[str] = []
    supervisor = await Child.start([*headrace_command()[:1], "-c", script], env=dict(os.environ), on_lines=lines.extend)
    async with asyncio.TaskGroup() as group:
        group.create_task(supervisor.wait())
        async with asyncio.timeout(20):
            while not lines:
                await asyncio.sleep(0.01)
        os.kill(supervisor.pid, signal.SIGKILL)
    await _until_gone(int(lines[0]))


def test_a_process_with_an_engines_libraries_ends_without_taking_them_down() -> None:
    code = (
        "import atexit, sys, types, headrace.__main__ as command\n"
        "class Leaky:\n"
        "    def __del__(self): print('taken down')\n"
        "kept = Leaky()\n"
        "sys.modules['torch'] = types.ModuleType('torch')\n"
        "atexit.register(lambda: print('handled'))\n"
        "command.main = lambda: 7\n"
        "sys.exit(command.run())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "handled\n", "")
