"""Publishes model cards and their files, and tracks them in an ingress, with the number of ready workers."""

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
from headrace.broker.models.served_pools import LATELY_S, ServedPools
from headrace.jetstream.errors import JetStreamError, ObjectNotFound, RequestTimeout, RevisionConflict
from headrace.jetstream.ports import Change, Messaging, ObjectBucket
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()

FETCH_RETRY_S = 0.5
LISTING_S = 60.0
LOST_CHECK_S = 5.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model whose card and files are here, or one of its adapters, under the name that it was looked up by.

    `workers` is the number of workers that have it, are live and do not drain.
    """

    name: str
    card: ModelCard
    files: Mapping[str, bytes]
    workers: int
    adapter: str | None = None


async def publish_card(messaging: Messaging, subjects: Subjects, card: ModelCard, files: Mapping[str, bytes]) -> ModelCard:
    """Store the files and the card; return the card that is in force.

    The first worker of a pool creates the card; a later one keeps the `created` time, block size and adapters of the stored
    card, replaces the rest, and must check that the card fits. Files are addressed by digest, so a file that is stored already
    is not written again. The files are checked once more after the card is stored: a model that had them as well may have been
    removed just then.
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
    """The model cards as an ingress sees them. A model becomes known once its files have been read.

    A card that was deleted is forgotten at once. One that vanished without a trace was lost with its bucket: its workers store
    it again, so it is kept while the pool has a worker, and for `LATELY_S`.
    """

    def __init__(self, messaging: Messaging, subjects: Subjects, members: Members, *, namespace: str | None = None) -> None:
        """`namespace`: know only the models in it; None = those of all namespaces."""
        self._namespace = namespace
        self._members = members
        self._objects: ObjectBucket = messaging.objects(subjects.bucket("models"))
        self._watch = messaging.bucket(subjects.bucket("models")).watch(self._on_card)
        self._wanted: asyncio.Queue[tuple[str, ModelCard | None]] = asyncio.Queue(maxsize=10_000)
        self._known: dict[str, tuple[ModelCard, dict[str, bytes]]] = {}  # by pool
        self._pools: dict[str, str] = {}  # model name or alias → pool
        self._adapters: dict[str, str] = {}  # adapter → pool, for the adapters of the cards and of live workers
        self._files: dict[str, bytes] = {}  # by digest
        self._lost: dict[str, float] = {}  # pools whose card has vanished, and since when
        self._served = ServedPools(members)
        self._loop = asyncio.get_running_loop()
        self._callbacks: list[Callable[[], None]] = []
        self._listed = False  # True once all cards that existed at the start have been read
        members.on_change(self._changed)

    async def run(self) -> None:
        """Watch the cards and read their files until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch.run())
            tasks.create_task(self._load())
            tasks.create_task(self._list())
            tasks.create_task(self._forget_lost())

    async def ready(self, timeout_s: float) -> None:
        """Return once all cards that existed at the start have been read. Raises RequestTimeout or TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._watch.ready(timeout_s)
            await self._wanted.join()
        self._listed = True

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` after every change of models or members."""
        self._callbacks.append(callback)

    def names(self) -> list[str]:
        """Return the names of all models with a card, ready or not."""
        return sorted(card.model for card, _ in self._known.values())

    def ready_names(self) -> list[str]:
        """Return the names of the models that have a worker which accepts requests, or is woken for them."""
        return sorted(card.model for card, _ in self._known.values() if self._members.answerable(card.pool))

    def offered_names(self) -> list[str]:
        """Return the names of the models that have a worker which accepts requests, or had one lately."""
        now = self._loop.time()
        return sorted(card.model for card, _ in self._known.values() if self._served.lately(card.pool, now))

    def listed_names(self) -> list[str]:
        """Return every name under which a worker accepts requests or is woken for them: models, aliases and adapters."""
        models = [card for card, _ in self._known.values() if self._members.answerable(card.pool)]
        aliases = {alias for card in models for alias in card.aliases if self._pools.get(alias) == card.pool}
        names = {card.model for card in models}
        return [*sorted(names), *sorted(aliases - names), *self.adapters()]

    def pool_of(self, name: str) -> str | None:
        """Return the pool of a model, an alias or an adapter; None if it is not known."""
        return self._pools.get(name) or self._adapters.get(name)

    def adapters(self) -> list[str]:
        """Return the adapters that are loaded in at least one worker that accepts requests, or is woken for them."""
        return sorted(name for name, pool in self._adapters.items() if self._members.answerable(pool, name))

    def get(self, name: str) -> ServedModel:
        """Return the model or adapter with this name.

        Raises UnknownModel, which names those on offer, and BrokerUnavailable while the cards are still being read.
        """
        pool = self._pools.get(name)
        adapter = None
        if pool is None:
            pool, adapter = self._adapters.get(name), name
        if pool is None:
            if not self._listed:
                raise BrokerUnavailable("the models that are served are still being read; try again shortly")
            raise UnknownModel(name, (*self.offered_names(), *self.adapters()))
        card, files = self._known[pool]
        return ServedModel(name, card, files, len(self._members.having(pool, adapter)), adapter)

    def _changed(self) -> None:
        self._served.refresh(self._known, self._loop.time())
        self._find_adapters()
        for callback in self._callbacks:
            callback()

    def _find_adapters(self) -> None:
        """Update the pools of adapters.

        A model's name wins over an adapter's. An adapter stays with its pool; a new one of several pools goes to the first
        in order.
        """
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
        if change.kind == "missing":
            self._lost[change.key] = self._loop.time()
            log.warning("card.lost", pool=change.key)
            return
        self._lost.pop(change.key, None)
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

    async def _forget_lost(self) -> None:
        while True:
            await asyncio.sleep(LOST_CHECK_S)
            now = self._loop.time()
            for pool, since_s in list(self._lost.items()):
                if now - since_s >= LATELY_S and not self._served.lately(pool, now):
                    del self._lost[pool]
                    self._wanted.put_nowait((pool, None))

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
