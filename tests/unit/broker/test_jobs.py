"""Jobs as messages: what JSON can say and the wire cannot is an error of the request."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.broker.codec import decode
from headrace.broker.errors import RequestOverLimit, WireError
from headrace.broker.jobs import Job, check_limits
from headrace.broker.messages.requests import Generation, Parsing, Sampling
from headrace.frontend.errors import translate
from tests.support.frontend.fakes import CARD


def job(extra: dict[str, object]) -> Job:
    return Job(id="a", card=CARD, generation=Generation(token_ids=b"", extra=extra), prompt_tokens=0, max_tokens=1)


@pytest.mark.parametrize("number", [2**64 - 1, -(2**63)])
def test_integers_of_64_bits_travel(number: int) -> None:
    assert decode(Generation, job({"n": [number]}).payload()).extra == {"n": [number]}


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**100])
def test_larger_integers_are_an_error_of_the_request(number: int) -> None:
    with pytest.raises(WireError, match="64 bits") as caught:
        job({"n": [number]}).payload()
    seen = translate(caught.value)
    assert (seen.status, seen.code) == (400, "invalid_request")


TOOL = {"type": "function", "function": {"name": "f"}}


def generation(**fields: Any) -> Generation:
    sampling = fields.pop("sampling", {})
    return Generation(token_ids=b"", sampling=Sampling(**sampling), **fields)


@pytest.mark.parametrize(
    ("fields", "over", "param"),
    [
        ({"stop": ["ab"] * 16}, {"stop": ["ab"] * 17}, "stop"),
        ({"stop": ["a" * 2048] * 2}, {"stop": ["a" * 2048, "b" * 2049]}, "stop"),
        ({"sampling": {"bad_words": ["a"] * 256}}, {"sampling": {"bad_words": ["a"] * 257}}, "bad_words"),
        ({"sampling": {"bad_words": ["a" * 16_384]}}, {"sampling": {"bad_words": ["a" * 16_385]}}, "bad_words"),
        ({"sampling": {"stop_token_ids": [1] * 1024}}, {"sampling": {"stop_token_ids": [1] * 1025}}, "stop_token_ids"),
        (
            {"sampling": {"logit_bias": dict.fromkeys(range(4096), 1.0)}},
            {"sampling": {"logit_bias": dict.fromkeys(range(4097), 1.0)}},
            "logit_bias",
        ),
        (
            {"sampling": {"allowed_token_ids": [1] * 262_144}},
            {"sampling": {"allowed_token_ids": [1] * 262_145}},
            "allowed_token_ids",
        ),
        ({"guided": {"regex": "a" * 16_384}}, {"guided": {"regex": "a" * 16_385}}, "structured_outputs.regex"),
        ({"guided": {"json": {"a": "b" * 260_000}}}, {"guided": {"json": {"a": "b" * 263_000}}}, "structured_outputs"),
        ({"guided": {"choice": ["abc"] * 60_000}}, {"guided": {"choice": ["abc"] * 70_000}}, "structured_outputs"),
        ({"extra": {"a": "b" * 65_000}}, {"extra": {"a": "b" * 66_000}}, "vllm_xargs"),
        ({"parse": Parsing(tools=[TOOL] * 512)}, {"parse": Parsing(tools=[TOOL] * 513)}, "tools"),
        ({"parse": Parsing(tools=[{"a": "b" * 1_000_000}])}, {"parse": Parsing(tools=[{"a": "b" * 2**20}])}, "tools"),
        (
            {"parse": Parsing(template_kwargs={"a": "b" * 65_000})},
            {"parse": Parsing(template_kwargs={"a": "b" * 66_000})},
            "chat_template_kwargs",
        ),
    ],
)
def test_a_parameter_may_be_as_large_as_its_limit_and_no_larger(
    fields: dict[str, Any], over: dict[str, Any], param: str
) -> None:
    check_limits(generation(**fields), choices=1, prompt_tokens=10)
    with pytest.raises(RequestOverLimit, match=rf"^{param} has \d+ .*; the limit is \d+$") as caught:
        check_limits(generation(**over), choices=1, prompt_tokens=10)
    assert caught.value.param == param


def test_the_prompt_counts_once_for_each_choice() -> None:
    check_limits(generation(), choices=1, prompt_tokens=2**24)
    check_limits(generation(), choices=128, prompt_tokens=65_536)
    with pytest.raises(RequestOverLimit, match="n has"):
        check_limits(generation(), choices=128, prompt_tokens=65_537)
