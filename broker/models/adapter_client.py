"""Loads and unloads an adapter on all workers of a pool, for an ingress or a command."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from headrace.broker.codec import decode, encode
from headrace.broker.errors import AdapterRefused, NoWorker, WireError
from headrace.broker.messages.control import Done, LoadAdapter, UnloadAdapter
from headrace.broker.messages.members import WorkerMember
from headrace.broker.models.card_store import adapter_gone, pool_workers
from headrace.broker.models.cards import UNLOAD_GRACE_S, bad_adapter_name
from headrace.jetstream.errors import JetStreamError, NoResponder, RequestTimeout
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

LOAD_S = 300.0  # longer than a worker gives the download and its engine together
MARGIN_S = 15.0  # beyond the grace period of an unload


class AdapterReply(msgspec.Struct, frozen=True):
    """The answer of a worker to an adapter command."""

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
        """Send a command to workers concurrently. A worker that fails or does not answer is a reply that is not `ok`."""

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
