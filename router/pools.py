"""The pools a router process serves: those of the models with a card, as they come."""

from __future__ import annotations

from collections.abc import Callable, Collection

import structlog

from headrace.broker.models.cards import ModelCard
from headrace.broker.models.stored_card import readable_card
from headrace.jetstream.ports import Change, Messaging
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()


class Pools:
    """Watches the model cards. A pool is reported once; its router goes on when the card is removed."""

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        on_pool: Callable[[ModelCard], None],
        *,
        namespace: str | None = None,
        models: Collection[str] = (),
    ) -> None:
        """`namespace` None: models of all namespaces. `models`: only these, by name or alias; empty: all."""
        self._on_pool = on_pool
        self._namespace = namespace
        self._models = frozenset(models)
        self._known: set[str] = set()
        self._watch = messaging.bucket(subjects.bucket("models")).watch(self._on_card)

    async def run(self) -> None:
        await self._watch.run()

    def _on_card(self, change: Change) -> None:
        if change.value is None or change.key in self._known:
            return
        card = readable_card(change.key, change.value)
        if card is None:
            return
        if self._namespace is not None and card.namespace != self._namespace:
            return
        if self._models and self._models.isdisjoint((card.model, *card.aliases)):
            return
        self._known.add(card.pool)
        self._on_pool(card)
