"""A typed layer over NIXL's bindings: handles are numbers, failures are typed, nothing else is hidden.

NIXL's own Python class is not used, because of one setting: it lets the progress thread poll without a pause, which takes a
whole core in every process even when nothing moves (measured; with a pause it wakes on events, 2 % when idle, and transfers are
as fast).
"""

from __future__ import annotations

import logging
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headrace.workers.nixl.descriptors import DescriptorRun, DriverFailed, NixlUnavailable, PeerGone

BACKEND = "UCX"
PROGRESS_PAUSE_US = 1000
"""How long the progress thread sleeps at most when no event wakes it; NIXL rounds up to whole milliseconds.

So an event that UCX does not report costs a millisecond, and not more. Where a transfer takes longer on a busy machine it is
this thread, or ours, that waits for a core: both must run, on both sides, before a push is seen to have arrived.
"""


class Status(Enum):
    MOVING = "moving"
    DONE = "done"


def bindings() -> Any:
    """Import NIXL's compiled module. Raises NixlUnavailable.

    `import nixl` imports torch where a CPU build of torch is installed (1.5 s), only to learn which CUDA version there is and
    so which of its wheels to use.  Where only one wheel is installed there is nothing to choose.
    """
    raises = logging.raiseExceptions
    try:
        wheels = [name for name in ("nixl_cu13", "nixl_cu12", "nixl_rocm") if find_spec(name) is not None]
        if len(wheels) == 1:
            return import_module(f"{wheels[0]}._bindings")
        return import_module("nixl")._bindings
    except (ImportError, OSError) as error:
        raise NixlUnavailable(f"NIXL does not load ({error}); install it with: make install MODE=disagg") from error
    finally:
        logging.raiseExceptions = raises  # importing NIXL turns this off for the whole process


class Driver:
    """A NIXL agent with the backend UCX, over host memory. Every call raises DriverFailed, or PeerGone, when NIXL does."""

    def __init__(self, name: str) -> None:
        nixl = bindings()
        self._nixl = nixl
        self._errors: tuple[type[Exception], ...] = tuple(
            kind
            for key, kind in vars(nixl).items()
            if key.startswith("nixl") and isinstance(kind, type) and issubclass(kind, Exception)
        )
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
        config.pthrDelay = PROGRESS_PAUSE_US
        config.captureTelemetry = True
        try:
            self._agent = nixl.nixlAgent(name, config)
            if BACKEND not in self._agent.getAvailPlugins():
                raise NixlUnavailable(f"this NIXL has no plugin {BACKEND}")
            defaults, _ = self._agent.getPluginParams(BACKEND)
            self._backend = self._agent.createBackend(BACKEND, defaults)
        except self._errors as error:
            raise NixlUnavailable(f"NIXL cannot start its backend {BACKEND}: {error}") from error

    def close(self) -> None:
        """Take the agent down, with whatever it was still doing. No other call may follow."""
        del self._agent

    # -- memory and peers ------------------------------------------------------------------------------------

    def register(self, address: int, size: int) -> Any:
        """Make memory known to NIXL. Returns a handle for `deregister`."""
        ranges = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(address, size, 0, "")])
        self._call("register memory", self._agent.registerMem, ranges, [self._backend])
        return ranges

    def deregister(self, ranges: Any) -> None:
        self._call("deregister memory", self._agent.deregisterMem, ranges, [self._backend])

    def metadata(self) -> bytes:
        """Return the metadata that a peer needs to reach the memory registered so far."""
        return bytes(self._call("read metadata", self._agent.getLocalMD))

    def add(self, metadata: bytes) -> str:
        """Take a peer's metadata in and return the peer's name. Connects, so a dead peer fails here."""
        name = self._call("load a peer's metadata", self._agent.loadRemoteMD, metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove(self, peer: str) -> None:
        self._call("drop a peer", self._agent.invalidateRemoteMD, peer)

    def prepare(self, agent: str | None, address: int, length: int, count: int) -> int:
        """Prepare a list of `count` adjacent blocks to choose from by number. `agent` None: own blocks, as the local side."""
        blocks: NDArray[np.uint64] = np.array([[address, length, 0, length, count]], dtype=np.uint64)
        owner = self._nixl.NIXL_INIT_AGENT if agent is None else agent
        prepare = self._agent.prepXferDlist
        return int(self._call("prepare blocks", prepare, owner, self._nixl.DRAM_SEG, blocks, [self._backend]))

    def unprepare(self, prepared: int) -> None:
        self._call("release prepared blocks", self._agent.releasedDlistH, prepared)

    # -- transfers -------------------------------------------------------------------------------------------

    def make(self, operation: Literal["READ", "WRITE"], local: int, remote: int, part: DescriptorRun) -> int:
        """Make a transfer of these blocks of two prepared lists.

        NIXL merges neighbours itself.  Measured for 100 to 1000 blocks: 10 to 60 µs this way, 90 to 260 µs when they are merged
        here and handed over as plain ranges (NIXL then checks and prepares those each time); the rest takes as long either way.
        """
        kind = self._nixl.NIXL_READ if operation == "READ" else self._nixl.NIXL_WRITE
        make = self._agent.makeXferReq
        return int(
            self._call("make a transfer", make, kind, local, part.local, remote, part.remote, b"", [self._backend], False)
        )

    def post(self, handle: int) -> Status:
        """Start a transfer. Between processes of one machine this copies everything before it returns."""
        return self._status(self._call("post a transfer", self._agent.postXferReq, handle, b""))

    def status(self, handle: int) -> Status:
        return self._status(self._call("check a transfer", self._agent.getXferStatus, handle))

    def moved(self, handle: int) -> tuple[int, int]:
        """Return bytes and descriptors of a transfer that is done, by NIXL's own count."""
        seen = self._call("read telemetry", self._agent.getXferTelemetry, handle)
        return int(seen.totalBytes), int(seen.descCount)

    def release(self, handle: int) -> None:
        """Free a handle. NIXL lets go of one that is moving too, but bytes still arrive afterwards: do not."""
        self._call("release a transfer", self._agent.releaseXferReq, handle)

    # -- notices ---------------------------------------------------------------------------------------------

    def notices(self) -> list[tuple[str, bytes]]:
        fresh = self._call("read notices", self._agent.getNotifs, {}, [])
        return [(sender, bytes(data)) for sender, notices in fresh.items() for data in notices]

    def notify(self, peer: str, data: bytes) -> None:
        self._call("send a notice", self._agent.genNotif, peer, data)

    def _status(self, code: Any) -> Status:
        if code == self._nixl.NIXL_SUCCESS:
            return Status.DONE
        if code == self._nixl.NIXL_IN_PROG:
            return Status.MOVING
        raise DriverFailed(f"a transfer ended with {code}")

    def _call(self, what: str, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self._nixl.nixlRemoteDisconnectError as error:
            raise PeerGone(f"NIXL could not {what}: {error}") from error
        except self._errors as error:
            raise DriverFailed(f"NIXL could not {what}: {error}") from error
