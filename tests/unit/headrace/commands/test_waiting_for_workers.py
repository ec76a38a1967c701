"""Commands to a worker that take long say how far it is: a role, a sleep, an adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headrace.base.errors import EXIT_OK
from headrace.broker.codec import decode, encode
from headrace.broker.messages.control import Done, Inspect, Inspection
from headrace.broker.messages.members import WorkerMember
from headrace.broker.messages.operator import Operated
from headrace.commands import adapter, control, parts, progress
from headrace.jetstream.subjects import Subjects

WORKER = "w-1"
MEMBER = WorkerMember(worker=WORKER, pool="p", model="m", engine="sim", started=1.0, draining=True)
SETTINGS: Any = None  # only the connection, which is not made, needs them
SAYS = "… 0 s, draining, holds 3 requests"


class SlowWorker:
    """Answers a command once the terminal has said twice what is waited for."""

    def __init__(self, capsys: pytest.CaptureFixture[str], answer: Any) -> None:
        self._capsys = capsys
        self._answer = answer
        self.said = ""

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        if subject == Subjects().control(WORKER):
            assert decode(Inspect, data) is not None
            return encode(Inspection(component=WORKER, states={"running": 2, "parked": 1}))
        while self.said.count(" … ") < 2:
            await asyncio.sleep(0.001)
            self.said += self._capsys.readouterr().err
        return encode(self._answer)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[Any], SlowWorker]:
    async def live(*_: Any) -> list[WorkerMember]:
        return [MEMBER]

    def make(answer: Any) -> SlowWorker:
        worker = SlowWorker(capsys, answer)

        def connected(_settings: Any, ask: Callable[[Any, Subjects], Awaitable[Any]], *, name: str) -> Any:
            return asyncio.run(ask(worker, Subjects()))

        for module in (control, parts, adapter):
            monkeypatch.setattr(module, "connected", connected)
            monkeypatch.setattr(module, "live_workers", live)
        monkeypatch.setattr(progress, "EVERY_S", 0.01)
        return worker

    return make


def test_a_change_of_role_says_what_the_worker_still_holds(slow: Callable[[Any], SlowWorker]) -> None:
    worker = slow(Done(ok=True))
    assert control.change_role(SETTINGS, WORKER, "prefill", grace_s=60.0) == EXIT_OK
    assert f"worker w-1 becomes a prefill worker {SAYS}" in worker.said.splitlines()


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (lambda: parts.sleep_worker(SETTINGS, WORKER, level=1, grace_s=None), "sleep"),
        (lambda: parts.wake_worker(SETTINGS, WORKER), "wake"),
        (lambda: parts.pause_worker(SETTINGS, WORKER, grace_s=5.0), "pause"),
        (lambda: parts.reset_cache(SETTINGS, WORKER), "reset-cache"),
        (lambda: parts.profile_worker(SETTINGS, WORKER, "stop"), "profile stop"),
    ],
    ids=["sleep", "wake", "pause", "reset-cache", "profile"],
)
def test_operations_of_the_engine_say_how_far_they_are(
    slow: Callable[[Any], SlowWorker], run: Callable[[], int], name: str
) -> None:
    worker = slow(Operated(ok=True, message="done"))
    assert run() == EXIT_OK
    assert f"worker w-1: {name} {SAYS}" in worker.said.splitlines()


def test_loading_an_adapter_says_that_it_goes_on(slow: Callable[[Any], SlowWorker]) -> None:
    worker = slow(Done(ok=True))
    assert adapter.load_adapter(SETTINGS, "a", "store://a", worker=WORKER, model=None) == EXIT_OK
    assert "loading adapter a … 0 s" in worker.said.splitlines()
