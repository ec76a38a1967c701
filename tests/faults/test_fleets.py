"""Two fleets of one model under `headrace up`: a cheap slow one and a dear quick one, with two routers and real clients."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.broker.messages.members import WorkerMember
from headrace.commands.control import live_workers
from headrace.jetstream.client import Connection
from headrace.jetstream.subjects import Subjects
from tests.support.sim_streams import client_of, in_threads, wrong_with
from tests.support.up_process import RunningUp

pytestmark = pytest.mark.fault

CHEAP = ("--fleet", "cheap", "--price", "1", "--workers", "2", "--engine-arg", 'timing_overrides={"decode_base_s": 0.02}')
DEAR: dict[str, Any] = {
    "served_name": "sim",
    "fleet": "dear",
    "price": 4,
    "workers": 2,
    "engine_args": {"mean_output_tokens": 0, "timing_overrides": {"decode_base_s": 0.002}},
}
CLIENTS = 6
TOKENS = 40
ANY_TIME = {"router": {"ttft_target": 60_000, "itl_target": 60_000}}
QUICK = {"router": {"ttft_target": 60_000, "itl_target": 10}}


def members(up: RunningUp) -> dict[str, list[WorkerMember]]:
    """Fleet → its live workers."""

    async def ask() -> dict[str, list[WorkerMember]]:
        names = Subjects()
        options = up.connect_options()
        found: dict[str, list[WorkerMember]] = {}
        async with await Connection.connect(options, subjects=names) as connection:
            for member in await live_workers(connection, names):
                found.setdefault(member.fleet, []).append(member)
        return found

    return asyncio.run(ask())


def pids(up: RunningUp) -> dict[str, list[int]]:
    """Fleet → process ids of its live workers."""
    return {fleet: [member.pid for member in of] for fleet, of in members(up).items()}


def two_fleets(start: Callable[..., RunningUp], *flags: str) -> RunningUp:
    up = start("--served-name", "sim", *CHEAP, "--pool", f"dear={json.dumps(DEAR)}", "--routers", "2", *flags)
    up.until("both fleets joined", lambda: {name: len(of) for name, of in pids(up).items()} == {"cheap": 2, "dear": 2})
    up.until("the routers work", lambda: len(up.events("router.ready")) >= 2)
    return up


def decided(api: openai.OpenAI, nvext: dict[str, Any], number: int = 0, **headers: str) -> dict[str, Any]:
    """What the router says of the fleet of one completion."""
    raw = api.completions.with_raw_response.create(
        model="sim",
        prompt=[*range(200, 230), number],
        max_tokens=8,
        extra_body={"ignore_eos": True, "nvext": nvext},
        extra_headers={"x-headrace-explain": "1", **headers},
    )
    found: dict[str, Any] = json.loads(raw.headers["x-headrace-decision"])["fleet"]
    return found


def learnt(up: RunningUp, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Ask until the router that decides has learnt the steps of both fleets, and has a fresh report of each.

    It predicts nothing of a worker whose last report is older than two seconds, and on a busy machine they come late.
    """
    found: list[dict[str, Any]] = []

    def knows() -> bool:
        found.append(ask())
        itl_s = {option["fleet"]: option["itl_s"] for option in found[-1]["options"]}
        return 0 < itl_s["dear"] < itl_s["cheap"] > 0.01

    up.until("a router has learnt the steps of both fleets", knows)
    return found[-1]


def told(up: RunningUp) -> Counter[tuple[str, str]]:
    """Sum up what all routers tell of fleets: (sample, fleet) → sum over pools, reasons and routers."""
    found: Counter[tuple[str, str]] = Counter()
    for part in up.state()["routers"]:
        with urllib.request.urlopen(f"http://127.0.0.1:{part['metrics_port']}/metrics", timeout=10) as answer:  # our own
            text = answer.read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("headrace_global_"):
                    found[sample.name.removeprefix("headrace_global_"), sample.labels["fleet"]] += sample.value
    return found


def test_targets_in_the_body_and_in_headers_choose_the_fleet_through_http(start: Callable[..., RunningUp]) -> None:
    up = two_fleets(start)
    with client_of(up) as api:
        for number in range(30):  # the routers learn how long the steps of both are
            decided(api, ANY_TIME, number)
            decided(api, {"router": {"ttft_target": 0, "itl_target": 0}}, number)
        cheap = decided(api, ANY_TIME)
        assert (cheap["fleet"], cheap["reason"], cheap["ttft_target_s"]) == ("cheap", "cheapest", 60.0)
        dear = learnt(up, lambda: decided(api, QUICK))
        assert (dear["fleet"], dear["itl_target_s"]) == ("dear", 0.01), dear
        assert dear["reason"] in ("meets", "least_late"), dear
        headed = learnt(up, lambda: decided(api, ANY_TIME, **{"x-headrace-itl-target": "10"}))
        assert headed["fleet"] == "dear", headed
        with pytest.raises(openai.BadRequestError, match="ttft_target"):
            decided(api, {"router": {"ttft_target": -1}})
        fleets = ("cheap", "dear")

        def compared_enough() -> bool:
            now = told(up)
            compared = {fleet: now["ttft_observed_seconds_count", fleet] for fleet in fleets}
            if min(compared.values()) >= 10:
                return all(compared[fleet] == now["ttft_predictions_total", fleet] for fleet in fleets)
            decided(api, ANY_TIME)  # on a busy machine reports are late, and nothing is predicted of a fleet for a while
            decided(api, QUICK)
            return False

        up.until("first tokens are compared with what was predicted of them", compared_enough)
    seen = told(up)
    for fleet in fleets:
        compared = seen["ttft_observed_seconds_count", fleet]
        assert compared == seen["ttft_predicted_seconds_count", fleet]
        assert compared == seen["ttft_predictions_total", fleet] == seen["ttft_targets_total", fleet]
        assert compared <= seen["decisions_total", fleet]
        assert seen["ttft_predicted_seconds_sum", fleet] > 0
        assert seen["ttft_observed_seconds_sum", fleet] > 0
        difference = abs(seen["ttft_observed_seconds_sum", fleet] - seen["ttft_predicted_seconds_sum", fleet])
        assert seen["ttft_error_seconds_sum", fleet] >= difference - 1e-6


def test_fleets_with_blocks_of_different_sizes_serve_one_model_and_each_ones_cache_counts(
    start: Callable[..., RunningUp],
) -> None:
    """The cheap fleet has blocks of 16 tokens, as the pool; those of the dear one have 64."""
    long_blocks = {**DEAR, "pool_block": 16, "engine_args": {**DEAR["engine_args"], "block_size": 64}}
    up = start(
        *("--served-name", "sim", *CHEAP, "--engine-arg", "block_size=16", "--pool-block", "16"),
        *("--pool", f"dear={json.dumps(long_blocks)}"),
    )
    up.until("both fleets joined", lambda: {name: len(of) for name, of in pids(up).items()} == {"cheap": 2, "dear": 2})
    up.until("the router works", lambda: bool(up.events("router.ready")))
    prompt = [*range(500, 910)]

    def uncached(worker: str, count: int) -> int:
        headers = {"x-headrace-explain": "1", "x-headrace-worker": worker}
        raw = api.completions.with_raw_response.create(
            model="sim", prompt=prompt[:count], max_tokens=4, extra_body={"ignore_eos": True}, extra_headers=headers
        )
        candidates = json.loads(raw.headers["x-headrace-decision"])["candidates"]
        return int(next(one["uncached"] for one in candidates if one["worker"] == worker))

    with client_of(up) as api:
        for fleet, of in members(up).items():
            worker = of[0].worker
            assert uncached(worker, 410) == 410
            left, left_of_part = {"cheap": (10, 6), "dear": (26, 22)}[fleet]  # after whole blocks of its engine
            up.until(f"the prefix counts in {fleet}", lambda w=worker, n=left: uncached(w, 410) == n)
            assert uncached(worker, 150) == left_of_part


@pytest.mark.parametrize("fleet", ["cheap", "dear"])
def test_no_request_fails_while_a_whole_fleet_is_dead_and_a_router_is_killed(
    start: Callable[..., RunningUp], fleet: str
) -> None:
    up = two_fleets(start)
    failures: list[str] = []
    stop = threading.Event()
    answered: list[int] = []

    def ask(number: int) -> None:
        nth = 0
        with client_of(up) as api:
            while not stop.is_set() and not failures:
                nth += 1
                if wrong := wrong_with(api, [*range(300, 340), 1000 + number, 2000 + nth], TOKENS):
                    failures.append(wrong)
                answered.append(number)

    def goes_on(more: int) -> None:
        before = len(answered)
        up.until("requests are answered", lambda: bool(failures) or len(answered) >= before + more)
        assert failures == []

    killed: set[int] = set()

    def kill_fleet() -> None:
        for pid in set(pids(up).get(fleet, [])) - killed:
            killed.add(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    with in_threads(ask, CLIENTS, stop=stop.set):
        goes_on(2 * CLIENTS)
        kill_fleet()
        os.kill(up.state()["routers"][0]["pid"], signal.SIGKILL)
        for _ in range(4):
            goes_on(CLIENTS)
            kill_fleet()  # whatever `up` has started again
        goes_on(2 * CLIENTS)
    assert failures == []
    assert len(killed) >= 2
