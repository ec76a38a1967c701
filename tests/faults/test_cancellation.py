"""Requests that are ended early, in every phase and every way: engines, queues and clients are rid of them, for good.

Promise: whoever ends a request (its client by leaving, a call, its deadline) has its slots and blocks free again wherever it
was (waiting, in a prefill worker, in transfer, in decode), and nobody gets it again.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.tools.chaos.ledger import Outcome
from headrace.tools.chaos.questions import Question
from tests.faults.support.scene import NAMES, Asked, Scene, deployed
from tests.support.nixl_peer import needs_nixl

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300), needs_nixl]

SLOTS = 3
PREFILL_RATE = 800
ENGINE = (
    f'timing_overrides={{"decode_base_s": 0.01, "prefill_tokens_per_s": {PREFILL_RATE}}}',
    f"slots={SLOTS}",
    "allow_request_faults=true",
)
REDELIVERED_S = 3.5  # longer than the server waits for an ack
DEADLINE_S = 4.0


def cancel_call(scene: Scene, name: str, frontend: int) -> int:
    """`DELETE /v1/requests/{name}` at this frontend; the status."""
    address = scene.deployment.frontends[frontend]
    url = f"http://{address.host}:{address.port}/v1/requests/{name}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="DELETE"), timeout=10) as answer:
            assert json.load(answer)["cancelled"] is True
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


class Trio:
    """The same request three times: its client will leave, a call will end it, and of the last one, which is sent when the
    others have ended, the deadline will pass: behind them routers might refuse it at once, as one that is not done in time."""

    def __init__(
        self,
        scene: Scene,
        name: str,
        make: Callable[[], Question],
        gone: Callable[[], Awaitable[bool]],
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.scene = scene
        self._gone = gone
        self.name = f"{name}-called"
        self.left = scene.begin(make(), extra=extra)
        self.called = scene.begin(make(), extra=extra, name=self.name)
        self._make, self._extra = make, extra

    @property
    def first(self) -> tuple[Asked, ...]:
        return self.left, self.called

    async def end(self, *, began: bool) -> None:
        """Each in its way, with tokens or without. The call goes to the frontend that does not have the request."""
        assert self.left.task is not None
        self.left.task.cancel()
        await asyncio.gather(self.left.task, return_exceptions=True)
        assert await asyncio.to_thread(cancel_call, self.scene, self.name, 1) == 200
        assert await asyncio.to_thread(cancel_call, self.scene, self.name, 1) == 404, "it has ended"
        await self.scene.until("the others have left", self._gone)
        late = self.scene.begin(self._make(), extra=self._extra, deadline_s=DEADLINE_S)
        if began:
            await asyncio.wait_for(late.began.wait(), DEADLINE_S)
        for asked, code in ((self.called, "request_cancelled"), (late, "deadline_exceeded")):
            assert asked.task is not None
            await asyncio.wait_for(asked.task, DEADLINE_S + 15)
            assert asked.outcome in (Outcome.FAILED, Outcome.REFUSED), asked.detail
            assert code in asked.detail
        assert [bool(asked.came) for asked in (*self.first, late)] == [began] * 3


async def test_a_request_that_is_ended_early_is_gone_wherever_it_was(tmp_path: Path) -> None:
    parts: dict[str, Any] = {"mode": "disagg", "workers": 1, "prefill_workers": 1, "frontends": 2}
    async with deployed(tmp_path / "run", engine=ENGINE, **parts) as scene:

        async def prefill_holds(n: int) -> bool:
            return sum((await scene.inspections())["prefill-1"].states.values()) >= n

        async def decode_holds(n: int) -> bool:
            return len((await scene.inspections())["decode-1"].runs) >= n

        async def none_is_held() -> bool:
            return await scene.held() == 0

        # in the queue, behind others that fill the only worker
        before_them = [scene.begin(scene.question(20_000)) for _ in range(SLOTS)]
        for asked in before_them:
            await asyncio.wait_for(asked.began.wait(), 60)

        async def queue_holds(n: int) -> bool:
            return (await scene.connection.stream_state(NAMES.stream("REQ"))).messages >= n

        async def queue_is_empty() -> bool:
            return not await queue_holds(1)

        waiting = Trio(scene, "queue", lambda: scene.question(10), queue_is_empty)
        await scene.until("they were accepted", lambda: queue_holds(2))
        await asyncio.sleep(0.5)
        assert await scene.held() == SLOTS, "those that wait are with nobody yet"
        await waiting.end(began=False)
        for asked in before_them:
            assert asked.task is not None
            asked.task.cancel()
        await asyncio.gather(*(asked.task for asked in before_them if asked.task), return_exceptions=True)
        await scene.at_rest()

        # in decode
        decoding = Trio(scene, "decode", lambda: scene.question(20_000), none_is_held)
        for asked in decoding.first:
            await asyncio.wait_for(asked.began.wait(), 60)
        await decoding.end(began=True)
        await scene.at_rest()

        # while their prompts are computed elsewhere
        prefilling = Trio(scene, "prefill", lambda: scene.question(10, prompt=5_000), none_is_held)
        await scene.until("the prefill worker has them", lambda: prefill_holds(2))
        await prefilling.end(began=False)
        await scene.at_rest()

        # while their blocks are on the way
        stalled = {"vllm_xargs": {"sim": {"stall_transfer": True}}}
        moving = Trio(scene, "transfer", lambda: scene.question(10, prompt=200), none_is_held, extra=stalled)
        await scene.until("they are handed over", lambda: decode_holds(2))
        await asyncio.sleep(0.5)
        await moving.end(began=False)
        await scene.at_rest()

        # and nobody gets any of them again
        work = NAMES.stream("WORK")
        before = (await scene.connection.stream_state(work)).last_seq
        await asyncio.sleep(REDELIVERED_S)
        assert await scene.held() == 0
        assert (await scene.connection.stream_state(work)).last_seq == before
        await scene.serves()
