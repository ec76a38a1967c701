"""Messages of jobs: every form of a request, and what cannot be submitted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.durable.stored_job import parse_job
from headrace.client.client import Request, as_request, message_of
from headrace.client.errors import NotSubmitted

BODY = {"model": "Org/Model", "messages": []}
NOW = 1_000_000.0


def test_the_slug_of_the_model_is_in_the_subject() -> None:
    assert message_of(Request(body=BODY)).model_slug == "org-model"


def test_a_body_without_a_model_gets_the_given_one() -> None:
    message = message_of(Request(body={"messages": []}), default_model="only")
    assert (message.model_slug, msgspec.json.decode(message.data)["model"]) == ("only", "only")


def test_a_line_of_a_batch_file_keeps_its_id_and_endpoint() -> None:
    line = {"custom_id": "c", "method": "POST", "url": "/v1/embeddings", "body": BODY}
    request = as_request(line)
    assert (request.id, request.custom_id, request.endpoint, request.body) == ("c", "c", "/v1/embeddings", BODY)
    assert as_request(line, id="other").id == "other"


@given(
    st.text(min_size=1, max_size=40).filter(str.isprintable),
    st.sampled_from(["batch", "std", "hi"]),
    st.one_of(st.none(), st.floats(1, 600_000)),
    st.booleans(),
)
def test_a_carrier_reads_what_was_submitted(name: str, priority: Any, deadline_s: float | None, durable: bool) -> None:
    request = Request(body=BODY, id=name, priority=priority, deadline_s=deadline_s, durable=durable, custom_id="c")
    message = message_of(request, now=NOW)
    job = parse_job(message.data, message.headers, tenant="_", seq=1, stored=NOW)
    assert (job.name, job.request_class, job.durable, job.custom_id) == (name, priority, durable, "c")
    assert job.deadline == pytest.approx(NOW + (86_400 if deadline_s is None else deadline_s), abs=0.01)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (Request(body={"messages": []}), "names no model"),
        (Request(body={"model": 7}), "has 7"),
        (Request(body=BODY, priority="gold"), "'gold'"),  # type: ignore[arg-type]
        (Request(body=BODY, deadline_s=0), "got 0"),
        (Request(body=BODY, deadline_s=1e9), "got 1000000000"),
        (Request(body=BODY, id=""), "printable"),
        (Request(body={"model": "m", "x": object()}), "cannot be submitted"),
        (Request(body=BODY, reply="a\r\nb"), "cannot be sent"),
    ],
)
def test_what_cannot_be_submitted_is_named(request_: Request, says: str) -> None:
    with pytest.raises(NotSubmitted, match=says):
        message_of(request_)


def test_a_line_of_another_method_is_refused() -> None:
    with pytest.raises(NotSubmitted, match="'GET'"):
        as_request({"custom_id": "c", "method": "GET", "url": "/v1/embeddings", "body": BODY})
