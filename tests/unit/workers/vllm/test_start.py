"""Sockets of a vLLM lie in a folder of its own, and are gone with it, or with the start of the next one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.workers.vllm.start import BASE, LONGEST, METHOD, SocketFolder, forked_core, may_fork


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:  # pytest's has too long a name for a socket
        yield Path(folder)


def test_sockets_are_made_in_it_while_vllm_starts_and_leave_with_it(place: Path) -> None:
    environ: dict[str, str] = {}
    folder = SocketFolder(place)
    with folder.given(environ):
        assert Path(environ[BASE]) == folder.path
        (folder.path / "socket").touch()
    assert environ == {}
    assert folder.path.stat().st_mode & 0o077 == 0
    folder.remove()
    folder.remove()
    assert list(place.iterdir()) == []


def test_a_place_that_the_operator_has_named_stays_and_one_that_is_too_long_is_not_taken(tmp_path: Path) -> None:
    environ = {BASE: "/somewhere"}
    with SocketFolder(tmp_path).given(environ):
        assert environ == {BASE: "/somewhere"}
    deep = tmp_path / ("x" * LONGEST)
    deep.mkdir()
    environ = {}
    with SocketFolder(deep).given(environ):
        assert environ == {}


def test_the_folder_of_one_that_was_killed_goes_with_the_next_start_and_that_of_one_that_lives_stays(tmp_path: Path) -> None:
    begin = "import os, sys; from pathlib import Path; from headrace.workers.vllm.start import SocketFolder; "
    killed = begin + "SocketFolder(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    alive = SocketFolder(tmp_path)
    subprocess.run([sys.executable, "-c", killed, str(tmp_path)], timeout=60, check=False)
    (tmp_path / "headrace-vllm-of-somebody-else").mkdir()
    assert len(list(tmp_path.iterdir())) == 3
    newer = SocketFolder(tmp_path)
    kept = {alive.path, newer.path, tmp_path / "headrace-vllm-of-somebody-else"}
    assert set(tmp_path.iterdir()) == kept
    alive.remove()
    newer.remove()


# A process with what a worker has. Whoever it forks tells what it finds.
WORKER = """
import json, os, select, signal, socket, sys
from headrace.workers.vllm.start import forked_core

server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
polling = select.epoll()
ours, theirs = socket.socketpair()
ours.setblocking(False)
signal.set_wakeup_fd(ours.fileno())
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: None)
kept = {"server": server, "client": client, "polling": polling, "local": theirs}

def fork():
    reading, writing = os.pipe()
    if os.fork() == 0:
        found = {name: os.readlink(f"/proc/self/fd/{one.fileno()}").partition(":")[0] for name, one in kept.items()}
        handled = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        usual = handled == [signal.default_int_handler, signal.SIG_DFL]
        os.write(writing, json.dumps({**found, "signals": signal.set_wakeup_fd(-1), "usual": usual}).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as told:
        found = json.load(told)
    os.wait()
    return found

environ = {}
with forked_core(environ):
    core = fork()
print(json.dumps({"core": core, "other": fork(), "here": signal.set_wakeup_fd(-1) == ours.fileno()}))
"""


def config(executor: str | None = "uni", media: object = None, cores: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(distributed_executor_backend=executor, data_parallel_size=cores),
        model_config=SimpleNamespace(multimodal_config=media),
    )


def test_a_forked_core_has_nothing_that_the_kernel_shares_with_the_worker() -> None:
    done = subprocess.run([sys.executable, "-c", WORKER], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    null = os.devnull
    assert told["core"] == {
        "server": null,
        "client": null,
        "polling": null,
        "local": "socket",
        "signals": -1,
        "usual": True,
    }
    del told["other"]["signals"]  # from Python 3.12 on, asyncio resets it in every child
    assert told["other"] == {"server": "socket", "client": "socket", "polling": "anon_inode", "local": "socket", "usual": False}
    assert told["here"], "the worker itself goes on as before"


def test_vllm_forks_only_while_it_is_told_to() -> None:
    environ = {METHOD: "spawn"}
    with forked_core(environ):
        assert environ[METHOD] == "fork"
    assert environ[METHOD] == "spawn"


@pytest.mark.parametrize(
    ("made", "cpu", "chosen", "may"),
    [
        (config(), True, None, True),
        (config(), True, "fork", True),
        (config(), True, "spawn", False),  # the operator's word
        (config(), False, None, False),  # what CUDA has begun does not survive a fork
        (config("mp"), True, None, False),  # it would fork others in its turn, with its threads running
        (config(None), True, None, False),
        (config(cores=2), True, None, False),
        (config(media=SimpleNamespace(mm_tensor_ipc="direct")), True, None, True),
        (config(media=SimpleNamespace(mm_tensor_ipc="torch_shm")), True, None, False),
    ],
)
def test_a_core_is_forked_where_that_is_safe(made: SimpleNamespace, cpu: bool, chosen: str | None, may: bool) -> None:
    assert may_fork(made, cpu=cpu, chosen=chosen) is (may and sys.platform == "linux")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads that a stand-in for PyTorch was told to compute with."""
    given: list[int] = []
    torch = SimpleNamespace(get_num_threads=lambda: 8, set_num_threads=given.append)
    monkeypatch.setitem(sys.modules, "torch", torch)
    return given


def test_what_is_computed_before_the_fork_starts_no_threads_that_the_core_would_wait_for(
    given: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's threads are not in a fork; a core that has them in its books never ends its first computation."""
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    with forked_core(os.environ):
        assert (given, os.environ["OMP_NUM_THREADS"]) == ([1], "1"), "what this thread computes stays in this thread"
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.write(writing, f"{given} {os.environ['OMP_NUM_THREADS']}".encode())
            os._exit(0)
        os.close(writing)
        with open(reading) as told:
            assert told.read() == "[1, 8] 8", "the core has them all"
        os.wait()
        assert (given, os.environ["OMP_NUM_THREADS"]) == ([1, 8], "8"), "so has the worker, while its core loads the model"
    assert (given, os.environ["OMP_NUM_THREADS"]) == ([1, 8], "8")


def test_a_start_that_ends_before_the_fork_leaves_the_worker_its_threads(given: list[int]) -> None:
    environ: dict[str, str] = {}
    with pytest.raises(ValueError, match="refused"), forked_core(environ):
        raise ValueError("refused")
    assert given == [1, 8]
    assert environ == {METHOD: "spawn"}
