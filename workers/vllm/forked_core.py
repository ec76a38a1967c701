"""vLLM's core as a fork of the worker, where nothing is computed on a GPU.

A core that is spawned imports for nine seconds what the worker has just imported, and holds all of it once more in memory.
A fork has it.  What else it would have of the worker is let go: TCP connections, which the peer would take for alive after the
worker has closed them; event loops, whose files in the kernel are shared with those of the worker; and the pipe that tells the
worker of signals.

It is forked from the thread that builds vLLM, which has computed nothing yet, or only by itself: PyTorch's threads do not
survive a fork, and a core that has them in its books waits for them for ever.  Processors of some models compute before the
fork, so until then this thread gets no help.  From the fork on both sides have all of it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
CHOSEN = os.environ.get(METHOD)
"""The operator's setting, read before this module changes it."""

OWN_THREADS = "OMP_NUM_THREADS"
"""The variable by which vLLM sets PyTorch's threads around its calls of processors."""

_forking: ContextVar[_Alone | None] = ContextVar("forking", default=None)
"""What a thread that starts vLLM's processes computes with; None in all others."""


def may_fork(vllm_config: Any, *, cpu: bool, chosen: str | None = CHOSEN) -> bool:
    """Return whether the core can be forked.

    It can on Linux without a GPU, if it is the only one, computes by itself, and the operator chose nothing else.
    """
    parallel, media = vllm_config.parallel_config, vllm_config.model_config.multimodal_config
    return (
        sys.platform == "linux"
        and cpu
        and chosen in (None, "fork")
        and parallel.distributed_executor_backend == "uni"
        and parallel.data_parallel_size == 1
        and (media is None or media.mm_tensor_ipc != "torch_shm")  # vLLM refuses this together with a fork.
    )


@contextmanager
def forked_core(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Have vLLM fork the processes that this thread starts, and have them close the worker's shared descriptors."""
    _register()
    _quieten_dynamo(environ)
    alone = _Alone(environ)
    environ[METHOD], before = "fork", _forking.set(alone)
    try:
        yield
    finally:
        alone.end()
        environ[METHOD] = "spawn"
        _forking.reset(before)


class _Alone:
    """A thread that computes by itself, without PyTorch's other threads, until it ends that."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._torch: Any = sys.modules.get("torch")
        self._threads = self._torch.get_num_threads() if self._torch is not None else 1
        self._environ, self._told = environ, environ.get(OWN_THREADS)
        self._ended = False
        environ[OWN_THREADS] = "1"
        self._compute_with(1)

    def end(self) -> None:
        """Compute with as many threads as before. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        if self._told is None:
            self._environ.pop(OWN_THREADS, None)
        else:
            self._environ[OWN_THREADS] = self._told
        self._compute_with(self._threads)

    def _compute_with(self, threads: int) -> None:
        if self._torch is not None:
            self._torch.set_num_threads(threads)


@cache
def _register() -> None:
    os.register_at_fork(after_in_parent=_compute_on, after_in_child=_let_go)


def _quieten_dynamo(environ: Mapping[str, str]) -> None:
    """Set in PyTorch what a spawned core would read from its environment at import."""
    if environ.get("TORCHDYNAMO_DISABLE") == "1":
        import torch._dynamo.config

        torch._dynamo.config.disable = True


def _compute_on() -> None:
    alone = _forking.get()
    if alone is not None:
        alone.end()


def _let_go() -> None:
    """Close everything that the kernel shares with the worker, and handle signals as a new process does. Runs in the child.

    The descriptor numbers stay in use, because objects in this process still hold them.
    """
    if _forking.get() is None:
        return
    _compute_on()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        if _is_the_workers(int(name)):
            os.dup2(nothing, int(name), inheritable=False)
    os.close(nothing)


def _is_the_workers(number: int) -> bool:
    try:
        kind = os.readlink(f"/proc/self/fd/{number}")
        if kind == "anon_inode:[eventpoll]":
            return True
        if not kind.startswith("socket:"):
            return False
        found = socket.socket(fileno=os.dup(number))
    except OSError:  # the folder's own descriptor, which is gone
        return False
    with found:
        return found.family in (socket.AF_INET, socket.AF_INET6)
