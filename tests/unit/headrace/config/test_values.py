"""Secrets in what others can see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import SettingsError
from headrace.config.settings import Settings, load
from headrace.config.values import (
    MASK,
    is_secret_name,
    mask_table,
    mask_url,
    mask_urls,
    take_secrets,
    without_secrets_of_others,
)
from headrace.up.server_logins import every_pool


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://me:hunter2@h:4222", f"nats://{MASK}@h:4222"),
        ("nats://me:p@sslong@h:4222", f"nats://{MASK}@h:4222"),
        ("nats://u:pa/ss@h", f"nats://{MASK}@h"),
        ("nats://h:4222", "nats://h:4222"),
        ("u:p@h", f"{MASK}@h"),
        ("nats://a:1,nats://u:p@b:2", f"nats://a:1,nats://{MASK}@b:2"),
        ("nats://u:p@a,nats://v:q@b", f"nats://{MASK}@a,nats://{MASK}@b"),
    ],
)
def test_addresses_are_shown_without_users_and_passwords(url: str, shown: str) -> None:
    assert mask_url(url) == shown


def test_a_password_with_a_comma_is_masked_though_it_splits_the_list() -> None:
    assert mask_urls(("nats://u:se", "cret@h:1", "nats://k:2")) == [f"nats://{MASK}@h:1", "nats://k:2"]


@pytest.mark.parametrize("name", ["password", "hf_token", "api_key", "apikey", "client-secret", "aws.secret_key", "token"])
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["max_num_batched_tokens", "eos_token_id", "tokenizer", "pad_token", "secretary", "stop_token_ids", "key", "seed"]
)
def test_names_that_only_contain_such_a_word_are_shown(name: str) -> None:
    assert not is_secret_name(name)


def test_secrets_inside_tables_are_masked_at_any_depth() -> None:
    table = {"a": {"b": [{"api_key": "x"}, "redis://u:p@h"]}, "max_num_batched_tokens": 8, "token": None}
    assert mask_table(table) == {
        "a": {"b": [{"api_key": MASK}, f"redis://{MASK}@h"]},
        "max_num_batched_tokens": 8,
        "token": None,
    }


def test_a_part_gets_only_secrets_that_it_uses_and_hands_none_on() -> None:
    environ = {"HEADRACE_API_KEY": "k", "HEADRACE_NATS_PASSWORD": "p", "HEADRACE_PREFIX": "hr", "PATH": "/bin"}
    assert set(without_secrets_of_others(environ, "worker")) == {"HEADRACE_NATS_PASSWORD", "HEADRACE_PREFIX", "PATH"}
    assert set(without_secrets_of_others(environ, "frontend")) == set(environ)
    assert take_secrets(environ) == {"HEADRACE_API_KEY": "k", "HEADRACE_NATS_PASSWORD": "p"}
    assert set(environ) == {"HEADRACE_PREFIX", "PATH"}


SHOW = """
import sys
from headrace.config.build_settings import read_settings
import argparse
read_settings(argparse.Namespace(api_key="seecret1,seecret2", nats__url="x"), "up")
print(open("/proc/self/cmdline").read().replace("\\0", " "))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ps_shows_no_secret_of_the_command_line() -> None:
    arguments = ["--api-key", "seecret1,seecret2", "--nats", "nats://u:pa@ssword@127.0.0.1:1"]
    ran = subprocess.run(
        [sys.executable, "-c", SHOW, *arguments], capture_output=True, text=True, env=dict(os.environ), check=True, timeout=60
    )
    assert "--api-key ****" in ran.stdout
    assert "seecret" not in ran.stdout.partition("--api-key")[2]
    assert "pa@ssword" not in ran.stdout


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
