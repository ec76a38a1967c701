"""Plans videos: the job of a prompt, which a carrier runs, its result, and the answer to the client that asks for it."""

from __future__ import annotations

import asyncio
import binascii
import secrets
import struct
import time
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.broker.durable.names import new_name
from headrace.broker.durable.stored_job import NewJob
from headrace.broker.errors import BrokerError
from headrace.broker.jobs import Job
from headrace.broker.messages.frames import Finish, Row
from headrace.broker.spill import ResultObjects
from headrace.frontend.admin import NotServed
from headrace.frontend.apis import HttpApi, Site
from headrace.frontend.durable_api import ConnectionEvents
from headrace.frontend.errors import BadRequest, FrontendError
from headrace.frontend.generation.plan import Plan, tenant_of
from headrace.frontend.generation.sse import StreamWriter, UsageCounter, WholeWriter
from headrace.frontend.http.bodies import ReportingDecoder, check_shape, decode_request, explain, unsupported
from headrace.frontend.http.exchange import DisconnectWatch, HttpExchange
from headrace.frontend.http.multipart import FileBegin, FileData, FormField, FormReader
from headrace.frontend.images import PictureApi, file_of
from headrace.frontend.openapi import PAGE, all_errors, in_path, json_answer, operation, stored_errors
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.stored_videos import (
    PATH,
    PREFIX,
    DeletedVideo,
    StoredVideos,
    VideoAnswer,
    VideoList,
    VideoObject,
    VideoRecord,
    VideoRoutes,
)
from headrace.jetstream.subjects import slug

MOST_SECONDS = 120


class VideoRequest(msgspec.Struct, kw_only=True):
    """A request, as JSON or as the fields of a form. `None` always means: not given."""

    prompt: Annotated[str, Meta(min_length=1, max_length=32_000)]
    model: Annotated[str, Meta(min_length=1, max_length=512)] | None = None  # None = the only one that is served
    seconds: int | str | None = None  # a whole number from 1 to MOST_SECONDS, which clients send as a text
    size: str | None = None  # "1280x720", or "auto"
    input_reference: Any = None  # refused by name
    user: str | None = None  # without effect
    # Beyond OpenAI's:
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    negative_prompt: Annotated[str, Meta(max_length=32_000)] | None = None
    num_inference_steps: Annotated[int, Meta(ge=1, le=1000)] | None = None
    guidance_scale: Annotated[float, Meta(ge=0, le=100)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    service_tier: str | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None  # seconds


SCHEMAS: tuple[Any, ...] = (VideoRequest, VideoObject, VideoList, DeletedVideo)


REFERENCE = "input_reference"
MOST_FIELD_BYTES = 128 * 1024  # four bytes for each character of the longest prompt

_decoder = ReportingDecoder(VideoRequest)


async def read_request(body: bytes, exchange: HttpExchange, settings: FrontendSettings) -> VideoRequest:
    """Decode a body by its content type. Raises BadRequest, which names the parameter."""
    content_type = exchange.header(b"content-type") or ""
    if content_type.partition(";")[0].strip().lower() == "multipart/form-data":
        request = read_form(body, content_type)
    else:
        await check_shape(body, settings)
        request = await decode_request(_decoder, body)
    if request.input_reference is not None:
        raise _no_reference()
    return request


def read_form(body: bytes, content_type: str) -> VideoRequest:
    """Parse a whole form. Raises BadRequest."""
    reader = FormReader(content_type, REFERENCE, needs_file=False, most_field_bytes=MOST_FIELD_BYTES)
    fields: dict[str, Any] = {}
    for event in reader.feed(body):
        match event:
            case FormField(name, value):
                fields[name] = value
            case FileBegin() | FileData():
                raise _no_reference()
    reader.finish()
    _decoder.report(fields.keys() - set(VideoRequest.__struct_fields__))
    try:
        return msgspec.convert(fields, VideoRequest, strict=False)
    except msgspec.ValidationError as error:
        raise explain(str(error)) from None


def _no_reference() -> BadRequest:
    return unsupported(REFERENCE, "is not supported here: videos are made from text alone")


MOST_BYTES = 64 << 20  # of a file: a frontend has it in memory several times while it stores the result


class VideoTooLarge(FrontendError, status=500, code="video_too_large"):
    """The worker's file is larger than a result may be."""


class VideoWriter(WholeWriter):
    """Takes the one file, and fetches one that was too large for a frame."""

    def __init__(self, created: int, counter: UsageCounter, results: ResultObjects | None) -> None:
        self.open = 1
        self.unsettled = True
        self._created = created
        self._counter = counter
        self._results = results
        self._end: Finish | None = None
        self._body = b""

    def take(self, rows: list[Row]) -> None:
        for row in rows:
            if row.fin is not None:
                self._end = row.fin
                self._counter.end(0, row.fin)
                self.open = 0

    async def settle(self) -> None:
        """Fetch what is missing and make the body. Raises BrokerError, VideoTooLarge."""
        if self._end is None:
            raise BrokerError("a video has ended without a file")
        spill = self._end.spill
        size = len(self._end.vector) if spill is None else spill.size
        if size > MOST_BYTES:
            raise VideoTooLarge(f"the video has {size} bytes; a result has at most {MOST_BYTES}")
        file = await file_of(self._end, self._results)
        self._body = await asyncio.to_thread(_answer, self._created, file)

    def body(self) -> bytes:
        return self._body


class VideoEvents(StreamWriter):
    """Makes no events: a video's job is a durable stream only so that its beginning is seen."""

    def __init__(self, whole: VideoWriter) -> None:
        self.open = 1
        self.unsettled = True
        self._whole = whole

    def events(self, rows: list[Row]) -> bytes:
        if any(row.fin is not None for row in rows):
            self.open = 0
        return b""

    async def settle(self) -> None:
        """Make the whole answer. Raises as `VideoWriter.settle`."""
        await self._whole.settle()

    def closing(self) -> bytes:
        return b""

    def failure(self, error: FrontendError) -> bytes:
        """Return nothing: the result has the error."""
        return b""


def _answer(created: int, file: bytes) -> bytes:
    width, height, seconds = measures(file)
    text = binascii.b2a_base64(file, newline=False).decode()
    return msgspec.json.encode(VideoAnswer(created=created, size=f"{width}x{height}", seconds=f"{seconds:g}", b64_json=text))


def measures(file: bytes) -> tuple[int, int, float]:
    """Return width, height and seconds of an MP4 file; zeros for what it does not say."""
    movie = _inside(memoryview(file), b"moov")
    head, track = _inside(movie, b"mvhd"), _inside(_inside(movie, b"trak"), b"tkhd")
    seconds = 0.0
    if len(head) >= 32:
        scale, duration = struct.unpack_from(">IQ", head, 20) if head[0] else struct.unpack_from(">2I", head, 12)
        seconds = duration / scale if scale else 0.0
    if len(track) < 84:
        return 0, 0, seconds
    width, height = struct.unpack_from(">2I", track, len(track) - 8)
    return width >> 16, height >> 16, seconds


def _inside(boxes: memoryview, kind: bytes) -> memoryview:
    """Return the content of the first box of a kind, empty if there is none."""
    at = 0
    while at + 8 <= len(boxes):
        size, found = struct.unpack_from(">I4s", boxes, at)
        body = 8
        if size == 1 and at + 16 <= len(boxes):
            (size,), body = struct.unpack_from(">Q", boxes, at + 8), 16
        if size < body:
            break
        if found == kind:
            return boxes[at + body : at + size]
        at += size
    return boxes[:0]


class VideoApi(PictureApi):
    kind = "video"

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        """Decode the body of a stored job and plan it. Raises a FrontendError or an AdmissionError."""
        request = await read_request(body, exchange, self.settings)
        job = await self.job(request, exchange)
        counter = UsageCounter([job.prompt_tokens], 1)
        whole = VideoWriter(exchange.created, counter, self.results)
        return Plan([job], VideoEvents(whole), counter, whole=whole) if exchange.durable else Plan([job], whole, counter)

    async def job(self, request: VideoRequest, exchange: HttpExchange) -> Job:
        """Check a request and make its job. Raises as `plan`."""
        return await self.make(request, exchange, seed=request.seed or 0, seconds=seconds_of(request.seconds))


class VideoCreation:
    """Answers `POST /v1/videos`: a request becomes a stored job, and its client gets the video as it stands."""

    def __init__(self, api: VideoApi, videos: StoredVideos | None, settings: FrontendSettings) -> None:
        """`videos` None = nothing is stored here, so no video can be made."""
        self._api = api
        self._videos = videos
        self._settings = settings
        self.error_form = FrontendError.body

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        """Decode a body, check it as its job will be checked, and store the job when the plan is run.

        Raises a FrontendError or an AdmissionError.
        """
        if self._videos is None:
            raise NotServed(f"{PATH}: this frontend stores no jobs")
        request = await read_request(body, exchange, self._settings)
        checked = await self._api.job(request, exchange)
        tenant, now = tenant_of(exchange), time.time()
        # Chosen here, so that a video that has to be made again is the same one.
        request = msgspec.structs.replace(
            request, model=checked.card.model, seed=secrets.randbits(31) if request.seed is None else request.seed
        )
        job = NewJob(
            name=new_name(tenant),
            tenant=tenant,
            model_slug=slug(checked.card.model),
            endpoint=PATH,
            body=msgspec.json.encode(request),
            deadline=now + checked.deadline_s,
            request_class="hi" if checked.request_class == "hi" else "std",
            durable=True,
        )
        video = VideoObject(
            id=f"{PREFIX}{job.name}",
            model=checked.card.model,
            prompt=request.prompt,
            created_at=int(now),
            seconds="" if request.seconds is None else str(seconds_of(request.seconds)),
            size=request.size or "auto",
        )
        record = VideoRecord(video=video, job=job.name, until=job.deadline)
        detached = partial(_create, self._videos, job, record)
        return Plan([], ConnectionEvents(), UsageCounter([], 1), detached)


async def _create(
    videos: StoredVideos, job: NewJob, record: VideoRecord, exchange: HttpExchange, watch: DisconnectWatch
) -> None:
    await videos.create(job.tenant, record, job)
    watch.stop()
    await exchange.send_json(msgspec.json.encode(record.video))


def seconds_of(given: int | str | None) -> int | None:
    """Return the length of a video; None is the model's own. Raises BadRequest."""
    if given is None:
        return None
    text = str(given)
    if not (text.isascii() and text.isdigit() and len(text) < 4 and 1 <= int(text) <= MOST_SECONDS):
        raise BadRequest(f"seconds must be a whole number from 1 to {MOST_SECONDS}, got {text[:100]!r}", param="seconds")
    return int(text)


def _mount(site: Site) -> None:
    records, jobs = site.stores.records, site.stores.jobs
    videos = StoredVideos(records, jobs) if records is not None and jobs is not None else None
    api = VideoApi(site.model_cache, site.settings, site.stores.results)
    site.generate(PATH, VideoCreation(api, videos, site.settings), job=api, takes_form=True)
    site.routes += VideoRoutes(videos).routes()


def _paths() -> dict[str, Any]:
    schema = {"schema": {"$ref": "#/components/schemas/VideoRequest"}}
    body = {"required": True, "content": {"application/json": schema, "multipart/form-data": schema}}
    stored = stored_errors()
    file = {"video/mp4": {"schema": {"type": "string", "format": "binary"}}}
    variant = {"name": "variant", "in": "query", "schema": {"type": "string", "enum": ["video"]}}
    gone = {**stored["400"], "description": "the file is not stored any more"}
    created = {"200": json_answer("the video as it stands", "VideoObject"), **all_errors()}
    page = {"200": json_answer("a page of videos", "VideoList"), **stored}
    return {
        PATH: {
            "post": {**operation("Make a video of a prompt", created), "requestBody": body},
            "get": {**operation("List videos", page), "parameters": PAGE},
        },
        f"{PATH}/{{id}}": {
            "parameters": [in_path("id")],
            "get": operation("A video", {"200": json_answer("the video", "VideoObject"), **stored}),
            "delete": operation("Delete a video", {"200": json_answer("the deleted video", "DeletedVideo"), **stored}),
        },
        f"{PATH}/{{id}}/content": {
            "parameters": [in_path("id"), variant],
            "get": operation(
                "The file of a video", {"200": {"description": "the file", "content": file}, "410": gone, **stored}
            ),
        },
    }


API = HttpApi(mount=_mount, paths=_paths, types=SCHEMAS)
