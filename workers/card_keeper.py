"""Stores the model's card again when the broker has lost it, because without the card the model is not discoverable."""

from __future__ import annotations

import asyncio

import structlog

from headrace.base.errors import HeadraceError
from headrace.broker.models.cards import ModelCard
from headrace.broker.models.stored_card import readable_card
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from headrace.workers.registration import register_card

log = structlog.get_logger()

CHECK_S = 5.0  # seconds between two checks


class CardKeeper:
    """Checks the card while the session runs. Cards of served models do not expire, so a missing one was lost."""

    def __init__(
        self, messaging: Messaging, subjects: Subjects, card: ModelCard, files: dict[str, bytes], *, key: bytes = b""
    ) -> None:
        """`key` signs the card, which is also stored again when another process has stored one without it."""
        self._key = key
        self._messaging = messaging
        self._subjects = subjects
        self._card = card
        self._files = files
        self._cards = messaging.bucket(subjects.bucket("models"))
        stores = Topology(subjects).object_stores()
        self._file_stream = next(spec for spec in stores if spec.name == subjects.bucket("models")).stream().name

    async def run(self) -> None:
        """Check periodically until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                if await self._is_lost():
                    await register_card(self._messaging, self._subjects, self._card, self._files, key=self._key)
                    log.warning("card.stored_again", pool=self._card.pool)
            except HeadraceError as error:  # The next check is soon enough.
                log.debug("card.not_seen", pool=self._card.pool, error=str(error))

    async def _is_lost(self) -> bool:
        entry = await self._cards.get(self._card.pool)
        if entry is None or (self._key and readable_card(entry.key, entry.value, signed_with=self._key) is None):
            return True
        return bool(self._files) and not (await self._messaging.stream_state(self._file_stream)).messages
