"""OpenAI's batch routes, and the webhook that is called when a batch ends."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import ssl
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import structlog
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.base.http_client import ask
from headrace.broker.batches.batch_run import BatchParts
from headrace.broker.batches.fan_out import FanOut, ScratchSpace
from headrace.broker.batches.record import BatchRecord, Closing
from headrace.broker.batches.results import SeenResults
from headrace.broker.batches.service import Batches, BatchOwner, NewBatch, window_s
from headrace.broker.batches.settings import BatchSettings
from headrace.broker.batches.store import BatchStore, BatchView, StoredFiles
from headrace.broker.batches.validation import InputLimits
from headrace.broker.codec import encode
from headrace.broker.durable.names import JobRef, job_id
from headrace.broker.durable.results import ResultStore
from headrace.broker.files.store import FileStore
from headrace.broker.ingress.ingress import Ingress
from headrace.broker.messages.durable import JobResult
from headrace.broker.messages.events import Cancel
from headrace.frontend.answer_schema import CachedTokens, CompletionTokens, ExpiresAfter, Metadata, Page
from headrace.frontend.apis import HttpApi, Site
from headrace.frontend.errors import BadRequest
from headrace.frontend.generation.plan import tenant_in
from headrace.frontend.http.bodies import ReportingDecoder, decode_request
from headrace.frontend.http.exchange import PageQuery, read_body
from headrace.frontend.openapi import PAGE, in_path, json_answer, json_body, operation, stored_errors
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

Endpoint = Literal["/v1/responses", "/v1/chat/completions", "/v1/embeddings", "/v1/completions"]
BatchState = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]


class NewBatchRequest(msgspec.Struct, kw_only=True):
    """A batch to be made of an uploaded file. Beside `24h` windows from `1m` to `7d` are taken."""

    input_file_id: Annotated[str, Meta(min_length=1, max_length=128)]
    endpoint: Endpoint
    completion_window: str
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchError(msgspec.Struct, kw_only=True):
    """An error of an input file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, kw_only=True):
    """The errors of an input file."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class BatchCounts(msgspec.Struct, kw_only=True):
    """Requests of a batch by their results."""

    total: int
    completed: int
    failed: int


class BatchUsage(msgspec.Struct, kw_only=True):
    """Tokens of all requests that have a result."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: CompletionTokens
    total_tokens: int


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchState
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    usage: BatchUsage
    metadata: dict[str, str] | None

    @classmethod
    def of(cls, record: BatchRecord) -> BatchObject:
        errors = [BatchError(code=e.code, message=e.message, line=e.line, param=e.param) for e in record.errors]
        counts, tokens = record.counts, record.tokens
        return cls(
            id=record.id,
            endpoint=record.endpoint,
            model=record.model or None,
            errors=BatchErrors(data=errors) if errors else None,
            input_file_id=record.input_file_id,
            completion_window=record.completion_window,
            status="finalizing" if record.status == "expiring" else record.status,
            output_file_id=record.output_file_id,
            error_file_id=record.error_file_id,
            created_at=int(record.created),
            in_progress_at=record.in_progress_at,
            expires_at=record.expires_at,
            finalizing_at=record.finalizing_at if record.expiring_at is None else record.expiring_at,
            completed_at=record.completed_at,
            failed_at=record.failed_at,
            expired_at=record.expired_at,
            cancelling_at=record.cancelling_at,
            cancelled_at=record.cancelled_at,
            request_counts=BatchCounts(total=counts.total, completed=counts.completed, failed=counts.failed),
            usage=BatchUsage(
                input_tokens=tokens.prompt,
                input_tokens_details=CachedTokens(cached_tokens=tokens.cached),
                output_tokens=tokens.completion,
                output_tokens_details=CompletionTokens(reasoning_tokens=tokens.reasoning),
                total_tokens=tokens.prompt + tokens.completion,
            ),
            metadata=record.metadata,
        )


class BatchList(Page, kw_only=True):
    """A page of batches."""

    data: list[BatchObject]


SCHEMAS = (NewBatchRequest, BatchObject, BatchList)


class EventData(msgspec.Struct, kw_only=True):
    """The batch that an event is about."""

    id: str


class BatchEvent(msgspec.Struct, kw_only=True):
    """The end of a batch, as it is posted to a webhook."""

    id: str
    object: Literal["event"] = "event"
    created_at: int
    type: str
    data: EventData


def _paths() -> dict[str, Any]:
    errors = stored_errors()
    ended = {**errors["400"], "description": "the batch has ended"}
    full = {**errors["503"], "description": "the tenant has as many batches as it may have"}

    def asking(summary: str, answer: str, also: dict[str, Any] | None = None) -> dict[str, Any]:
        return operation(summary, {"200": json_answer("the answer", answer), **errors, **(also or {})})

    create = asking("Answer the requests of a file", "BatchObject", {"429": full})
    return {
        "/v1/batches": {
            "post": {**create, "requestBody": json_body("NewBatchRequest")},
            "get": {**asking("List batches", "BatchList"), "parameters": PAGE},
        },
        "/v1/batches/{id}": {"parameters": [in_path("id")], "get": asking("A batch", "BatchObject")},
        "/v1/batches/{id}/cancel": {
            "parameters": [in_path("id")],
            "post": asking("Cancel a batch", "BatchObject", {"409": ended}),
        },
    }


# Posts the ends of batches to the operator's webhook, signed by the rules of Standard Webhooks.
#
# A call is one POST over one connection, of which only the status is read. The owner of the batch repeats it, with the same
# id.

log = structlog.get_logger()

CALL_S = 15.0
SECRET_MARK = "whsec_"  # noqa: S105  # before a secret in base64, as Standard Webhooks has it


class BatchWebhook:
    """The receiver of events about batches."""

    def __init__(self, url: str, secret: str = "", *, wall: Callable[[], float] = time.time) -> None:
        """`secret` signs the events; empty: they are not signed. Raises ValueError for a secret that is none."""
        self._url = url
        self._tls = ssl.create_default_context() if url.lower().startswith("https:") else None
        self._key = key_of(secret)
        self._wall = wall

    async def send(self, record: BatchRecord) -> bool:
        """Post the event of a batch's end. Returns True if the receiver answered with a status of 2xx."""
        event = event_of(record)
        try:
            async with asyncio.timeout(CALL_S):
                status = await self._post(event.id, msgspec.json.encode(event))
        except (OSError, TimeoutError, ValueError) as error:
            log.warning("webhook.failed", batch=record.id, event_type=event.type, error=str(error) or type(error).__name__)
            return False
        if not 200 <= status < 300:
            log.warning("webhook.refused", batch=record.id, event_type=event.type, status=status)
        return 200 <= status < 300

    async def _post(self, event_id: str, body: bytes) -> int:
        at = int(self._wall())
        headers = {"Content-Type": "application/json", "webhook-id": event_id, "webhook-timestamp": str(at)}
        if self._key:
            headers["webhook-signature"] = signature(self._key, event_id, at, body)
        async with ask("POST", self._url, headers=headers, body=body, tls=self._tls) as answer:
            return answer.status


def event_of(record: BatchRecord) -> BatchEvent:
    """Return the event of a batch's end. Its id is the same each time."""
    ended_at = getattr(record, f"{record.status}_at")
    digest = hashlib.sha256(f"{record.id} {record.status}".encode()).hexdigest()[:32]
    kind = f"batch.{record.status}"
    return BatchEvent(id=f"evt_{digest}", created_at=ended_at or 0, type=kind, data=EventData(id=record.id))


def key_of(secret: str) -> bytes:
    if not secret.startswith(SECRET_MARK):
        return secret.encode()
    try:
        return base64.b64decode(secret.removeprefix(SECRET_MARK), validate=True)
    except binascii.Error:
        raise ValueError("webhook_secret is not base64 behind whsec_") from None


def signature(key: bytes, event_id: str, at: int, body: bytes) -> str:
    """Return the header that signs an event."""
    made = hmac.new(key, f"{event_id}.{at}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(made).decode()}"


# Puts together what a frontend needs to carry batches on and to serve their routes.

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
    pool = ingress.models.pool_of(model)
    return 0 if pool is None else sum(max(1, member.slots) for member in ingress.members.serving_workers(pool))


class _IngressLeases:
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


BASE = "/v1/batches"

_new = ReportingDecoder(NewBatchRequest)


class BatchRoutes:
    def __init__(self, batches: Batches, settings: FrontendSettings) -> None:
        self._batches = batches
        self._settings = settings

    def routes(self) -> list[Route]:
        return [
            Route(BASE, self.create, methods=["POST"]),
            Route(BASE, self.list, methods=["GET"]),
            Route(f"{BASE}/{{id}}", self.one, methods=["GET"]),
            Route(f"{BASE}/{{id}}/cancel", self.cancel, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        """Make a batch of an uploaded file. Raises BadRequest, BatchError, or a JetStreamError."""
        asked = await decode_request(_new, await read_body(request, self._settings))
        try:
            window_s(asked.completion_window)
        except ValueError as error:
            raise BadRequest(str(error), param="completion_window") from None
        new = NewBatch(
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            metadata=asked.metadata,
            output_expires_s=asked.output_expires_after.seconds if asked.output_expires_after is not None else None,
        )
        return _json(BatchObject.of(await self._batches.create(tenant_in(request), new)))

    async def list(self, request: Request) -> Response:
        """List batches, the newest first unless `order` says otherwise. Raises BadRequest."""
        query = PageQuery.of(request)
        records = (await self._batches.list(tenant_in(request)))[::-1]
        page, more = query.page(records, [record.id for record in records])
        ends = (page[0].id, page[-1].id) if page else (None, None)
        return _json(BatchList(data=[BatchObject.of(r) for r in page], first_id=ends[0], last_id=ends[1], has_more=more))

    async def one(self, request: Request) -> Response:
        """Describe a batch. Raises BatchUnknown."""
        return _json(BatchObject.of(await self._batches.get(tenant_in(request), request.path_params["id"])))

    async def cancel(self, request: Request) -> Response:
        """Begin to cancel a batch. Raises BatchUnknown, BatchChangeRefused."""
        return _json(BatchObject.of(await self._batches.cancel(tenant_in(request), request.path_params["id"])))


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _mount(site: Site) -> None:
    if site.stores.batches is not None:
        site.routes += BatchRoutes(site.stores.batches, site.settings).routes()


API = HttpApi(mount=_mount, paths=_paths, types=SCHEMAS)
