"""Parts of a router session without a server: dependencies, and a shared state whose permission is always granted."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from headrace.broker.protocol.runs import Tombstones
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.subjects import Subjects
from headrace.router.session.state import RequestWindow, RouterDeps, RouterState, ServingPermission


def router_deps(messaging: Any = None, members: Any = None, **more: Any) -> RouterDeps:
    return RouterDeps(messaging=messaging, subjects=Subjects(), members=members, pool="p", router="r1", **more)


def router_state(scheduler: Any, window: RequestWindow | None = None, *, lease_held: bool = True) -> RouterState:
    lease = cast("LeaseKeeper", SimpleNamespace(held=lease_held))
    return RouterState(
        RequestWindow("p", ack_wait_s=3.0) if window is None else window,
        scheduler,
        Tombstones(keep_s=60.0),
        ServingPermission(lease),
        asyncio.Event(),
    )
