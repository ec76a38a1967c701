"""Reserves the side channel's address, at which vLLM gives other engines its memory's metadata: a port per engine process.

vLLM takes it from two environment variables and listens in a thread; if the port is taken that thread dies and the start never
ends.  So the port is reserved first: a bound socket keeps it from other processes until vLLM has started, and as both allow
the reuse of addresses and ours never listens, vLLM can bind it all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager

from headrace.workers.errors import EngineStartFailed
from headrace.workers.reserved_port import reserve_port

HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
LOOPBACK = "127.0.0.1"
_TRIES = 50


@contextmanager
def side_channel(environ: MutableMapping[str, str], *, host: str = LOOPBACK, ranks: int = 1) -> Iterator[int]:
    """Set both variables while an engine is started; the operator's settings win. Yields the port.

    `host`: the address at which other engines reach this one. Every data parallel rank takes a port, counted from the first.
    Raises EngineStartFailed if the ports are taken.
    """
    before = {name: environ.get(name) for name in (HOST, PORT)}
    host = environ.setdefault(HOST, host)
    with ExitStack() as reserved:
        given = environ.get(PORT)
        port = _reserve(reserved, host, int(given), ranks) if given else _reserve_any(reserved, host, ranks)
        environ[PORT] = str(port)
        try:
            yield port
        finally:
            for name, value in before.items():
                if value is None:
                    del environ[name]
                else:
                    environ[name] = value


def _reserve_any(reserved: ExitStack, host: str, ranks: int) -> int:
    for _ in range(_TRIES):
        attempt = ExitStack()
        try:
            port = reserve_port(attempt, host, 0)
            for rank in range(1, ranks):
                reserve_port(attempt, host, port + rank)
        except (OSError, OverflowError):
            attempt.close()
            continue
        reserved.push(attempt)
        return port
    raise EngineStartFailed(f"no {ranks} free ports in a row on {HOST}={host!r}; is that an address of this machine?")


def _reserve(reserved: ExitStack, host: str, port: int, ranks: int) -> int:
    for rank in range(ranks):
        try:
            reserve_port(reserved, host, port + rank)
        except (OSError, OverflowError) as error:
            raise EngineStartFailed(f"{PORT}={port} on {host}: port {port + rank} cannot be used: {error}") from error
    return port
