"""Changes stored model cards: adds and removes adapters of a pool, lists models, and removes models without workers.

A card outlives its workers on purpose: a model whose workers are restarting is known, and its clients are told to try again.
So a card is removed only by a command.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import structlog

from headrace.broker.codec import decode, encode
from headrace.broker.errors import AdapterRefused, ModelServed, NoWorker, UnknownModel, WireError
from headrace.broker.messages.control import Done, LoadAdapter, UnloadAdapter
from headrace.broker.messages.members import WorkerMember
from headrace.broker.models.cards import UNLOAD_GRACE_S, ModelCard, bad_adapter_name, check_card_key
from headrace.jetstream.errors import JetStreamError, NoResponder, ObjectNotFound, RequestTimeout, RevisionConflict
from headrace.jetstream.ports import Entry, Messaging
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()


class ListedModel(msgspec.Struct, frozen=True):
    card: ModelCard
    workers: list[WorkerMember]


async def pool_workers(messaging: Messaging, subjects: Subjects, pool: str) -> list[WorkerMember]:
    """Return the workers of a pool that hold a lease now, by a fresh read."""
    entries = await messaging.bucket(subjects.bucket("members")).entries(f"worker.{pool}.>")
    return sorted(readable_members(entries), key=lambda member: member.worker)


def readable_members(entries: Iterable[Entry]) -> Iterator[WorkerMember]:
    """Return the workers of these leases; one that cannot be read is logged and left out."""
    for entry in entries:
        try:
            yield decode(WorkerMember, entry.value)
        except WireError as error:
            log.warning("member.malformed", key=entry.key[:200], error=str(error))


async def adapter_served(messaging: Messaging, subjects: Subjects, pool: str, name: str) -> None:
    """Add an adapter to the card. It must be called after the worker's lease names the adapter.

    The card is written even if it has the name: a worker that is just removing the name then reads the leases once more.
    """
    bucket = messaging.bucket(subjects.bucket("models"))
    while (entry := await bucket.get(pool)) is not None:
        card = decode(ModelCard, entry.value)
        try:
            with_it = msgspec.structs.replace(card, adapters=sorted({*card.adapters, name}))
            await bucket.update(pool, encode(with_it), revision=entry.revision)
            return
        except RevisionConflict:
            continue


async def adapter_gone(messaging: Messaging, subjects: Subjects, pool: str, name: str) -> None:
    """Remove an adapter from the card unless a live worker has it.

    It must be called after this worker's own lease has stopped naming the adapter.
    """
    bucket = messaging.bucket(subjects.bucket("models"))
    while (entry := await bucket.get(pool)) is not None:  # read before the leases: a load meanwhile changes the revision
        card = decode(ModelCard, entry.value)
        if name not in card.adapters or any(name in m.adapters for m in await pool_workers(messaging, subjects, pool)):
            return
        try:
            without = msgspec.structs.replace(card, adapters=[other for other in card.adapters if other != name])
            await bucket.update(pool, encode(without), revision=entry.revision)
            return
        except RevisionConflict:
            continue


async def list_models(messaging: Messaging, subjects: Subjects) -> list[ListedModel]:
    """Return every card that can be decoded, sorted by model name."""
    listed = []
    for entry in await messaging.bucket(subjects.bucket("models")).entries():
        try:
            card = decode(ModelCard, entry.value)
            check_card_key(card, entry.key)
        except WireError as error:
            log.warning("card.malformed", pool=entry.key, error=str(error))
            continue
        listed.append(ListedModel(card, await pool_workers(messaging, subjects, card.pool)))
    return sorted(listed, key=lambda model: (model.card.model, model.card.pool))


async def remove_model(messaging: Messaging, subjects: Subjects, name: str) -> list[ModelCard]:
    """Remove the card of the model with this name (or pool id), and the files that no other card names.

    Returns the removed cards, one per namespace that had the model. Raises UnknownModel, and ModelServed while a worker of the
    pool is live: no client could reach that worker afterwards.
    """
    listed = await list_models(messaging, subjects)
    found = [model for model in listed if name in (model.card.model, model.card.pool)]
    if not found:
        raise UnknownModel(name, tuple(sorted({model.card.model for model in listed})))
    for model in found:
        if model.workers:
            workers = ", ".join(member.worker for member in model.workers)
            raise ModelServed(f"{model.card.model!r} is served by {workers}; stop them first")
    bucket = messaging.bucket(subjects.bucket("models"))
    for model in found:
        await bucket.delete(model.card.pool)
    await _remove_files(messaging, subjects, {file.object for model in found for file in model.card.files.values()})
    return [model.card for model in found]


async def _remove_files(messaging: Messaging, subjects: Subjects, candidates: set[str]) -> None:
    """Delete the candidates that no card names.

    A worker that registers at this moment may have found its files here just before. Those files are put back (and the worker
    checks for them once more when its card is stored).
    """
    store = messaging.objects(subjects.bucket("models"))
    removed: dict[str, bytes] = {}
    for name in candidates - await _named_files(messaging, subjects):
        try:
            removed[name] = await store.get(name)
        except ObjectNotFound:
            continue
        await store.delete(name)
    for name in removed.keys() & await _named_files(messaging, subjects):
        await store.put(name, removed[name])


async def _named_files(messaging: Messaging, subjects: Subjects) -> set[str]:
    return {file.object for model in await list_models(messaging, subjects) for file in model.card.files.values()}


LOAD_S = 300.0  # longer than a worker gives the download and its engine together
MARGIN_S = 15.0  # beyond the grace period of an unload


class AdapterReply(msgspec.Struct, frozen=True):
    worker: str
    ok: bool
    message: str


class AdapterClient:
    """Sends adapter commands to workers in every role: a prefill worker must have the adapter as well."""

    def __init__(self, messaging: Messaging, subjects: Subjects, *, load_s: float = LOAD_S) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._load_s = load_s

    async def load(self, pool: str, name: str, source: str) -> list[AdapterReply]:
        """Have every worker of the pool load the adapter.

        Raises NoWorker, JetStreamError, and AdapterRefused, which names the workers that did not load it, and why. The other
        workers serve it then, and the call may be repeated.
        """
        _check(name)
        workers = await pool_workers(self._messaging, self._subjects, pool)
        if not workers:
            raise NoWorker(f"no worker is there to load {name!r}")
        return _all_ok(await self.tell(workers, LoadAdapter(name=name, source=source), timeout_s=self._load_s))

    async def unload(self, pool: str, name: str, *, grace_s: float = UNLOAD_GRACE_S) -> list[AdapterReply]:
        """Have all workers of the pool unload the adapter, and remove it from the card. Its runs have `grace_s` to finish.

        Returns an empty list if no worker had it. Raises AdapterRefused, JetStreamError.
        """
        _check(name)
        having = [m for m in await pool_workers(self._messaging, self._subjects, pool) if name in m.adapters]
        replies = _all_ok(await self.tell(having, UnloadAdapter(name=name, grace_s=grace_s), timeout_s=grace_s + MARGIN_S))
        await adapter_gone(self._messaging, self._subjects, pool, name)
        return replies

    async def tell(
        self, workers: Sequence[WorkerMember], command: LoadAdapter | UnloadAdapter, *, timeout_s: float
    ) -> list[AdapterReply]:
        """Send a command to workers concurrently. A worker that fails or does not answer counts as a refusal."""

        async def one(member: WorkerMember) -> AdapterReply:
            worker, subject = member.worker, self._subjects.operate_worker(member.pool, member.worker)
            try:
                data = await self._messaging.request(subject, encode(command), timeout_s=timeout_s)
                answer = decode(Done, data)
            except NoResponder:
                return AdapterReply(worker, False, f"worker {worker} has just left, or cannot reach the NATS server")
            except RequestTimeout:
                return AdapterReply(worker, False, f"worker {worker} has not answered within {timeout_s:g} s")
            except (JetStreamError, WireError) as error:
                return AdapterReply(worker, False, str(error))
            return AdapterReply(worker, answer.ok, answer.message)

        return await asyncio.gather(*(one(member) for member in workers))


def _check(name: str) -> None:
    if why := bad_adapter_name(name):
        raise AdapterRefused(why)


def _all_ok(replies: list[AdapterReply]) -> list[AdapterReply]:
    failed = [f"{one.worker}: {one.message}" for one in replies if not one.ok]
    if failed:
        raise AdapterRefused(f"{len(failed)} of {len(replies)} workers refused: {'; '.join(failed)}")
    return replies
