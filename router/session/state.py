"""The state that the parts of one router session share: requests, scheduler, cancelled ids, and the permission to work."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from headrace.broker.messages import Inspection
from headrace.broker.protocol.runs import Tombstones
from headrace.jetstream.lease import LeaseKeeper
from headrace.router.session.ports import SchedulingPort
from headrace.router.session.window import RequestWindow


class ServingPermission:
    """The permission to take and place requests: this router holds its lease and does not drain."""

    def __init__(self, lease: LeaseKeeper) -> None:
        self._lease = lease
        self._draining = False

    @property
    def lease_held(self) -> bool:
        return self._lease.held

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def granted(self) -> bool:
        """The router may hold requests and decide about them now."""
        return self._lease.held and not self._draining

    def drain(self) -> None:
        """Withdraw the permission for good."""
        self._draining = True


@dataclass(frozen=True, slots=True)
class RouterState:
    """The requests of a router and the basis of its decisions. Set `changed` to have the dispatcher look at the window soon."""

    window: RequestWindow
    scheduler: SchedulingPort
    tombstones: Tombstones
    permission: ServingPermission
    changed: asyncio.Event

    def inspection(self, router: str) -> Inspection:
        """Describe this state for operators: requests per state, lease and drain."""
        permission = self.permission
        states = Counter(held.state.value for held in self.window)
        return Inspection(component=router, states=dict(states), lease_held=permission.lease_held, draining=permission.draining)
