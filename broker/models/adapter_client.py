"""Loading and unloading an adapter on all workers of a pool, from outside: an ingress or a command line."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from headrace.broker.codec import decode, encode
from headrace.broker.errors import AdapterRefused, NoWorker, WireError
from headrace.broker.messages import Done, LoadAdapter, UnloadAdapter, WorkerMember
from headrace.broker.models.card_store import adapter_gone, pool_workers
from headrace.broker.models.cards import UNLOAD_GRACE_S, bad_adapter_name
from headrace.jetstream.errors import JetStreamError, NoResponder, RequestTimeout
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

LOAD_S = 150.0  # longer than a worker gives its engine
MARGIN_S = 15.0  # beyond the grace period of an unload


class Told(msgspec.Struct, frozen=True):
    """What one worker said."""

    worker: str
    ok: bool
    message: str


class AdapterClient:
    """Asks workers, whatever their role: one that computes prompts must have the adapter as well."""

    def __init__(self, messaging: Messaging, subjects: Subjects, *, load_s: float = LOAD_S) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._load_s = load_s

    async def load(self, pool: str, name: str, source: str) -> list[Told]:
        """Have every worker of the pool serve it. Raises NoWorker, AdapterRefused naming who did not and why, JetStreamError.

        After AdapterRefused the other workers serve it; to call this again is fine.
        """
        _check(name)
        workers = await pool_workers(self._messaging, self._subjects, pool)
        if not workers:
            raise NoWorker(f"no worker is there to load {name!r}")
        return _all_ok(await self.tell(workers, LoadAdapter(name=name, source=source), timeout_s=self._load_s))

    async def unload(self, pool: str, name: str, *, grace_s: float = UNLOAD_GRACE_S) -> list[Told]:
        """Have no worker of the pool serve it any more, and forget it. What runs on it has `grace_s` to finish.

        Returns nothing when no worker had it. Raises AdapterRefused, JetStreamError.
        """
        _check(name)
        having = [m for m in await pool_workers(self._messaging, self._subjects, pool) if name in m.adapters]
        told = _all_ok(await self.tell(having, UnloadAdapter(name=name, grace_s=grace_s), timeout_s=grace_s + MARGIN_S))
        await adapter_gone(self._messaging, self._subjects, pool, name)
        return told

    async def tell(
        self, workers: Sequence[WorkerMember], command: LoadAdapter | UnloadAdapter, *, timeout_s: float
    ) -> list[Told]:
        """All at once. Never raises for what a worker does."""

        async def one(worker: str) -> Told:
            try:
                data = await self._messaging.request(self._subjects.control(worker), encode(command), timeout_s=timeout_s)
                answer = decode(Done, data)
            except NoResponder:
                return Told(worker, False, f"worker {worker} has just left, or cannot reach the NATS server")
            except RequestTimeout:
                return Told(worker, False, f"worker {worker} has not answered within {timeout_s:g} s")
            except (JetStreamError, WireError) as error:
                return Told(worker, False, str(error))
            return Told(worker, answer.ok, answer.message)

        return await asyncio.gather(*(one(member.worker) for member in workers))


def _check(name: str) -> None:
    if why := bad_adapter_name(name):
        raise AdapterRefused(why)


def _all_ok(told: list[Told]) -> list[Told]:
    failed = [f"{one.worker}: {one.message}" for one in told if not one.ok]
    if failed:
        raise AdapterRefused(f"{len(failed)} of {len(told)} workers refused: {'; '.join(failed)}")
    return told
