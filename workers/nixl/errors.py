"""Defines every exception that can leave `workers/nixl/`.

WorkerError
├── EngineStartFailed
│   └── NixlUnavailable    NIXL or the backend we need is not there: the message says what to install
├── BadCard                a peer's card cannot be used: damaged, another version, blocks of another size
├── BadBlocks              block numbers that name no block, name one twice, or do not pair up
└── TransferFailed         (retriable)
    ├── PeerUnknown        this peer was never met, or is gone
    ├── BlocksBusy         a transfer given up earlier may still touch these blocks
    ├── DriverFailed       NIXL refused a call
    │   └── PeerGone       NIXL says that the peer is not there any more
    └── Closed             this agent was closed
"""

from __future__ import annotations

from headrace.workers.errors import EngineStartFailed, TransferFailed, WorkerError


class NixlUnavailable(EngineStartFailed):
    """NIXL, or a backend of it, is not installed or does not load."""


class BadCard(WorkerError):
    """A peer's card cannot be used."""


class BadBlocks(WorkerError):
    """The block numbers make no valid transfer."""


class PeerUnknown(TransferFailed):
    """The peer was never met, or was dropped."""


class BlocksBusy(TransferFailed):
    """A transfer that was given up has not let go of the blocks yet."""


class DriverFailed(TransferFailed):
    """NIXL refused a call."""


class PeerGone(DriverFailed):
    """NIXL found the peer disconnected."""


class Closed(TransferFailed):
    """The agent was closed."""
