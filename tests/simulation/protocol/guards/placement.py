"""Rules of moving and placing requests, each with a way to take it out of force."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.broker.membership.mover import Mover
from headrace.router.placement.types import Placement
from headrace.router.session.placing import Placer, Refuser
from headrace.router.session.window import HeldRequest, RequestWindow
from tests.simulation.protocol.guards.registry import guard


@guard
def publish_before_delete(patch: pytest.MonkeyPatch) -> None:
    real = Mover._publish

    async def publish(self: Mover, envelope: Any, data: bytes, attempt: int, history: Any, source_seq: int) -> None:
        await self._delete(source_seq)
        await real(self, envelope, data, attempt, history, source_seq)

    patch.setattr(Mover, "_publish", publish)


@guard
def a_moved_copy_is_a_new_attempt(patch: pytest.MonkeyPatch) -> None:
    real = Mover._publish

    async def publish(self: Mover, envelope: Any, data: bytes, attempt: int, history: Any, source_seq: int) -> None:
        await real(self, envelope, data, attempt - 1, history, source_seq)

    patch.setattr(Mover, "_publish", publish)


@guard
def a_request_is_placed_before_it_is_acked(patch: pytest.MonkeyPatch) -> None:
    real = Placer.place

    def place(self: Placer, held: HeldRequest, placement: Placement) -> None:
        held.delivery.ack()
        real(self, held, placement)

    patch.setattr(Placer, "place", place)


@guard
def a_judge_hears_of_a_refusal_before_the_ack(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Refuser, "refuse", lambda self, held, fault: self._window.settle(held, "refused"))


@guard
def a_full_worker_is_not_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Placer, "full", lambda self, held, placement: self._window.settle(held, "full"))


@guard
def a_router_decides_under_its_lease_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestWindow, "granted", property(lambda self: not self.draining))
