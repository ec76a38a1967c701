"""Keeps videos, and serves their routes: a record of each, and the job that makes it, whose result has the file."""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import time
from typing import Any, Literal

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.base.errors import HeadraceError
from headrace.broker.durable.stored_job import NewJob
from headrace.broker.errors import DeadlineExceeded
from headrace.broker.messages.durable import JobResult
from headrace.frontend.answer_schema import Page
from headrace.frontend.errors import FrontendError
from headrace.frontend.generation.plan import tenant_in
from headrace.frontend.http.bodies import unsupported
from headrace.frontend.http.exchange import PageQuery
from headrace.frontend.ports import RecordPort, StoredJobPort
from headrace.jetstream.errors import ObjectNotFound

Status = Literal["queued", "in_progress", "completed", "failed"]


class VideoFault(msgspec.Struct, kw_only=True, frozen=True):
    """The reason why a video was not made."""

    code: str
    message: str


class VideoObject(msgspec.Struct, kw_only=True, frozen=True):
    """A video and how it stands. `size` is "auto" until a model that chose it has made the video."""

    id: str
    object: Literal["video"] = "video"
    model: str
    prompt: str
    status: Status = "queued"
    progress: int = 0  # percent: 0 until it is completed, and then 100
    created_at: int
    completed_at: int | None = None
    expires_at: int | None = None  # of the file, once there is one
    seconds: str = ""
    size: str = "auto"
    remixed_from_video_id: str | None = None
    error: VideoFault | None = None


class VideoRecord(msgspec.Struct, kw_only=True, frozen=True):
    """A video as it is stored. `job` is the token of its job, which ends before `until` (Unix time)."""

    video: VideoObject
    job: str
    until: float


class VideoList(Page, kw_only=True):
    """A page of videos."""

    data: list[VideoObject]


class DeletedVideo(msgspec.Struct, kw_only=True):
    """A video that was deleted."""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: bool = True


class VideoAnswer(msgspec.Struct, kw_only=True):
    """The result of a video's job: an MP4 file in base64, with its size and length."""

    created: int
    size: str
    seconds: str
    b64_json: str


log = structlog.get_logger()

PATH = "/v1/videos"
KIND = "video"
PREFIX = "video_"
MAX_ID = 160
KEPT_S = 16 * 86_400.0  # life of a result, as the topology has it
END_S = 30.0  # from the cancellation of a job to its end
READS_AT_ONCE = 16

_record = msgspec.json.Decoder(VideoRecord)
_answer = msgspec.json.Decoder(VideoAnswer)


class VideoUnknown(FrontendError, status=404, code="video_not_found"):
    """No such video is stored for this tenant."""


class VideoNotReady(FrontendError, status=404, code="video_not_ready"):
    """The video has no file, or none yet."""


class VideoGone(FrontendError, status=410, code="video_expired"):
    """The file of the video is not stored any more."""


class StoredVideos:
    """The videos of all tenants. A record says how a video ended once it was read after the end of its job."""

    def __init__(self, records: RecordPort, jobs: StoredJobPort) -> None:
        self._records = records
        self._jobs = jobs

    async def create(self, tenant: str, record: VideoRecord, job: NewJob) -> None:
        """Store a queued video, and then its job. Raises ResponseNotStored, an AdmissionError."""
        await self._records.put(KIND, tenant, record.video.id, msgspec.json.encode(record))
        try:
            await self._jobs.publish(job)
        except HeadraceError:
            with contextlib.suppress(HeadraceError):
                await self._records.delete(KIND, tenant, record.video.id)
            raise

    async def get(self, tenant: str, name: str) -> VideoObject:
        """Return a video as it stands. Raises VideoUnknown, a JetStreamError."""
        return await self._current(tenant, await self._read(tenant, name))

    async def all(self, tenant: str) -> list[VideoObject]:
        """Return the videos of a tenant as they are stored, the oldest first. Raises a JetStreamError."""
        found = [_record.decode(value).video for value in await self._records.list(KIND, tenant)]
        return sorted(found, key=lambda video: (video.created_at, video.id))

    async def current(self, tenant: str, videos: list[VideoObject]) -> list[VideoObject]:
        """Return some videos as they stand, without those that were deleted meanwhile. Raises a JetStreamError."""
        gate = asyncio.Semaphore(READS_AT_ONCE)

        async def one(video: VideoObject) -> VideoObject | None:
            if video.status in ("completed", "failed"):
                return video
            async with gate:
                with contextlib.suppress(VideoUnknown):
                    return await self.get(tenant, video.id)
                return None

        return [video for video in await asyncio.gather(*map(one, videos)) if video is not None]

    async def content(self, tenant: str, name: str) -> bytes:
        """Return the file of a video. Raises VideoUnknown, VideoNotReady, VideoGone, a JetStreamError."""
        record = await self._read(tenant, name)
        video = await self._current(tenant, record)
        if video.status != "completed":
            raise VideoNotReady(f"the video {name!r} is {video.status}; only a completed one has a file", param="video_id")
        result = await self._jobs.known(tenant, record.job)
        answer = await self._answer(result) if result is not None else None
        if answer is None:
            raise VideoGone(f"the file of the video {name!r} is not stored any more", param="video_id")
        return await asyncio.to_thread(binascii.a2b_base64, answer.b64_json)

    async def delete(self, tenant: str, name: str) -> None:
        """Delete a video, and cancel one that is still made. Raises VideoUnknown, DeadlineExceeded, a JetStreamError."""
        record = await self._read(tenant, name)
        result = await self._jobs.known(tenant, record.job)
        if result is None:
            try:
                async with asyncio.timeout(END_S):
                    await self._jobs.cancel(tenant, record.job)
                    result = await self._jobs.result(tenant, record.job)
            except TimeoutError:
                raise DeadlineExceeded(f"video {name!r} could not be cancelled in time; it may still be") from None
        await self._jobs.drop(result)
        await self._records.delete(KIND, tenant, name)

    async def _read(self, tenant: str, name: str) -> VideoRecord:
        value = await self._records.get(KIND, tenant, name) if len(name) <= MAX_ID else None
        if value is None:
            raise VideoUnknown(f"there is no video {name[:MAX_ID]!r}", param="video_id")
        return _record.decode(value)

    async def _current(self, tenant: str, record: VideoRecord) -> VideoObject:
        video = record.video
        if video.status in ("completed", "failed"):
            return video
        result = await self._jobs.known(tenant, record.job)
        if result is not None:
            return await self._close(tenant, await self._ended(video, result))
        if time.time() > record.until + KEPT_S:
            fault = VideoFault(code="video_expired", message="nobody asked after this video while its result was stored")
            return await self._close(tenant, msgspec.structs.replace(video, status="failed", error=fault))
        begun = await self._jobs.begun(tenant, record.job)
        return msgspec.structs.replace(video, status="in_progress") if begun else video

    async def _ended(self, video: VideoObject, result: JobResult) -> VideoObject:
        if result.status != "done":
            return msgspec.structs.replace(video, status="failed", error=await self._fault(result))
        answer = await self._answer(result)
        found: dict[str, Any] = {} if answer is None else {"size": answer.size, "seconds": answer.seconds}
        return msgspec.structs.replace(
            video,
            status="completed",
            progress=100,
            completed_at=int(result.finished),
            expires_at=int(result.finished + KEPT_S),
            **found,
        )

    async def _close(self, tenant: str, video: VideoObject) -> VideoObject:
        """Store how a video has ended, unless it was deleted meanwhile, and return it."""
        log.info("video.closed", video=video.id, status=video.status)
        with contextlib.suppress(HeadraceError):  # the next reader tries again
            await self._records.change(
                KIND,
                tenant,
                video.id,
                lambda value: msgspec.json.encode(msgspec.structs.replace(_record.decode(value), video=video)),
            )
        return video

    async def _answer(self, result: JobResult) -> VideoAnswer | None:
        """Return the answer of a job, None if it is not stored any more. Raises a JetStreamError."""
        try:
            response = await self._jobs.response(result)
        except ObjectNotFound:
            return None
        return None if response is None else await asyncio.to_thread(_answer.decode, response.body)

    async def _fault(self, result: JobResult) -> VideoFault:
        if result.error is not None:
            return VideoFault(code=result.error.code, message=result.error.message)
        response = await self._jobs.response(result)
        refusal = _Refusal() if response is None else msgspec.json.decode(response.body, type=_Refusal)
        return VideoFault(
            code=refusal.error.code or "server_error", message=refusal.error.message or "the video could not be made"
        )


class _Words(msgspec.Struct):
    code: str | None = None
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Words = msgspec.field(default_factory=_Words)


class VideoRoutes:
    """The routes over the videos of a tenant. `videos` None = nothing is stored here."""

    def __init__(self, videos: StoredVideos | None) -> None:
        self._videos = videos

    def routes(self) -> list[Route]:
        return [
            Route(PATH, self.list, methods=["GET"]),
            Route(f"{PATH}/{{id}}", self.one, methods=["GET", "DELETE"]),
            Route(f"{PATH}/{{id}}/content", self.content, methods=["GET"]),
        ]

    async def list(self, request: Request) -> Response:
        """List videos, the newest first unless `order` says otherwise. Raises BadRequest, a JetStreamError."""
        query, tenant = PageQuery.of(request), tenant_in(request)
        videos = await self._videos.all(tenant) if self._videos is not None else []
        page, more = query.page(videos, [video.id for video in videos])
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        data = await self._videos.current(tenant, page) if self._videos is not None else []
        return _json(VideoList(data=data, first_id=first, last_id=last, has_more=more))

    async def one(self, request: Request) -> Response:
        """Describe a video, or delete it. Raises VideoUnknown, a JetStreamError."""
        name, tenant, videos = request.path_params["id"], tenant_in(request), self._videos
        if videos is None:
            raise VideoUnknown(f"there is no video {name[:MAX_ID]!r}", param="video_id")
        if request.method == "DELETE":
            await videos.delete(tenant, name)
            return _json(DeletedVideo(id=name))
        return _json(await videos.get(tenant, name))

    async def content(self, request: Request) -> Response:
        """Answer with the file. Raises VideoUnknown, VideoNotReady, VideoGone, BadRequest, a JetStreamError."""
        variant = request.query_params.get("variant", "video")
        if variant != "video":
            raise unsupported("variant", f"{variant[:100]!r} is not made here: only video is")
        name = request.path_params["id"]
        if self._videos is None:
            raise VideoUnknown(f"there is no video {name[:MAX_ID]!r}", param="video_id")
        file = await self._videos.content(tenant_in(request), name)
        return Response(file, media_type="video/mp4", headers={"content-disposition": f'attachment; filename="{name}.mp4"'})


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
