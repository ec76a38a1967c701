"""The models that can be served: cards, their files and how many workers are ready for each."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import structlog

from headrace.broker.codec import decode, encode
from headrace.broker.errors import BrokerUnavailable, UnknownModel, WireError
from headrace.broker.membership.members import Members
from headrace.broker.models.cards import CardFile, ModelCard
from headrace.jetstream.errors import JetStreamError, ObjectNotFound, RequestTimeout, RevisionConflict
from headrace.jetstream.ports import Change, Messaging, ObjectBucket
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()

FETCH_RETRY_S = 0.5
LISTING_S = 60.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model with a card whose files are here, or one of its adapters. `workers` are live, not draining, and have it."""

    card: ModelCard
    files: Mapping[str, bytes]
    workers: int
    adapter: str | None = None

    @property
    def name(self) -> str:
        """What clients call it."""
        return self.adapter or self.card.model


async def publish_card(messaging: Messaging, subjects: Subjects, card: ModelCard, files: Mapping[str, bytes]) -> ModelCard:
    """Store the files and the card; return the card that is in force.

    The first worker of a pool publishes; a later one gets the card that is there, and must check that it fits. Files are
    addressed by digest, so a file that is there already is not written again. They are looked for once more when the card is
    stored: a model that had them as well may have been removed just then.
    """
    store = messaging.objects(subjects.bucket("models"))
    contents, listed = {}, {}
    for name, data in files.items():
        digest = hashlib.sha256(data).hexdigest()
        contents[digest] = data
        listed[name] = CardFile(object=digest, digest=digest, size=len(data))
    await _store_files(store, contents)
    in_force = await _store_card(messaging, subjects, msgspec.structs.replace(card, files=listed))
    await _store_files(store, contents)
    return in_force


async def _store_files(store: ObjectBucket, contents: Mapping[str, bytes]) -> None:
    for digest, data in contents.items():
        try:
            await store.get(digest)
        except ObjectNotFound:
            await store.put(digest, data)


async def _store_card(messaging: Messaging, subjects: Subjects, card: ModelCard) -> ModelCard:
    bucket = messaging.bucket(subjects.bucket("models"))
    while True:
        entry = await bucket.get(card.pool)
        try:
            if entry is None:
                await bucket.create(card.pool, encode(card))
                return card
            stored = decode(ModelCard, entry.value)
            kept = msgspec.structs.replace(
                card,
                created=stored.created,
                block_size=stored.block_size,
                adapters=sorted({*stored.adapters, *card.adapters}),
            )
            if kept != stored:
                await bucket.update(card.pool, encode(kept), revision=entry.revision)
            return kept
        except RevisionConflict:
            continue


class ModelDirectory:
    """The cards as an ingress sees them. A model becomes known once its files are here."""

    def __init__(self, messaging: Messaging, subjects: Subjects, members: Members, *, namespace: str | None = None) -> None:
        """`namespace` None takes the models of all of them."""
        self._namespace = namespace
        self._members = members
        self._objects: ObjectBucket = messaging.objects(subjects.bucket("models"))
        self._watch = messaging.bucket(subjects.bucket("models")).watch(self._on_card)
        self._wanted: asyncio.Queue[tuple[str, ModelCard | None]] = asyncio.Queue(maxsize=10_000)
        self._known: dict[str, tuple[ModelCard, dict[str, bytes]]] = {}  # by pool
        self._pools: dict[str, str] = {}  # model name or alias → pool
        self._adapters: dict[
            str, str
        ] = {}  # adapter → pool: those of the card, whose workers may come back, and of the workers
        self._files: dict[str, bytes] = {}  # by digest
        self._callbacks: list[Callable[[], None]] = []
        self._listed = False  # all cards that were there at the start have been read
        members.on_change(self._changed)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch.run())
            tasks.create_task(self._load())
            tasks.create_task(self._list())

    async def ready(self, timeout_s: float) -> None:
        """Return once all cards there are at start have been read. Raises RequestTimeout or TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._watch.ready(timeout_s)
            await self._wanted.join()
        self._listed = True

    def on_change(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def names(self) -> list[str]:
        """Every model with a card, ready or not."""
        return sorted(card.model for card, _ in self._known.values())

    def ready_names(self) -> list[str]:
        return sorted(card.model for card, _ in self._known.values() if self._members.serving_workers(card.pool))

    def adapters(self) -> list[str]:
        """The adapters that some worker has."""
        return sorted(name for name, pool in self._adapters.items() if self._members.having(pool, name))

    def get(self, name: str) -> ServedModel:
        """Raises UnknownModel, which names the known ones, and BrokerUnavailable while these are still being read."""
        pool = self._pools.get(name)
        adapter = None
        if pool is None:
            pool, adapter = self._adapters.get(name), name
        if pool is None:
            if not self._listed:
                raise BrokerUnavailable("the models that are served are still being read; try again shortly")
            raise UnknownModel(name, (*self.names(), *self.adapters()))
        card, files = self._known[pool]
        return ServedModel(card, files, len(self._members.having(pool, adapter)), adapter)

    def _changed(self) -> None:
        self._find_adapters()
        for callback in self._callbacks:
            callback()

    def _find_adapters(self) -> None:
        """A model's name wins over an adapter's, and an adapter of the first pool in order over those of others."""
        there = {
            pool: {*card.adapters, *(name for member in self._members.workers(pool).values() for name in member.adapters)}
            for pool, (card, _) in self._known.items()
        }
        self._adapters = {
            name: pool for name, pool in self._adapters.items() if name in there.get(pool, ()) and name not in self._pools
        }
        for pool in sorted(there):
            for name in sorted(there[pool]):
                if name not in self._pools and self._adapters.setdefault(name, pool) != pool:
                    log.warning("adapter.name_taken", adapter=name, pool=pool, by=self._adapters[name])

    def _on_card(self, change: Change) -> None:
        card = None
        if change.value is not None:
            try:
                card = decode(ModelCard, change.value)
            except WireError as error:
                log.error("card.malformed", pool=change.key, error=str(error))
                return
            if self._namespace is not None and card.namespace != self._namespace:
                return
        self._wanted.put_nowait((change.key, card))

    async def _list(self) -> None:
        while not self._listed:
            with contextlib.suppress(RequestTimeout, TimeoutError):
                await self.ready(LISTING_S)

    async def _load(self) -> None:
        while True:
            pool, card = await self._wanted.get()
            try:
                if card is None:
                    self._known.pop(pool, None)
                    log.info("model.removed", pool=pool)
                else:
                    self._known[pool] = (card, {name: await self._file(f) for name, f in card.files.items()})
                    log.info("model.known", pool=pool, model=card.model)
                self._pools = {}
                for known, _ in self._known.values():
                    self._pools |= dict.fromkeys(known.aliases, known.pool)
                for known, _ in self._known.values():  # a model's own name wins over another's alias
                    self._pools[known.model] = known.pool
                self._changed()
            finally:
                self._wanted.task_done()

    async def _file(self, file: CardFile) -> bytes:
        while file.digest not in self._files:
            try:
                self._files[file.digest] = await self._objects.get(file.object)
            except JetStreamError as error:
                log.warning("card.file_unreadable", object=file.object, error=str(error))
                await asyncio.sleep(FETCH_RETRY_S)
        return self._files[file.digest]
