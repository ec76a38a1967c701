"""Secrets in what others can see."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headrace.config.secrets import (
    MASK,
    is_secret_name,
    mask_table,
    mask_url,
    mask_urls,
    take_secrets,
    without_secrets_of_others,
)


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
from headrace.config.flags import read_settings
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
