"""The model's card, stored again when the broker has lost it: without the card nobody knows that the model is served."""

from __future__ import annotations

import asyncio

import structlog

from headrace.broker.models.cards import ModelCard
from headrace.jetstream.errors import HeadraceError
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from headrace.workers.registration import register_card

log = structlog.get_logger()

LOOK_S = 5.0


class CardKeeper:
    """Run `run` beside the session. A card that is gone while a worker lives was lost: only unserved models are forgotten."""

    def __init__(self, messaging: Messaging, subjects: Subjects, card: ModelCard, files: dict[str, bytes]) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._card = card
        self._files = files
        self._cards = messaging.bucket(subjects.bucket("models"))
        stores = Topology(subjects).object_stores()
        self._file_stream = next(spec for spec in stores if spec.name == subjects.bucket("models")).stream().name

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                if await self._lost():
                    await register_card(self._messaging, self._subjects, self._card, self._files)
                    log.warning("card.stored_again", pool=self._card.pool)
            except HeadraceError as error:  # the next look is soon enough
                log.debug("card.not_seen", pool=self._card.pool, error=str(error))

    async def _lost(self) -> bool:
        if await self._cards.get(self._card.pool) is None:
            return True
        return bool(self._files) and not (await self._messaging.stream_state(self._file_stream)).messages
