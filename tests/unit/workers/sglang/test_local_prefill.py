"""The scheduler of a decode engine that has prompts to compute by itself."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from headrace.workers.sglang import disagg_rendezvous as subject


@pytest.fixture(autouse=True)
def _sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the two functions of SGLang that the hooks call."""
    utils, scheduler = ModuleType("sglang.srt.disaggregation.utils"), ModuleType("sglang.srt.managers.scheduler")
    utils.is_unadmitted_reject = lambda req: req.rejected  # type: ignore[attr-defined]
    scheduler._make_abort_req = lambda req, finished_reason: (req.rid, finished_reason)  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.disaggregation", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.disaggregation.utils", utils)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler", scheduler)


class Scheduler:
    """A scheduler that says which kind of step it was asked for."""

    def __init__(self) -> None:
        self.waiting_queue: list[Any] = []
        self.chunked_req: Any = None
        self.last_batch: Any = None
        self.processed_tokens_counter = 7
        self.aborted: list[Any] = []

    def get_next_batch_to_run(self, *, running_batch: Any, last_batch: Any) -> tuple[str, list[Any]]:
        taken, self.waiting_queue = list(self.waiting_queue), []
        return "aggregated", taken

    def _release_aborted_request(self, req: Any) -> None:
        """Free nothing."""

    def send_abort_output(self, output: Any, req: Any) -> None:
        self.aborted.append(output)


def request(rid: str = "r.", *, host: str = subject.LOCAL_HOST, rejected: bool = False) -> Any:
    return SimpleNamespace(
        rid=rid, bootstrap_host=host, rejected=rejected, time_stats=SimpleNamespace(set_wait_queue_entry_time=lambda: None)
    )


def added(scheduler: Scheduler, req: Any, *, too_long: bool = False, is_retracted: bool = False) -> bool:
    """Return whether SGLang's own queue got it."""
    passed_on: list[Any] = []
    queue = SimpleNamespace(scheduler=scheduler, _check_if_req_exceed_kv_capacity=lambda req: too_long)
    subject.add(lambda queue, req, is_retracted: passed_on.append(req), queue, req, is_retracted=is_retracted)
    return bool(passed_on)


def step(scheduler: Scheduler) -> Any:
    return subject.next_batch(lambda scheduler, running_batch: ("decode", []), scheduler, None)


def test_only_a_new_request_without_a_rendezvous_is_queued_here() -> None:
    scheduler, mine = Scheduler(), request()
    assert not added(scheduler, mine)
    assert subject.prompts_of(scheduler) == [mine]
    assert added(scheduler, request(host="10.0.0.1"))
    assert added(scheduler, request(rejected=True))
    assert added(scheduler, request(), is_retracted=True)
    assert not added(scheduler, request(), too_long=True)  # SGLang's check has refused it
    assert subject.prompts_of(scheduler) == [mine]


def test_without_local_prompts_every_step_is_sglangs() -> None:
    assert step(Scheduler()) == ("decode", [])


def test_local_prompts_get_an_aggregated_step_and_the_queue_of_arrived_blocks_is_left_alone() -> None:
    scheduler, mine = Scheduler(), request()
    added(scheduler, mine)
    assert step(scheduler) == ("aggregated", [mine])
    assert subject.prompts_of(scheduler) == scheduler.waiting_queue == []


def test_arrived_blocks_come_first() -> None:
    scheduler, arrived = Scheduler(), request("other")
    added(scheduler, request())
    scheduler.waiting_queue = [arrived]
    assert step(scheduler)[0] == "decode"
    assert scheduler.waiting_queue == [arrived]


@pytest.mark.parametrize("state", ["chunk", "computed"])
def test_a_prompt_that_is_begun_is_finished_first(state: str) -> None:
    scheduler = Scheduler()
    scheduler.waiting_queue = arrived = [request("other")]
    if state == "chunk":
        scheduler.chunked_req = request()
    else:
        scheduler.last_batch = SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: True))
    assert step(scheduler) == ("aggregated", [])
    assert scheduler.waiting_queue is arrived


def test_queued_prompts_are_aborted_by_the_beginning_of_their_id() -> None:
    scheduler = Scheduler()
    for rid in ("a-1.", "a-10."):
        added(scheduler, request(rid))
    passed_on: list[Any] = []
    message = SimpleNamespace(abort_all=False, rid="a-1.", finished_reason=None)
    subject.abort(lambda scheduler, message: passed_on.append(message), scheduler, message)
    assert scheduler.aborted == [("a-1.", None)]
    assert [req.rid for req in subject.prompts_of(scheduler)] == ["a-10."]
    assert passed_on == [message]


def test_a_scheduler_with_local_prompts_is_not_idle() -> None:
    scheduler = Scheduler()
    assert subject.is_idle(lambda scheduler: True, scheduler)
    added(scheduler, request())
    assert not subject.is_idle(lambda scheduler: True, scheduler)
