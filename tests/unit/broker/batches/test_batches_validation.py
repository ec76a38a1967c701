"""An input file is checked in one pass, and each error names its line."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.batches.record import InputInvalid
from headrace.broker.batches.validation import MAX_ERRORS, InputLimits, InputValidator, LinePlan, validate

CHAT = "/v1/chat/completions"


def line(number: int = 1, *, url: str = CHAT, system: str = "", **changes: Any) -> bytes:
    messages = [{"role": "system", "content": system}] if system else []
    body = {"model": "m", "messages": [*messages, {"role": "user", "content": f"say {number}"}]}
    return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": url, "body": body, **changes}).encode() + b"\n"


def checked(data: bytes, *, endpoint: str = CHAT, limits: InputLimits | None = None, step: int = 0) -> LinePlan:
    validator = InputValidator(endpoint, limits or InputLimits())
    for start in range(0, len(data), step or len(data) or 1):
        validator.feed(data[start : start + (step or len(data))])
    return validator.close()


def errors(data: bytes, **options: Any) -> list[tuple[str, int | None, str | None]]:
    with pytest.raises(InputInvalid) as caught:
        checked(data, **options)
    return [(error.code, error.line, error.param) for error in caught.value.errors]


@given(st.integers(1, 40), st.booleans(), st.booleans(), st.booleans())
def test_lines_are_found_however_the_bytes_arrive(step: int, blank: bool, bom: bool, open_end: bool) -> None:
    lines = [line(1), line(2), line(3)]
    data = (b"\xef\xbb\xbf" if bom else b"") + lines[0] + (b"\r\n  \n" if blank else b"") + lines[1] + lines[2]
    plan = checked(data.rstrip() if open_end else data, step=max(step, 4))
    assert [data[o : o + n] for o, n in map(plan.place, (1, 2, 3))] == [each.rstrip() for each in lines]


async def test_a_file_is_read_piece_by_piece_and_its_model_is_told() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for number in range(1, 4):
            yield line(number)

    plan, model = await validate(chunks(), CHAT, InputLimits())
    assert (len(plan), model) == (3, "m")
    assert plan.prompt_tokens > 0


@pytest.mark.parametrize(
    ("bad", "code", "param"),
    [
        (b"nope\n", "invalid_json_line", None),
        (b"[1]\n", "invalid_json_line", None),
        (b'{"custom_id": "\xff"}\n', "invalid_json_line", None),
        (b'{"custom_id": "a", "url": "/", "body": {}}\n', "missing_required_parameter", "method"),
        (line(2, custom_id=7), "invalid_json_line", "custom_id"),
        (line(2, custom_id=""), "invalid_custom_id", "custom_id"),
        (line(2, custom_id="x" * 513), "invalid_custom_id", "custom_id"),
        (line(1), "duplicate_custom_id", "custom_id"),
        (line(2, method="GET"), "invalid_method", "method"),
        (line(2, url="/v1/completions"), "invalid_url", "url"),
        (line(2, body={"messages": []}), "missing_required_parameter", "body.model"),
        (line(2, body={"model": 1}), "invalid_json_line", "body.model"),
        (line(2, body={"model": "other"}), "mismatched_model", "body.model"),
        (line(2, body=[]), "invalid_json_line", "body"),
    ],
)
def test_a_wrong_line_is_named(bad: bytes, code: str, param: str | None) -> None:
    assert errors(line(1) + bad + line(3)) == [(code, 2, param)]


def test_blank_lines_count_in_errors_alone() -> None:
    assert errors(b"\n\n" + b"x\n") == [("invalid_json_line", 3, None)]
    assert len(checked(b"\n\n" + line(1) + b"\n")) == 1


@pytest.mark.parametrize("data", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_no_batch(data: bytes) -> None:
    assert errors(data) == [("empty_file", None, None)]


def test_a_line_that_no_message_can_carry_is_an_error_and_not_kept() -> None:
    limits = InputLimits(line_bytes=200)
    validator = InputValidator(CHAT, limits)
    validator.feed(line(1))
    for _ in range(1000):
        validator.feed(b"x" * 1000)
        assert len(validator._rest) <= 202
    validator.feed(b"\n" + line(2))
    with pytest.raises(InputInvalid, match="200 bytes that a message of this server can carry") as caught:
        validator.close()
    assert [error.line for error in caught.value.errors] == [2]


def test_a_line_as_long_as_a_message_passes_with_its_carriage_return() -> None:
    size = len(line(1)) - 1
    assert len(checked(line(1)[:-1] + b"\r\n", limits=InputLimits(line_bytes=size))) == 1
    assert errors(line(1), limits=InputLimits(line_bytes=size - 1)) == [("line_too_long", 1, None)]


def test_too_many_lines_are_one_error() -> None:
    data = b"".join(line(number) for number in range(1, 6))
    assert errors(data, limits=InputLimits(lines=3)) == [("too_many_tasks", 4, None)]
    assert len(checked(data, limits=InputLimits(lines=5))) == 5


def test_limits_are_those_of_openai_and_what_reaches_them_passes() -> None:
    limits = InputLimits()
    assert (limits.lines, limits.file_bytes, limits.embedding_inputs) == (50_000, 200 * 1024 * 1024, 50_000)
    data = b"".join(line(number) for number in range(1, 50_001))
    assert len(checked(data, limits=InputLimits(file_bytes=len(data)))) == 50_000
    assert errors(data, limits=InputLimits(file_bytes=len(data) - 1)) == [("file_too_large", None, None)]
    assert errors(data + line(50_001)) == [("too_many_tasks", 50_001, None)]


def test_an_id_may_have_512_characters_of_any_script() -> None:
    assert len(checked(line(1, custom_id="ä" * 512) + line(2, custom_id="你" * 512))) == 2
    assert errors(line(1, custom_id="ä" * 513)) == [("invalid_custom_id", 1, "custom_id")]


def test_a_file_that_is_too_large_is_not_read_on() -> None:
    validator = InputValidator(CHAT, InputLimits(file_bytes=300))
    validator.feed(b"x\n" + line(1) * 10)
    assert validator.full
    with pytest.raises(InputInvalid, match="larger than the 300 bytes"):
        validator.close()


def test_reading_stops_after_many_errors() -> None:
    found = errors(b"x\n" * 1000)
    assert len(found) == MAX_ERRORS


@pytest.mark.parametrize(("given_input", "count"), [("a", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1], [2, 3]], 2), ([], 1)])
def test_inputs_of_embeddings_are_counted(given_input: Any, count: int) -> None:
    data = line(url="/v1/embeddings", body={"model": "e", "input": given_input})
    assert len(checked(data, endpoint="/v1/embeddings", limits=InputLimits(embedding_inputs=count))) == 1
    more = data + line(2, url="/v1/embeddings", body={"model": "e", "input": "z"})
    found = errors(more, endpoint="/v1/embeddings", limits=InputLimits(embedding_inputs=count))
    assert found == [("too_many_inputs", 2, "body.input")]


def test_lines_with_a_common_beginning_are_published_together_in_the_order_of_the_file() -> None:
    data = b"".join(line(number, system="ab"[number % 2]) for number in range(1, 7))
    plan = checked(data)
    assert list(plan.published(0, 6)) == [1, 3, 5, 2, 4, 6]
    alone = checked(b"".join(line(number) for number in range(1, 7)))
    assert list(alone.published(0, 6)) == [1, 2, 3, 4, 5, 6]


def test_longer_common_beginnings_are_side_by_side_inside_a_group() -> None:
    def talk(number: int, shot: str) -> bytes:
        turns = [
            {"role": "system", "content": "s"},
            {"role": "user", "content": shot},
            {"role": "user", "content": str(number)},
        ]
        return line(number, body={"model": "m", "messages": turns})

    plan = checked(talk(1, "x") + talk(2, "y") + talk(3, "x") + talk(4, "y"))
    assert list(plan.published(0, 4)) == [1, 3, 2, 4]


def test_the_order_is_the_same_in_every_process() -> None:
    data = b"".join(line(number, system="abc"[number % 3]) for number in range(1, 30))
    one, two = checked(data), checked(data, step=7)
    assert list(one.published(0, 30)) == list(two.published(0, 30))
    assert one.digest == two.digest
