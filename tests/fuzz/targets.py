"""The decoders that read bytes of strangers, each as a function that raises for a bug and for nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import xxhash

from headrace.broker.codec import (
    decode,
    decode_ingress_control,
    decode_request,
    decode_worker_control,
    parse_job_headers,
    parse_prefill_header,
)
from headrace.broker.durable.errors import JobMalformed
from headrace.broker.durable.results import decode_result
from headrace.broker.durable.stored_job import parse_job
from headrace.broker.errors import WireError
from headrace.broker.messages.durable import StreamEntry
from headrace.broker.messages.events import JobEvents, KvMessage, LoadReport
from headrace.broker.messages.frames import Frame
from headrace.broker.messages.members import WorkerMember
from headrace.broker.messages.prefill import PrefillJob
from headrace.broker.messages.requests import Generation, Pooling
from headrace.broker.models.cards import ModelCard
from headrace.broker.torch_tensors import TensorUnreadable, read_matrix
from headrace.frontend.anthropic.schema import MessagesRequest
from headrace.frontend.chat_schema import ChatRequest, CompletionRequest
from headrace.frontend.durable_api import parse_event_id
from headrace.frontend.errors import FrontendError
from headrace.frontend.http.bodies import check_shape_now, decode_body
from headrace.frontend.prompts.media_parts import sniff
from headrace.frontend.prompts.templates import ChatTemplate
from headrace.frontend.responses.schema import ResponsesRequest
from headrace.frontend.settings import FrontendSettings
from headrace.router.errors import RouterError
from headrace.router.index import snapshot as snapshot_format

SETTINGS = FrontendSettings()
BODIES = [msgspec.json.Decoder(kind) for kind in (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest)]
MESSAGES = (Frame, JobEvents, LoadReport, StreamEntry, PrefillJob, Generation, Pooling, WorkerMember, ModelCard)


def _refused(work: Callable[[], Any], *errors: type[Exception]) -> None:
    with contextlib.suppress(*errors):
        work()


def body(data: bytes) -> None:
    """The body of an HTTP request."""
    try:
        check_shape_now(data, SETTINGS)
    except FrontendError:
        return
    for decoder in BODIES:
        _refused(lambda decoder=decoder: decode_body(decoder, data), FrontendError)  # type: ignore[misc]


def resume_id(data: bytes) -> None:
    """The header `Last-Event-ID`."""
    _refused(lambda: parse_event_id(data.decode("latin-1")), FrontendError)


def message(data: bytes) -> None:
    """A msgpack message of any kind."""
    for read in (decode_request, decode_ingress_control, decode_worker_control):
        _refused(lambda read=read: read(data), WireError)  # type: ignore[misc]
    for kind in MESSAGES:
        _refused(lambda kind=kind: decode(kind, data), WireError)  # type: ignore[misc]


def cache_event(data: bytes) -> None:
    """A cache event of an engine."""
    _refused(lambda: decode(KvMessage, data), WireError)  # type: ignore[arg-type]


def headers(data: bytes) -> None:
    """The headers of a stored request."""
    text = data.decode("latin-1")
    for name in ("Hr-Attempt", "Hr-History"):
        _refused(lambda name=name: parse_job_headers({name: text}), WireError)  # type: ignore[misc]
    _refused(lambda: parse_prefill_header({"Hr-Prefill": text}), WireError)


def stored_job(data: bytes) -> None:
    """A job of a direct publisher, and a result."""
    _refused(lambda: parse_job(data, {}, tenant="t", seq=1, stored=1.0), JobMalformed)
    decode_result(data)


def snapshot(data: bytes) -> None:
    """A snapshot of the prefix index: as it comes, and with the digest and the source that a reader expects."""
    try:
        header, _ = snapshot_format.read_header(data)
    except RouterError:
        return
    for whole in (data, data + xxhash.xxh3_128_digest(data)):
        _refused(lambda whole=whole: snapshot_format.decode_snapshot(whole, header.source), RouterError)  # type: ignore[misc]


def template(data: bytes) -> None:
    """A chat template, compiled and rendered."""
    source = data.decode("utf-8", "replace")[:2000]
    messages = [{"role": "user", "content": "hi"}]
    _refused(lambda: ChatTemplate(source, names={}, deadline_s=0.5).render(messages), FrontendError)


def media(data: bytes) -> None:
    """The first bytes of an image, a video or a sound."""
    sniff(data)


def known_type(data: bytes) -> str:
    """Return the type of an item of media. Raises ValueError where it is none."""
    found = sniff(data)
    if found is None:
        raise ValueError("it begins as no medium does")
    return found


def prompt_embeds(data: bytes) -> None:
    """A tensor as `torch.save` writes it."""
    _refused(lambda: read_matrix(data), TensorUnreadable)


READERS: dict[str, dict[str, Callable[[bytes], object]]] = {
    "body": {str(decoder.type): lambda data, decoder=decoder: decode_body(decoder, data) for decoder in BODIES},  # type: ignore[misc]
    "resume_id": {"id": lambda data: parse_event_id(data.decode("latin-1"))},
    "message": {
        **{kind.__name__: lambda data, kind=kind: decode(kind, data) for kind in MESSAGES},  # type: ignore[misc]
        **{read.__name__: read for read in (decode_request, decode_ingress_control, decode_worker_control)},
    },
    "cache_event": {"KvMessage": lambda data: decode(KvMessage, data)},  # type: ignore[arg-type]
    "headers": {
        **{
            name: lambda data, name=name: parse_job_headers({name: data.decode("latin-1")})  # type: ignore[misc]
            for name in ("Hr-Attempt", "Hr-History")
        },
        "Hr-Prefill": lambda data: parse_prefill_header({"Hr-Prefill": data.decode("latin-1")}),
    },
    "stored_job": {"job": lambda data: parse_job(data, {}, tenant="t", seq=1, stored=1.0)},
    "snapshot": {"whole": lambda data: snapshot_format.decode_snapshot(data, snapshot_format.read_header(data)[0].source)},
    "template": {
        "rendered": lambda data: ChatTemplate(data.decode(), names={}, deadline_s=5.0).render(
            [{"role": "user", "content": "hi"}]
        )
    },
    "media": {"type": known_type},
    "prompt_embeds": {"tensor": read_matrix},
}
"""What each target has read, by name: a corpus in which a reader takes nothing shows mutations of the beginning only."""

TARGETS: dict[str, Callable[[bytes], None]] = {
    one.__name__: one
    for one in (body, resume_id, message, cache_event, headers, stored_job, snapshot, template, media, prompt_embeds)
}
