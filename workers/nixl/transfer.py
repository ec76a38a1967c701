"""A transfer as its caller sees it."""

from __future__ import annotations

from typing import Literal

from headrace.workers.nixl.descriptors import Indices

Operation = Literal["read", "write"]
State = Literal["active", "done", "failed"]
Reason = Literal["", "deadline", "peer_gone", "forgotten", "refused", "closed"]


class Transfer:
    """A read or write of blocks. It changes only inside calls of the `Agent` that made it.

    Attributes:
        op: read or write another engine's memory.
        peer: the other agent's name.
        local: our blocks, in the order NIXL was told.
        bytes: how many were asked for.
        descriptors: ranges NIXL moved so far, after merging, by its own count.
        state: "active", "done" or "failed".
        reason: why it failed, one word: "deadline", "peer_gone", "forgotten", "refused" (by NIXL) or "closed".
        error: the same as a sentence; "" unless failed.
        took_s: from the request to its end; 0 while active.
        settled: nothing touches the blocks any more. A failed transfer can be unsettled for as long as its peer stands still:
            neither NIXL nor the network can be made to forget a request, so its blocks must not be used until then.
            The other side of a failed write is not told: blocks offered for writing are safe again only when the writer said so
            or is dead.
    """

    __slots__ = ("bytes", "descriptors", "error", "local", "op", "peer", "reason", "settled", "state", "took_s")

    def __init__(self, op: Operation, peer: str, local: Indices, size: int) -> None:
        self.op: Operation = op
        self.peer = peer
        self.local = local
        self.bytes = size
        self.descriptors = 0
        self.state: State = "active"
        self.reason: Reason = ""
        self.error = ""
        self.took_s = 0.0
        self.settled = False

    def __repr__(self) -> str:
        end = f", reason={self.reason!r}, settled={self.settled}" if self.state == "failed" else ""
        return f"Transfer({self.op!r}, {self.peer!r}, blocks={len(self.local)}, bytes={self.bytes}, state={self.state!r}{end})"
