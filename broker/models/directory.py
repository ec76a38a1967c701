"""Model cards as an ingress sees them: published with their files, tracked, and joined with the number of ready workers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec
import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode, encode
from headrace.broker.dead_letters import note_failure
from headrace.broker.errors import BrokerUnavailable, UnknownModel
from headrace.broker.membership.members import Members
from headrace.broker.models.cards import CardFile, ModelCard, readable_card, signed
from headrace.broker.spill import sha256_hex
from headrace.jetstream.errors import JetStreamError, ObjectCorrupt, ObjectNotFound, RequestTimeout, RevisionConflict
from headrace.jetstream.ports import Change, Messaging, ObjectBucket
from headrace.jetstream.subjects import Subjects, pool_id

LATELY_S = 60.0


class ServedPools:
    """The pools that accept requests now, and when the others last did. Sans-io: the time is passed in.

    A model is neither gone nor out of offer while its workers restart.
    """

    def __init__(self, members: Members) -> None:
        self._members = members
        self._serving: set[str] = set()
        self._left_s: dict[str, float] = {}  # when a pool's last worker was gone

    def refresh(self, pools: Iterable[str], now_s: float) -> None:
        """Compare with the leases. To be called after each of their changes, with the pools of all known models."""
        serving = {pool for pool in pools if self._members.serving_workers(pool)}
        self._left_s |= dict.fromkeys(self._serving - serving, now_s)
        self._left_s = {pool: left_s for pool, left_s in self._left_s.items() if now_s - left_s < LATELY_S}
        self._serving = serving

    def lately(self, pool: str, now_s: float) -> bool:
        """Return whether the pool has a worker that accepts requests, or had one less than `LATELY_S` ago."""
        left_s = self._left_s.get(pool)
        return pool in self._serving or (left_s is not None and now_s - left_s < LATELY_S)


log = structlog.get_logger()

FETCH_RETRY_S = 0.5
FETCH_RETRY_MAX_S = 30.0
READ_AT_ONCE = 4  # cards
MOST_FILE_BYTES = 512 * 1024 * 1024
MOST_TAKEN = 1000  # names that are logged
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


async def publish_card(
    messaging: Messaging, subjects: Subjects, card: ModelCard, files: Mapping[str, bytes], *, key: bytes = b""
) -> ModelCard:
    """Store the files and the card; return the card that is in force.

    The first worker of a pool creates the card; a later one keeps the `created` time and adapters of the stored card, while the
    pool has a worker its block size as well, replaces the rest, and must check that the card fits. `key` signs it; a stored
    card that it has not signed counts for nothing. Files are addressed by digest, so a file that is stored already is not
    written again. The files are checked once more after the card is stored: a model that had them as well may have been removed
    just then.
    """
    store = messaging.objects(subjects.bucket("models"))
    contents, listed = {}, {}
    for name, data in files.items():
        digest = hashlib.sha256(data).hexdigest()
        contents[digest] = data
        listed[name] = CardFile(object=digest, digest=digest, size=len(data))
    await _store_files(store, contents)
    in_force = await _store_card(messaging, subjects, msgspec.structs.replace(card, files=listed), key)
    await _store_files(store, contents)
    return in_force


async def _store_files(store: ObjectBucket, contents: Mapping[str, bytes]) -> None:
    for digest, data in contents.items():
        try:
            await store.get(digest)
        except ObjectNotFound:
            await store.put(digest, data)


async def _store_card(messaging: Messaging, subjects: Subjects, card: ModelCard, key: bytes) -> ModelCard:
    bucket = messaging.bucket(subjects.bucket("models"))
    alone = True
    while True:
        entry = await bucket.get(card.pool)
        try:
            if entry is None:
                first = signed(card, key)
                await bucket.create(card.pool, encode(first))
                return first
            stored = readable_card(card.pool, entry.value, signed_with=key) if key else decode(ModelCard, entry.value)
            kept = card
            if stored is not None:
                adapters = sorted({*stored.adapters, *card.adapters})
                kept = msgspec.structs.replace(card, created=stored.created, adapters=adapters)
                if stored.block_size != card.block_size and not (alone and await _is_empty(messaging, subjects, card.pool)):
                    kept = msgspec.structs.replace(kept, block_size=stored.block_size)
            kept = signed(kept, key)
            if kept != stored:
                await bucket.update(card.pool, encode(kept), revision=entry.revision)
            return kept
        except RevisionConflict:  # another worker registers now, and has no lease yet
            alone = False


async def _is_empty(messaging: Messaging, subjects: Subjects, pool: str) -> bool:
    return not await messaging.bucket(subjects.bucket("members")).entries(f"worker.{pool}.>")


class ModelDirectory:
    """The model cards as an ingress sees them. A model becomes known once its files have been read.

    A card that was deleted is forgotten at once. One that vanished without a trace was lost with its bucket: its workers store
    it again, so it is kept while the pool has a worker, and for `LATELY_S`.
    """

    def __init__(
        self,
        messaging: Messaging,
        subjects: Subjects,
        members: Members,
        *,
        namespace: str | None = None,
        signed_with: bytes = b"",
    ) -> None:
        """`namespace`: know only the models in it; None = those of all namespaces. `signed_with`: the key of their cards."""
        self._signed_with = signed_with
        self._namespace = namespace
        self._members = members
        self._objects: ObjectBucket = messaging.objects(subjects.bucket("models"))
        self._watch = messaging.bucket(subjects.bucket("models")).watch(self._on_card)
        self._wanted: asyncio.Queue[tuple[str, ModelCard | None]] = asyncio.Queue(maxsize=10_000)
        self._known: dict[str, tuple[ModelCard, dict[str, bytes]]] = {}  # by pool
        self._pools: dict[str, str] = {}  # model name or alias → pool
        self._adapters: dict[str, str] = {}  # adapter → pool, for the adapters of the cards and of live workers
        self._files: dict[str, bytes] = {}  # by digest
        self._reading: dict[str, asyncio.Task[None]] = {}  # by pool: cards whose files are not here yet
        self._reading_cards: dict[str, ModelCard] = {}
        self._slots = asyncio.Semaphore(READ_AT_ONCE)
        self._taken: set[tuple[str, str, str]] = set()  # names that several pools want, as they were logged
        self._lost: dict[str, float] = {}  # pools whose card has vanished, and since when
        self._served = ServedPools(members)
        self._offered: set[str] = set()  # pools whose names come before those of the others
        self._loop = asyncio.get_running_loop()
        self._callbacks: list[Callable[[], None]] = []
        self._listed = False  # True once all cards that existed at the start have been read
        members.on_change(self._changed)

    async def run(self) -> None:
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
        self._callbacks.append(callback)

    def names(self) -> list[str]:
        return sorted(card.model for card, _ in self._known.values())

    def ready_names(self) -> list[str]:
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
        return self._pools.get(name) or self._adapters.get(name)

    def adapters(self) -> list[str]:
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
            if not self._listed or any(name in (card.model, *card.aliases) for card in self._unread()):
                raise BrokerUnavailable("the models that are served are still being read; try again shortly")
            raise UnknownModel(name, (*self.offered_names(), *self.adapters()))
        card, files = self._known[pool]
        return ServedModel(name, card, files, len(self._members.having(pool, adapter)), adapter)

    def _unread(self) -> list[ModelCard]:
        return [card for pool, card in self._reading_cards.items() if pool in self._reading]

    def _changed(self) -> None:
        self._served.refresh(self._known, self._loop.time())
        self._find_pools()
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
            card = readable_card(change.key, change.value, signed_with=self._signed_with)
            if card is None:
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
            if self._offered != self._offers():  # the last worker of a pool has been gone for long
                self._changed()

    async def _load(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                pool, card = await self._wanted.get()
                if (reading := self._reading.pop(pool, None)) is not None:
                    reading.cancel()
                    self._reading_cards.pop(pool, None)
                if card is None:
                    self._known.pop(pool, None)
                    log.info("model.removed", pool=pool)
                    self._changed()
                    self._wanted.task_done()
                else:
                    task = self._reading[pool] = tasks.create_task(self._read(pool, card, Once(self._wanted.task_done)))
                    self._reading_cards[pool] = card
                    task.add_done_callback(partial(self._read_ended, pool))

    def _read_ended(self, pool: str, task: asyncio.Task[None]) -> None:
        if self._reading.get(pool) is task:
            del self._reading[pool]
            self._reading_cards.pop(pool, None)

    async def _read(self, pool: str, card: ModelCard, tried: Once) -> None:
        """Read the files of a card, and try again until they are here. `tried` is called after the first time."""
        retry_s = FETCH_RETRY_S
        try:
            while True:
                try:
                    async with self._slots:
                        files = {name: await self._file(file) for name, file in card.files.items()}
                    break
                except JetStreamError as error:  # also a file that is not there, or not what the card says
                    metrics.UNREADABLE_CARDS.inc()
                    log.warning("card.file_unreadable", pool=pool, model=card.model, error=str(error), retry_s=retry_s)
                except Exception as error:  # nothing foresaw it: no other card may suffer from it
                    note_failure("card", error, pool=pool, model=card.model)
                tried()
                await asyncio.sleep(retry_s)
                retry_s = min(retry_s * 2, FETCH_RETRY_MAX_S)
            self._known[pool] = (card, files)
            log.info("model.known", pool=pool, model=card.model)
            self._changed()
        finally:
            tried()

    def _offers(self) -> set[str]:
        """Return the pools with a worker that accepts requests, had one lately, or is woken for them."""
        now = self._loop.time()
        return {pool for pool in self._known if self._served.lately(pool, now) or self._members.answerable(pool)}

    def _find_pools(self) -> None:
        """Update the pools of names: models before aliases, and both of the pools on offer before those of all others."""
        self._offered = self._offers()
        cards = sorted((card for card, _ in self._known.values()), key=self._precedence)  # the first one has the name
        pools: dict[str, str] = {}
        for tier in ([c for c in cards if c.pool in self._offered], [c for c in cards if c.pool not in self._offered]):
            for name, pool in [(c.model, c.pool) for c in tier] + [(alias, c.pool) for c in tier for alias in c.aliases]:
                if pools.setdefault(name, pool) != pool:
                    self._note_taken(name, pool, pools[name])
        self._pools = pools

    def _precedence(self, card: ModelCard) -> tuple[bool, bool, bool, float, str]:
        """Order the cards that want one name: a card cannot take the name of a model that is served.

        First the pool that a model of this name and namespace has, then the one that has the name now, then one with workers,
        then the oldest card.
        """
        return (
            card.pool != pool_id(card.model, card.namespace),
            self._pools.get(card.model) != card.pool,
            not self._members.serving_workers(card.pool),
            card.created,
            card.pool,
        )

    def _note_taken(self, name: str, pool: str, by: str) -> None:
        if (name, pool, by) not in self._taken and len(self._taken) < MOST_TAKEN:
            self._taken.add((name, pool, by))
            metrics.NAMES_TAKEN.inc()
            log.warning("model.name_taken", model=name, pool=pool, by=by)

    async def _file(self, file: CardFile) -> bytes:
        """Return a file of a card. Raises JetStreamError, ObjectCorrupt also for a file that differs from the card."""
        if file.digest in self._files:
            return self._files[file.digest]
        stored = await self._objects.info(file.object)
        if file.size > MOST_FILE_BYTES or stored.size != file.size:
            raise ObjectCorrupt(f"{file.object[:80]!r} has {stored.size} bytes, its card says {file.size} of {MOST_FILE_BYTES}")
        data = await self._objects.get(file.object)
        if len(data) != file.size or await sha256_hex(data) != file.digest:
            raise ObjectCorrupt(f"{file.object[:80]!r} is not the file of digest {file.digest[:80]!r} that its card names")
        self._files[file.digest] = data
        return data


class Once:
    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call

    def __call__(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()
