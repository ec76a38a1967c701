"""Sequences with media get embeddings of other workers where these are of use."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import Handover, Sequence
from headrace.workers.runtime.sequences import MediaOrigin, with_embeddings

ORIGIN = MediaOrigin("r1")
IMAGE = {"kind": "image", "data": b"cat"}


class Known:
    """Has these embeddings, and counts the questions."""

    def __init__(self, found: Mapping[int, bytes]) -> None:
        self.found = found
        self.asked: list[MediaOrigin] = []

    async def fetch(self, sequence: Sequence, origin: MediaOrigin) -> Mapping[int, bytes]:
        self.asked.append(origin)
        return self.found


def sequence(*media: Mapping[str, object], handover: Handover | None = None) -> Sequence:
    return Sequence(id="r1-1-0", token_ids=[1], prompt_tokens=1, sampling=Sampling(), media=media, handover=handover)


@pytest.mark.parametrize("handover", [None, Handover(kind="prefill")], ids=["aggregated", "prefill"])
async def test_a_prompt_that_is_computed_here_gets_what_there_is(handover: Handover | None) -> None:
    known = Known({1: b"CAT"})

    given = await with_embeddings(known, sequence(IMAGE, IMAGE, handover=handover), ORIGIN)

    assert given.embeddings == {1: b"CAT"}
    assert known.asked == [ORIGIN]


async def test_a_prompt_whose_blocks_are_fetched_needs_none() -> None:
    known = Known({0: b"CAT"})
    wanted = sequence(IMAGE, handover=Handover(kind="decode", params={}))

    assert await with_embeddings(known, wanted, ORIGIN) is wanted
    assert known.asked == []


async def test_a_text_or_a_worker_without_encoders_asks_for_none() -> None:
    known = Known({0: b"CAT"})
    text, shown = sequence(), sequence(IMAGE)

    assert await with_embeddings(known, text, ORIGIN) is text
    assert await with_embeddings(None, shown, ORIGIN) is shown
    assert known.asked == []
