"""Rules of when a process counts as gone, each with a way to take it out of force."""

from __future__ import annotations

import msgspec
import pytest

from headrace.broker.membership.members import Members
from headrace.broker.membership.mover import Janitor
from headrace.broker.messages.control import CheckReply, ClaimReply, RefuseReply
from headrace.broker.worker import runs
from headrace.jetstream import lease
from headrace.jetstream.errors import NoResponder
from tests.simulation.protocol.guards.registry import guard
from tests.simulation.virtual.messaging import SimMessaging
from tests.simulation.virtual.server import SimServer


@guard
def silence_is_no_verdict(patch: pytest.MonkeyPatch) -> None:
    real = SimMessaging.request

    async def request(self: SimMessaging, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        try:
            return await real(self, subject, data, timeout_s=timeout_s)
        except NoResponder:
            control = msgspec.msgpack.decode(data)
            if control["op"] == "check":
                return runs.encode(CheckReply(verdicts=["unknown"] * len(control["runs"])))
            kind = ClaimReply if control["op"] == "claim" else RefuseReply
            return runs.encode(kind(verdict="unknown"))

    patch.setattr(SimMessaging, "request", request)


@guard
def no_verdict_right_after_a_reconnect(patch: pytest.MonkeyPatch) -> None:
    """Where leases outlive a server, as in a cluster; those in memory have the rule of the young bucket as well."""
    add = SimServer.add_bucket
    patch.setattr(SimServer, "add_bucket", lambda server, name, **_: add(server, name, in_memory=False))
    patch.setattr(SimMessaging, "connected_since_s", -1e9)


@guard
def a_verdict_takes_a_fresh_read(patch: pytest.MonkeyPatch) -> None:
    async def gone(self: Members, key: str) -> bool:
        return key not in self._values

    patch.setattr(Members, "gone", gone)


@guard
def a_lease_has_time_for_the_answers_of_a_slow_server(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lease, "SLOW_CALLS_PER_TTL", lease.CALLS_PER_TTL)


@guard
def nobody_works_for_a_judge_that_is_gone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runs.WorkerRuns, "look_for_judges", lambda self, now_s: None)


@guard
def work_of_the_dead_is_moved(patch: pytest.MonkeyPatch) -> None:
    async def idle(self: Janitor) -> None:
        return None

    patch.setattr(Janitor, "_round", idle)
