"""A running `headrace up`: whom its files, its sockets and its processes' arguments and environments let in."""

from __future__ import annotations

import os
import stat
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.up_process import RunningUp

SECRET = "seecret-of-the-operator"


def listening(pids: set[int]) -> set[str]:
    """The addresses on which processes listen, as hexadecimal digits of the kernel's tables."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].rpartition(":")[0])
    return found


def descendants(pids: set[int]) -> set[int]:
    """These processes and all that came out of them, engines and transfer threads' helpers too."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


@pytest.mark.slow
@pytest.mark.skipif(find_spec("nixl") is None, reason="KV blocks move over NIXL")
def test_parts_that_hand_blocks_over_listen_on_loopback_only(tmp_path: Path) -> None:
    """NATS and its monitoring, HTTP, probes and metrics, and what NIXL and UCX open to move blocks: each listening socket."""
    up = RunningUp(tmp_path, "--mode", "disagg", "--nats-login", "roles", "--metrics-port", "0", "--router-metrics-port", "0")
    try:
        up.until_ready()
        assert up.chat()
        assert listening(descendants(set(up.pids()))) == {"0100007F"}, "all on 127.0.0.1"
    finally:
        up.stop()


@pytest.mark.slow
def test_a_deployment_lets_in_its_user_and_its_keys_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        (tmp_path / ".headrace").mkdir(mode=0o755)
        flags = ["--api-key", SECRET, "--metrics-port", "0", "--router-metrics-port", "0"]
        up = RunningUp(tmp_path, *flags)
    finally:
        os.umask(before)
    try:
        up.until_ready()
        url = up.state()["url"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}/v1/models", timeout=10)
        asked = urllib.request.Request(f"{url}/v1/models", headers={"authorization": f"Bearer {SECRET}"})
        with urllib.request.urlopen(asked, timeout=10) as answer:
            assert answer.status == 200
        root = tmp_path / ".headrace"
        for path in (root, *root.rglob("*")):
            assert not stat.S_IMODE(path.lstat().st_mode) & 0o077, path
        pids = set(up.pids())
        for pid in pids:
            assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes(), pid
        for worker in up.state()["workers"]:
            assert SECRET.encode() not in Path(f"/proc/{worker['pid']}/environ").read_bytes()
        assert SECRET.encode() not in Path(f"/proc/{up.state()['nats']['pid']}/environ").read_bytes()
        assert SECRET not in up.log()
        assert listening(pids) == {"0100007F"}, "all on 127.0.0.1"
    finally:
        up.stop()
