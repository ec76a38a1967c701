"""A process of this machine is there, or it is not."""

from __future__ import annotations

import os
import subprocess
import sys

from headrace.broker.membership.local_processes import machine_id, process_gone


def test_a_process_is_there_until_it_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not process_gone(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_gone(child.pid), "it only waits to be reaped"
    child.communicate()
    assert process_gone(child.pid)


def test_what_is_not_known_is_not_gone() -> None:
    assert not process_gone(0)
    assert not process_gone(-1)
    assert not process_gone(1 << 70)
    assert not process_gone(1), "a process of another user"


def test_processes_that_see_each_other_are_on_the_same_machine() -> None:
    code = "from headrace.broker.membership.local_processes import machine_id; print(machine_id())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == machine_id()
