"""Parts of a router session without a server: dependencies, requests, and a window whose permission is always granted."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from headrace.broker.settings import Timing
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.subjects import Subjects
from headrace.router.session.window import HeldRequest, RequestHead, RequestWindow, RouterDeps
from headrace.router.settings import SessionOptions


def router_deps(messaging: Any = None, members: Any = None, **more: Any) -> RouterDeps:
    return RouterDeps(messaging=messaging, subjects=Subjects(), members=members, pool="p", router="r1", **more)


def request_window(scheduler: Any = None, *, lease_held: bool = True, ack_wait_s: float = 3.0, **options: Any) -> RequestWindow:
    lease = cast("LeaseKeeper", SimpleNamespace(held=lease_held))
    options = {"timing": Timing(ack_wait_s=ack_wait_s), **options}
    return RequestWindow(router_deps(options=SessionOptions(**options)), scheduler, lease)


@dataclass(eq=False)
class FakeDelivery:
    stream_seq: int = 1
    data: bytes = b"12345"
    subject: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    num_delivered: int = 1
    pending: int = 0
    stored: float = 0.0
    said: list[str] = field(default_factory=list)

    def ack(self) -> None:
        self.said.append("ack")

    def nak(self, delay_s: float = 0.0) -> None:
        self.said.append("nak")

    def progress(self) -> None:
        self.said.append("progress")

    def term(self, reason: str = "") -> None:
        self.said.append("term")


def held(seq: int = 1, request_id: str = "a", request_class: str = "std") -> HeldRequest:
    head = RequestHead(id=request_id, judge="j", deadline=1.0, tokens=3)
    return HeldRequest(FakeDelivery(seq), head, 1, [], request_class)  # type: ignore[arg-type]
