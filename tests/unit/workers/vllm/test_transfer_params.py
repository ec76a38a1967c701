"""What a prefill side says is looked at before vLLM gets it: vLLM itself would end the whole engine over it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.workers.errors import TransferFailed
from headrace.workers.vllm import transfer_connector

GOOD: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3, 4]],
    "remote_engine_id": "e",
    "remote_request_id": "r-1-0.0a1b2c3d-00ff00ff",
    "remote_host": "127.0.0.1",
    "remote_port": 4711,
    "tp_size": 1,
    "remote_num_tokens": 100,
    "transfer_mode": "push",
}
LENT = transfer_connector.lent(GOOD | {"remote_num_tokens": 65}, until=7.5)


def checked(**changes: Any) -> dict[str, Any]:
    params = {name: value for name, value in (GOOD | changes).items() if value is not ...}
    return transfer_connector.checked(params, mode="push", prompt_tokens=100, block_size=32)


def test_parameters_pass_unchanged() -> None:
    assert checked(remote_prefill_cached_tokens=64) == GOOD | {"remote_prefill_cached_tokens": 64}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"remote_engine_id": ...}, "remote_engine_id"),
        ({"remote_request_id": None}, "remote_request_id"),
        ({"remote_host": 5}, "remote_host"),
        ({"remote_port": "5600"}, "remote_port"),
        ({"tp_size": ...}, "tp_size"),
        ({"do_remote_prefill": False}, "offer nothing"),
        ({"transfer_mode": "pull"}, "'pull', this side is for 'push'"),
        ({"remote_num_tokens": 101}, "101 tokens, the prompt has 100"),
        ({"remote_num_tokens": 68}, "68 tokens"),
        ({"remote_block_ids": None}, "remote_block_ids"),
        ({"remote_block_ids": [[]]}, "remote_block_ids"),
        ({"remote_block_ids": [["x"]]}, "'x'"),
        ({"remote_block_ids": [[1], 2]}, "2"),
    ],
)
def test_what_vllm_could_not_work_with_is_a_failed_transfer(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(TransferFailed, match=word):
        checked(**changes)


def test_no_parameters_are_a_failed_transfer() -> None:
    with pytest.raises(TransferFailed):
        transfer_connector.checked(None, mode="push", prompt_tokens=1, block_size=32)


def test_a_prefill_side_may_leave_a_few_tokens_to_the_decode_side() -> None:
    assert checked(remote_num_tokens=99)["remote_num_tokens"] == 99


def test_parameters_are_plain_enough_to_be_sent() -> None:
    told = transfer_connector.plain({"remote_block_ids": ([1, 2], (3,)), "nested": {"a": (1,)}})
    assert told == {"remote_block_ids": [[1, 2], [3]], "nested": {"a": [1]}}
    assert json.loads(json.dumps(told)) == told


def test_no_prefill_has_the_id_of_an_earlier_one() -> None:
    first, second = transfer_connector.prefill_id("r-1-0"), transfer_connector.prefill_id("r-1-0")
    assert first != second
    for name in (first, second):
        inside = f"{name}-00ff00ff"  # as vLLM goes on to call it
        assert transfer_connector.base_id(inside) == name
        assert transfer_connector.sequence_of(inside) == "r-1-0"


def test_an_id_that_looks_like_vllms_own_is_kept_whole() -> None:
    given = transfer_connector.prefill_id("a.b-0123abcd")
    assert transfer_connector.base_id(f"{given}-89abcdef") == given
    assert transfer_connector.sequence_of(f"{given}-89abcdef") == "a.b-0123abcd"


def test_a_lent_prefix_passes_as_what_a_prefill_side_is_asked() -> None:
    asked = transfer_connector.borrowed(LENT, prompt_tokens=100)
    assert (asked["do_remote_decode"], asked["do_remote_prefill"]) == (True, False)
    assert (asked["remote_num_tokens"], asked["remote_blocks_expiry_time"]) == (65, 7.5)


@pytest.mark.parametrize(
    "changes",
    [
        {"do_remote_decode": False},
        {"remote_blocks_expiry_time": None},
        {"remote_num_tokens": 101},
        {"remote_num_tokens": 0},
        {"remote_block_ids": [[]]},
        {"remote_block_ids": [["x"]]},
        {"remote_host": None},
    ],
)
def test_a_lent_prefix_that_vllm_could_not_work_with_is_a_failed_transfer(changes: dict[str, Any]) -> None:
    with pytest.raises(TransferFailed):
        transfer_connector.borrowed(LENT | changes, prompt_tokens=100)
