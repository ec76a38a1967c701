"""Cards: what is wrong with one is said before NIXL sees it."""

from __future__ import annotations

import msgspec
import pytest

from headrace.workers.nixl import card as cards
from headrace.workers.nixl.errors import BadCard


def packed() -> bytes:
    return cards.pack(agent="lender-1", metadata=b"metadata", address=4096, blocks=8, block_bytes=512)


def changed(**fields: object) -> bytes:
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(packed()), **fields})


def test_a_card_says_what_was_put_in() -> None:
    card = cards.unpack(packed())
    assert (card.agent, card.metadata, card.address, card.blocks, card.block_bytes) == ("lender-1", b"metadata", 4096, 8, 512)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a card",
        packed()[:-1],
        changed(v=2),
        changed(metadata=b"metadatA"),
        changed(blocks=0),
        changed(block_bytes=-1),
        changed(address=0),
        changed(agent=7),
    ],
)
def test_a_card_that_is_not_right_is_refused(data: bytes) -> None:
    with pytest.raises(BadCard):
        cards.unpack(data)


def test_a_newer_card_may_say_more() -> None:
    assert cards.unpack(changed(more="words")).agent == "lender-1"
