"""Which workers `headrace up` runs: roles, names, threads, ports, and who waits for whom."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

import pytest

from headrace.base.errors import SettingsError
from headrace.config.settings import load
from headrace.up import worker_plan
from headrace.up.parts import Parts, make_parts
from headrace.up.process import Child
from headrace.up.restart_policy import ManagedProcess, RestartState
from headrace.up.worker_plan import WorkerPlan, plan_worker, plan_workers, worker_counts


@pytest.fixture(autouse=True)
def _nixl_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_plan, "find_spec", lambda name: object())


def _plan(*, cores: int = 64, environment: dict[str, str] | None = None, **flags: str) -> list[WorkerPlan]:
    given = {name.replace("__", "."): value for name, value in flags.items()}
    return plan_workers(load("up", flags=given), environment or {}, cores=cores)


def _names(plans: list[WorkerPlan]) -> list[str]:
    return [plan.name for plan in plans]


def test_without_a_mode_there_is_one_worker_that_does_all() -> None:
    (only,) = _plan()
    assert (only.name, only.role, only.serves, only.waits) == ("worker-1", "aggregated", True, False)
    assert only.argv == ("worker", "--engine", "vllm", "--role", "aggregated", "--name", "worker-1")
    assert _names(_plan(up__workers="3")) == ["worker-1", "worker-2", "worker-3"]
    assert _plan(up__workers="0") == []


def test_disagg_is_one_prefill_and_one_decode_worker() -> None:
    decode, prefill = _plan(up__mode="disagg")
    assert (decode.name, decode.role, decode.serves) == ("decode-1", "decode", True)
    assert (prefill.name, prefill.role, prefill.serves) == ("prefill-1", "prefill", False)
    assert prefill.argv[prefill.argv.index("--role") + 1] == "prefill"


def test_any_ratio_and_aggregated_workers_beside_them() -> None:
    plans = _plan(up__mode="disagg", up__prefill_workers="2", up__decode_workers="3", up__workers="1")
    assert _names(plans) == ["worker-1", "decode-1", "decode-2", "decode-3", "prefill-1", "prefill-2"]
    assert _names(_plan(up__mode="disagg", up__decode_workers="0")) == ["prefill-1"]


def _arguments(plan: WorkerPlan) -> list[str]:
    return [plan.argv[at + 1] for at, word in enumerate(plan.argv) if word == "--engine-arg"]


def test_workers_that_answer_take_embeddings_from_the_encode_workers_beside_them() -> None:
    worker, encode = _plan(up__encode_workers="1")
    assert (encode.name, encode.role, encode.serves) == ("encode-1", "encode", False)
    assert (_arguments(worker), _arguments(encode)) == (["encoders=true"], [])
    plans = _plan(up__mode="disagg", up__encode_workers="2")
    assert _names(plans) == ["decode-1", "prefill-1", "encode-1", "encode-2"]
    assert [_arguments(plan) for plan in plans] == [["encoders=true"], [], [], []]


def test_an_operator_may_have_workers_encode_by_themselves_beside_encode_workers() -> None:
    settings = load("up", flags={"up.encode_workers": "1", "worker.engine_args": {"encoders": False}})
    assert [_arguments(plan) for plan in plan_workers(settings, {}, cores=64)] == [[], []]


def test_encode_workers_of_an_engine_that_has_none_are_refused_by_name() -> None:
    with pytest.raises(
        SettingsError, match=r"up.encode_workers = 1 \(--encode-workers\): only with --engine vllm, not with sim"
    ):
        worker_counts(load("up", flags={"up.encode_workers": "1", "worker.engine": "sim"}))


@pytest.mark.parametrize(
    ("key", "flag"), [("up.prefill_workers", "--prefill-workers"), ("up.decode_workers", "--decode-workers")]
)
def test_workers_of_a_role_without_the_mode_are_refused_by_name(key: str, flag: str) -> None:
    with pytest.raises(SettingsError, match=rf"{key} = 2 \({flag}\): only with --mode disagg"):
        worker_counts(load("up", flags={key: "2"}))
    assert worker_counts(load("up", flags={key: "0"})) == {"prefill": 0, "decode": 0, "aggregated": 1, "encode": 0}


def test_disagg_without_nixl_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_plan, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"up\.mode = 'disagg' \(--mode\).*nixl.*make install MODE=disagg"):
        worker_counts(load("up", flags={"up.mode": "disagg"}))
    assert worker_counts(load("up"))["aggregated"] == 1
    assert not any(
        worker_counts(load("up", flags={"up.mode": "disagg", "up.prefill_workers": "0", "up.decode_workers": "0"})).values()
    )


def test_all_engines_share_the_cores_and_never_get_less_than_a_thread() -> None:
    def threads(**flags: str) -> set[str | None]:
        return {plan.env.get("OMP_NUM_THREADS") for plan in _plan(**flags)}

    assert threads(up__mode="disagg", cores=2) == {"1"}
    assert threads(up__mode="disagg", up__prefill_workers="2", up__workers="1", cores=16) == {"4"}
    assert threads(up__workers="8", cores=2) == {"1"}
    assert threads(cores=2) == {None}
    assert threads(up__mode="disagg", worker__engine="sim", cores=2) == {None}
    assert threads(up__mode="disagg", cores=2, environment={"OMP_NUM_THREADS": "7"}) == {"7"}


def test_where_cores_are_few_the_first_worker_that_answers_starts_alone() -> None:
    def waiting(**flags: str) -> list[str]:
        return [plan.name for plan in _plan(**flags) if plan.waits]

    assert waiting(up__mode="disagg", cores=2) == ["prefill-1"]
    assert waiting(up__mode="disagg", up__workers="1", up__decode_workers="2", cores=4) == ["decode-1", "decode-2", "prefill-1"]
    assert waiting(up__workers="2", cores=3) == ["worker-2"]
    assert waiting(up__mode="disagg", cores=4) == []
    assert waiting(up__mode="disagg", worker__engine="sim", cores=2) == []


def test_prefill_workers_alone_wait_for_nobody() -> None:
    assert [plan.waits for plan in _plan(up__mode="disagg", up__decode_workers="0", up__prefill_workers="2", cores=2)] == [
        False
    ] * 2


def test_aggregated_workers_of_a_disaggregated_fleet_can_take_other_roles() -> None:
    def asked(engine: str, *given: str, mode: str = "disagg") -> list[str]:
        settings = load(
            "up", flags={"up.mode": mode, "up.workers": "1", "worker.engine": engine, "worker.engine_args": [*given]}
        )
        argv = plan_workers(settings, {}, cores=64)[0].argv
        return [argv[n + 1] for n, word in enumerate(argv) if word == "--engine-arg" and "mean_output" not in argv[n + 1]]

    assert asked("sim") == ["disagg=params"]
    assert asked("vllm") == ["kv_transfer_mode=push"]
    assert asked("vllm", mode="aggregated") == []
    assert (
        asked("sim", "disagg=rendezvous")
        == asked("vllm", "kv_transfer_mode=pull")
        == asked("vllm", "kv_transfer_config={}")
        == []
    )


@pytest.mark.parametrize(
    ("engine", "given", "added"),
    [
        ("sim", [], ["mean_output_tokens=192"]),
        ("sim", ["mean_output_tokens=0"], []),
        ("sim", ["mean_output_tokens=12"], []),
        ("sim", ["tokenizer_dir=mine"], []),
        ("vllm", [], []),
    ],
)
def test_answers_of_the_simulator_end_by_themselves_unless_told_otherwise(
    engine: str, given: list[str], added: list[str]
) -> None:
    settings = load("up", flags={"worker.engine": engine, "worker.engine_args": given})
    argv = plan_workers(settings, {}, cores=64)[0].argv
    assert [argv[n + 1] for n, word in enumerate(argv) if word == "--engine-arg"] == added


def test_metrics_ports_count_up_over_all_workers() -> None:
    flags = {"up.mode": "disagg", "up.prefill_workers": "2", "worker.metrics_port": "9100"}
    workers = make_parts(load("up", flags=flags), {}, port=1).workers
    assert {part.name: part.env["HEADRACE_WORKER_METRICS_PORT"] for part in workers} == {
        "decode-1": "9100",
        "prefill-1": "9101",
        "prefill-2": "9102",
    }
    assert [part.describe()["metrics_port"] for part in workers] == [9100, 9101, 9102]


def test_all_workers_get_the_same_model_string() -> None:
    plans = _plan(up__mode="disagg", worker__model="./my-model")
    assert [plan.argv[plan.argv.index("--model") + 1] for plan in plans] == ["./my-model"] * 2


def test_what_routers_are_told_of_prefill_their_workers_are_told_too() -> None:
    def told(**flags: str) -> dict[str, str]:
        return {name: value for name, value in _plan(up__mode="disagg", **flags)[0].env.items() if "PREFILL" in name}

    assert told() == {}
    assert told(router__prefill="always", router__prefill_min_tokens="64", router__prefill_unready="refuse") == {
        "HEADRACE_WORKER_PREFILL": "always",
        "HEADRACE_WORKER_PREFILL_MIN_TOKENS": "64",
        "HEADRACE_WORKER_PREFILL_UNREADY": "refuse",
    }
    assert told(router__prefill="always", worker__prefill="never") == {}
    assert told(router__prefill_unready="wait") == {}


def _two() -> tuple[ManagedProcess, ManagedProcess]:
    before = ManagedProcess("decode-1", (), {}, RestartState(essential=False), role="decode")
    return before, ManagedProcess("prefill-1", (), {}, RestartState(essential=False), role="prefill", after=before)


async def _released(part: ManagedProcess, answering: asyncio.Event, release: asyncio.Event | None) -> bool:
    """Whether the part gets its turn by this event, and not before."""
    waiting = asyncio.create_task(part.turn(answering, timeout_s=3600))
    for _ in range(5):
        await asyncio.sleep(0)
    early = waiting.done()
    if release is not None:
        release.set()
    done, _ = await asyncio.wait({waiting}, timeout=None if release is not None else 0.01)
    waiting.cancel()
    return not early and bool(done)


async def test_a_worker_that_waits_starts_when_the_first_can_answer_or_has_ended_or_all_stops() -> None:
    for name in ("answering", "first", "itself"):
        first, second = _two()
        answering = asyncio.Event()
        release = {"answering": answering, "first": first.ran, "itself": second.stop_asked}[name]
        assert await _released(second, answering, release), name
    first, second = _two()
    assert not await _released(second, asyncio.Event(), None)


async def test_the_wait_for_the_first_worker_is_bounded() -> None:
    _, second = _two()
    await second.turn(asyncio.Event(), timeout_s=0.01)


def test_only_workers_that_answer_count_as_serving() -> None:
    decode, prefill = _two()
    parts = Parts(workers=(decode, prefill))
    prefill.child = cast("Child", object())
    assert not parts.others_serve(decode)
    decode.child = cast("Child", object())
    assert parts.others_serve(prefill)
    assert not parts.others_serve(decode)


def test_a_part_is_the_last_of_its_kind_while_no_other_one_runs() -> None:
    decode, prefill = _two()
    router = replace(decode, name="router-1", role="")
    parts = Parts(workers=(decode, prefill), routers=(router,))
    prefill.child = cast("Child", object())
    assert not parts.is_last(decode)
    assert parts.is_last(prefill)
    assert parts.is_last(router)


def test_the_parts_of_a_plan_know_whom_they_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    parts = make_parts(load("up", flags={"up.mode": "disagg", "router.metrics_port": "9200", "up.routers": "2"}), {}, port=1)
    decode, prefill = parts.workers
    assert (decode.after, prefill.after) == (None, decode)
    port = decode.metrics_port
    assert port
    assert decode.describe() == {"name": "decode-1", "role": "decode", "pid": None, "metrics_port": port}
    assert [part.name for part in parts] == ["frontend", "decode-1", "prefill-1", "router-1", "router-2", "console"]
    assert [router.env["HEADRACE_ROUTER_METRICS_PORT"] for router in parts.routers] == ["9200", "9201"]


def test_an_engine_of_the_users_own_gets_no_arguments_of_other_engines() -> None:
    plans = _plan(up__mode="disagg", up__workers="1", worker__engine="my_engine:Engine")
    assert {plan.argv[2] for plan in plans} == {"my_engine:Engine"}
    assert not any("--engine-arg" in plan.argv for plan in plans)


def test_each_further_pool_has_workers_of_its_own_on_its_own_engine() -> None:
    pools = ['m/b={"engine": "sglang", "workers": 2}', 'c={"engine": "sim", "mode": "disagg"}']
    given = {"worker.engine": "vllm", "worker.model": "m", "up.pools": pools}
    plans = plan_workers(load("up", flags=given), {}, cores=6)
    assert _names(plans) == ["worker-1", "m-b-worker-1", "m-b-worker-2", "c-decode-1", "c-prefill-1"]
    assert [plan.engine for plan in plans] == ["vllm", "sglang", "sglang", "sim", "sim"]
    of_b = ("worker", "--pool", "m/b", "--engine", "sglang", "--role", "aggregated", "--name", "m-b-worker-1", "--model", "m")
    assert plans[1].argv == of_b
    assert {plan.env["OMP_NUM_THREADS"] for plan in plans} == {"2"}, "three engines share six cores"


def test_where_cores_are_few_the_engines_of_all_pools_start_one_after_the_other() -> None:
    given = {"worker.engine": "vllm", "up.pools": ['b={"engine": "sglang"}', 'c={"engine": "sim"}']}
    plans = plan_workers(load("up", flags=given), {}, cores=2)
    assert [(plan.name, plan.waits) for plan in plans] == [("worker-1", False), ("b-worker-1", True), ("c-worker-1", False)]


def test_pools_whose_workers_would_have_the_same_names_are_refused() -> None:
    given = {"worker.engine": "sim", "up.pools": ['a/b={"engine": "sim"}', 'a.b={"engine": "sim"}']}
    with pytest.raises(SettingsError, match=r"a-b-worker-1"):
        plan_workers(load("up", flags=given), {}, cores=2)


def test_the_numbers_of_a_pool_fit_its_own_mode() -> None:
    given = {"worker.engine": "sim", "up.mode": "disagg", "up.pools": ['b={"engine": "sim", "prefill_workers": 1}']}
    with pytest.raises(SettingsError, match=r"up.prefill_workers = 1 \(up.pools.b\): only with --mode disagg"):
        plan_workers(load("up", flags=given), {}, cores=2)


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        ({"up.mode": "disagg"}, {}, "lo"),
        ({"up.mode": "disagg"}, {"UCX_NET_DEVICES": "mlx5_0:1"}, "mlx5_0:1"),
        ({"up.mode": "disagg", "server.host": "0.0.0.0"}, {}, None),
        ({"up.mode": "disagg", "nats.url": "nats://broker:4222"}, {}, None),
        ({"up.mode": "disagg", "worker.peer_host": "10.0.0.1"}, {}, None),
        ({"worker.engine": "vllm", "worker.model": "m", "up.encode_workers": "1"}, {}, "lo"),
        ({}, {}, None),
    ],
)
def test_blocks_move_over_loopback_where_all_workers_are_on_one_machine(
    given: dict[str, str], environment: dict[str, str], expected: str | None
) -> None:
    plans = plan_workers(load("up", flags={"worker.engine": "sim", **given}), environment, cores=8)
    assert {plan.env.get("UCX_NET_DEVICES") for plan in plans} == {expected}


def test_one_more_worker_takes_the_next_free_name_and_is_like_the_others() -> None:
    settings = load("up", flags={"worker.engine": "sim"}, environ={})
    (first,) = plan_workers(settings, {}, cores=8)
    more = plan_worker(settings, {}, model="sim", role="aggregated", taken={"worker-1", "worker-3"}, login=lambda _pool: {})
    assert (first.name, more.name) == ("worker-1", "worker-2")
    assert [word for word in more.argv if word != "worker-2"] == [word for word in first.argv if word != "worker-1"]


@pytest.mark.parametrize(("model", "role"), [("sim", "decode"), ("sim", "cook")])
def test_no_worker_is_planned_that_the_deployment_has_no_use_for(model: str, role: str) -> None:
    settings = load("up", flags={"worker.engine": "sim"}, environ={})
    with pytest.raises(SettingsError):
        plan_worker(settings, {}, model=model, role=role, taken=set(), login=lambda _pool: {})
