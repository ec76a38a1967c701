"""Puts together what a frontend needs to carry batches on and to serve their routes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from headrace.broker.batches.batch_run import BatchParts
from headrace.broker.batches.fan_out import FanOut
from headrace.broker.batches.owner import BatchOwner
from headrace.broker.batches.record import BatchRecord
from headrace.broker.batches.results.seen_results import SeenResults
from headrace.broker.batches.scratch_space import ScratchSpace
from headrace.broker.batches.service import Batches
from headrace.broker.batches.settings import BatchSettings
from headrace.broker.batches.states import Closing
from headrace.broker.batches.store import BatchStore, BatchView
from headrace.broker.batches.stored_files import StoredFiles
from headrace.broker.batches.validation import InputLimits
from headrace.broker.codec import encode
from headrace.broker.durable.names import JobRef, job_id
from headrace.broker.durable.result_store import ResultStore
from headrace.broker.files.store import FileStore
from headrace.broker.ingress.ingress import Ingress
from headrace.broker.messages import Cancel, JobResult
from headrace.frontend.batches.webhooks import BatchWebhook
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

HEADROOM = 4096  # bytes of a message that are left for its headers


class FrontendBatches:
    """The batches of one frontend. `view` shows those of all frontends, `service` answers the routes.

    Implements `CarriedBatches` for the carrier of the same process.
    """

    def __init__(
        self, messaging: Messaging, subjects: Subjects, ingress: Ingress, files: FileStore, settings: BatchSettings
    ) -> None:
        """Raises ValueError for a webhook that cannot be called."""
        store = BatchStore(messaging, subjects, keep_s=settings.keep_s)
        stored = StoredFiles(files, output_ttl_s=settings.output_ttl_s)
        self.view = BatchView(messaging, subjects)
        self._seen = SeenResults()
        self.service = Batches(store, stored, settings, me=ingress.id)
        parts = BatchParts(
            store=store,
            files=stored,
            results=ResultStore(messaging, subjects),
            fan_out=FanOut(messaging, subjects, stored),
            stopper=_CancelBroadcast(messaging, subjects),
            notice=BatchWebhook(settings.webhook_url, settings.webhook_secret or "") if settings.webhook_url else None,
            settings=settings,
            limits=InputLimits(
                lines=settings.max_lines,
                file_bytes=settings.max_file_bytes,
                line_bytes=messaging.max_payload - HEADROOM,
                embedding_inputs=settings.max_inputs,
            ),
            others=self.view.records,
            scratch=ScratchSpace(settings.copied_bytes),
            seen=self._seen,
            slots=partial(_slots_of, ingress),
        )
        self._owner = BatchOwner(parts, self.view, _IngressLeases(ingress), me=ingress.id)

    async def run(self) -> None:
        """Carry batches on until cancelled."""
        await self._owner.run()

    def closing(self, batch_id: str) -> Closing | None:
        """Return how the lines of a batch end that have no result yet; None while it goes on, as far as is known."""
        return self.view.closing(batch_id)

    def see(self, job: JobRef, result: JobResult) -> None:
        """Note the result of a line that the carrier has seen."""
        self._seen.see(job, result)

    async def drain(self, grace_s: float) -> None:
        """Give up all batches, so that other frontends carry them on at once."""
        self.service.disown()
        await self._owner.drain(grace_s)


def _slots_of(ingress: Ingress, model: str) -> int:
    """Count the slots of the live workers that serve a model."""
    pool = ingress.models.pool_of(model)
    return 0 if pool is None else sum(max(1, member.slots) for member in ingress.members.serving_workers(pool))


class _IngressLeases:
    """The leases of ingresses as one of them sees them."""

    def __init__(self, ingress: Ingress) -> None:
        self._ingress = ingress

    @property
    def held(self) -> bool:
        return self._ingress.ready

    def ingress_live(self, ingress: str) -> bool:
        return self._ingress.judge_live(ingress)

    async def ingress_gone(self, ingress: str) -> bool:
        return await self._ingress.judge_gone(ingress)


class _CancelBroadcast:
    """Tells carriers to halt jobs. It may be lost: they look at the ends of their jobs, too."""

    def __init__(self, messaging: Messaging, subjects: Subjects) -> None:
        self._messaging = messaging
        self._subject = subjects.cancel_jobs()

    async def stop(self, record: BatchRecord, names: Sequence[str]) -> None:
        if names:
            self._messaging.send(self._subject, encode(Cancel(ids=[job_id(record.tenant, name) for name in names])))
