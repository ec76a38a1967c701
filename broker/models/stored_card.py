"""Decodes a card as it lies in the bucket, for readers that go on without one that is malformed."""

from __future__ import annotations

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode
from headrace.broker.errors import CardForged, WireError
from headrace.broker.models.card_signature import check_signature
from headrace.broker.models.cards import ModelCard, check_card_key

log = structlog.get_logger()


def readable_card(key: str, value: bytes, *, signed_with: bytes = b"") -> ModelCard | None:
    """Decode the card that is stored under `key`. Returns None for a malformed one, which is logged and counted.

    `signed_with`: the key that must have signed it; empty = none need have.
    """
    try:
        card = decode(ModelCard, value)
        check_card_key(card, key)
        check_signature(card, signed_with)
    except CardForged as error:
        metrics.FORGED.labels("card").inc()
        log.error("card.forged", pool=key, error=str(error))
        return None
    except WireError as error:
        metrics.MALFORMED.labels("card").inc()
        log.error("card.malformed", pool=key, error=str(error))
        return None
    return card
