"""The drain of a frontend: a carrier gives its jobs back before the ingress gives up the lease that it speaks under."""

from __future__ import annotations

import asyncio

import pytest

from headrace.frontend.server import HAND_BACK_S, drain_parts


class Part:
    """A part that takes its whole grace period."""

    def __init__(self, name: str, done: list[str]) -> None:
        self.name = name
        self.done = done
        self.grace_s = -1.0

    async def drain(self, grace_s: float) -> None:
        self.grace_s = grace_s
        await asyncio.sleep(grace_s / 10)
        self.done.append(self.name)


async def test_a_carrier_is_done_before_the_ingress_gives_up_its_lease() -> None:
    done: list[str] = []
    await drain_parts(Part("carrier", done), Part("ingress", done), 1.0)
    assert done == ["carrier", "ingress"]


async def test_batches_are_given_up_beside_what_takes_the_whole_grace_period() -> None:
    done: list[str] = []
    batches = Part("batches", done)
    await drain_parts(Part("carrier", done), None, 1.0, batches=batches)
    assert sorted(done) == ["batches", "carrier"]
    assert batches.grace_s == 1.0


@pytest.mark.parametrize("grace_s", [0.0, HAND_BACK_S / 2])
async def test_a_short_grace_period_leaves_none_for_the_carrier(grace_s: float) -> None:
    carrier = Part("carrier", [])
    await drain_parts(carrier, None, grace_s)
    assert carrier.grace_s == 0.0
