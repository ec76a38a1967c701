"""Further pools of one `headrace up`: what each has of its own, what of the first, and what a worker of one reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import SettingsError
from headrace.config.settings import Settings, load
from headrace.up.pools import every_pool

SMALL = 'small-sg={"engine": "sglang", "workers": 2, "engine_args": {"dtype": "float32"}}'


def up(*pools: str, **flags: Any) -> Settings:
    given = {name.replace("__", "."): value for name, value in flags.items()}
    return load("up", flags={"up.pools": list(pools), **given})


def test_a_pool_has_the_settings_of_the_first_but_for_names_numbers_and_engine_settings() -> None:
    first = up(
        SMALL,
        worker__engine="vllm",
        worker__model="m",
        worker__engine_args=["max_num_seqs=4"],
        worker__served_name="m-v",
        worker__aliases="a",
        worker__tool_parser="hermes",
        up__mode="disagg",
        up__workers="7",
    )
    (_, same), (name, second) = every_pool(first)
    assert same is first
    assert (name, second["worker.served_name"], second["worker.engine"]) == ("small-sg", "small-sg", "sglang")
    assert (second["worker.model"], second["worker.engine_args"]) == ("m", {"dtype": "float32"})
    assert (second["up.mode"], second["up.workers"]) == ("aggregated", 2)
    assert (second["worker.aliases"], second["worker.tool_parser"]) == ((), "auto")


@pytest.mark.parametrize(
    ("pool", "told"),
    [
        ("x=5", r"a pool is a name and a table of settings.*not x=5"),
        ("x={oops}", r"a pool is a name and a table of settings"),
        ('x={"engin": "sim"}', r"up.pools.x .*'engin' is no setting of a pool; did you mean engine"),
        ('x={"served_name": "y"}', r"up.pools.x .*: a pool with a served_name is a fleet of that model: give it a fleet"),
        ('x={"served_name": "first", "fleet": "dear"}', r"up.pools.x .* give it a fleet of its own \(--fleet\)"),
        ('x={"role": "decode"}', r"'role' is no setting of a pool"),
        ('x={"engine": "vlm"}', r"worker.engine = 'vlm' \(up.pools.x\): expected one of"),
        ('x={"workers": -1}', r"up.workers = -1 \(up.pools.x\): the least is 0"),
        ('first={"engine": "sim"}', r"up.pools.first \(--pool\): the first pool has that name"),
    ],
)
def test_a_pool_that_makes_no_sense_is_refused_by_name(pool: str, told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        list(every_pool(up(pool, worker__served_name="first")))


def test_a_worker_of_a_pool_has_its_settings_after_its_flags_and_nothing_of_the_first_ones_engine(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text(
        """
        [worker]
        engine = "vllm"
        engine_args = {max_num_seqs = 4}
        stall_s = 7.0
        [up.pools."org/small"]
        engine = "sglang"
        engine_args = {dtype = "float32", page_size = 16}
        """
    )
    environ = {"HEADRACE_WORKER_ENGINE_ARGS": '{"max_model_len": 9}', "HEADRACE_WORKER_ENGINE": "sim"}
    flags = {"worker.pool": "org/small", "worker.engine_args": ["page_size=32"]}
    found = load("worker", flags=flags, environ=environ, config=str(file))
    assert (found["worker.served_name"], found["worker.engine"], found["worker.stall_s"]) == ("org/small", "sglang", 7.0)
    assert found["worker.engine_args"] == {"dtype": "float32", "page_size": 32}
    assert found.source("worker.engine") == "up.pools.org/small"
    alone = load("worker", environ=environ, config=str(file))
    assert (alone["worker.engine"], alone["worker.engine_args"]) == ("sim", {"max_num_seqs": 4, "max_model_len": 9})


def test_workers_of_up_find_its_pools_in_their_environment() -> None:
    environ = up(SMALL).environment()
    worker = load("worker", flags={"worker.pool": "small-sg"}, environ=environ)
    assert (worker["worker.engine"], worker["worker.engine_args"]) == ("sglang", {"dtype": "float32"})
    with pytest.raises(SettingsError, match=r"worker.pool = 'smal': up.pools has no such pool; did you mean small-sg"):
        load("worker", flags={"worker.pool": "smal-sg"[:4]}, environ=environ)


def test_names_of_pools_and_tenants_keep_their_hyphens() -> None:
    assert list(up(SMALL)["up.pools"]) == ["small-sg"]
    assert load("router", flags={"router.tenant_weights": ["a-b=2"]})["router.tenant_weights"] == {"a-b": 2}


def test_secrets_in_a_pools_engine_settings_are_masked() -> None:
    shown = up('x={"engine_args": {"hf_token": "abc", "dtype": "float32"}}').masked()["up.pools"]
    assert shown == {"x": {"engine_args": {"hf_token": "********", "dtype": "float32"}}}


def test_a_pool_may_be_a_fleet_of_the_first_ones_model() -> None:
    dear = 'dear={"served_name": "first", "fleet": "dear", "price": 4, "workers": 2}'
    first = up(dear, worker__served_name="first", worker__fleet="cheap", worker__price="1")
    (_, same), (name, second) = every_pool(first)
    assert (same["worker.fleet"], same["worker.price"]) == ("cheap", 1.0)
    assert (name, second["worker.served_name"], second["worker.fleet"], second["worker.price"]) == (
        "dear",
        "first",
        "dear",
        4.0,
    )
