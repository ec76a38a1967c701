"""Jobs as messages: what JSON can say and the wire cannot is an error of the request."""

from __future__ import annotations

import pytest

from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.jobs import Job
from headrace.broker.messages import Generation
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
