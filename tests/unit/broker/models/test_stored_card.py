"""A malformed card is counted and passed over, and so is one that would speak for another pool."""

from __future__ import annotations

import pytest

from headrace.broker import metrics
from headrace.broker.codec import encode
from headrace.broker.models.stored_card import readable_card
from tests.support.frontend.fakes import CARD


@pytest.mark.parametrize(("key", "value"), [(CARD.pool, b"\xc1"), ("another", encode(CARD))])
def test_a_card_that_cannot_be_used_is_counted(key: str, value: bytes) -> None:
    counter = metrics.MALFORMED.labels("card")
    before = counter._value.get()
    assert readable_card(key, value) is None
    assert counter._value.get() == before + 1


def test_a_card_under_its_own_pool_is_read() -> None:
    assert readable_card(CARD.pool, encode(CARD)) == CARD
