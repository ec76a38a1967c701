"""Plans videos: the job of a prompt, which a carrier runs, and the answer to the client that asks for it."""

from __future__ import annotations

import secrets
import time
from functools import partial

import msgspec

from headrace.broker.durable.client_names import new_name
from headrace.broker.durable.publisher import NewJob
from headrace.broker.jobs import Job
from headrace.frontend.admin.unserved import NotServed
from headrace.frontend.errors import BadRequest, FrontendError
from headrace.frontend.generation.plan import Plan
from headrace.frontend.generation.tenant import tenant_of
from headrace.frontend.http.http_exchange import DisconnectWatch, HttpExchange
from headrace.frontend.images.picture_jobs import PictureJobs
from headrace.frontend.images.writer import Results
from headrace.frontend.jobs.stream_writer import ConnectionEvents
from headrace.frontend.prompts.model_cache import ModelCache
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.videos.form import read_request
from headrace.frontend.videos.schema import MOST_SECONDS, VideoObject, VideoRecord, VideoRequest
from headrace.frontend.videos.stored_videos import PREFIX, StoredVideos
from headrace.frontend.videos.writer import VideoEvents, VideoWriter
from headrace.frontend.writers.usage import UsageCounter
from headrace.jetstream.subjects import slug

PATH = "/v1/videos"


class VideoApi:
    """Plans the jobs of videos."""

    def __init__(self, model_cache: ModelCache, settings: FrontendSettings, results: Results | None) -> None:
        self._jobs = PictureJobs("video", model_cache, settings)
        self._settings = settings
        self._results = results
        self.error_form = FrontendError.body

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        """Decode the body of a stored job and plan it. Raises a FrontendError or an AdmissionError."""
        request = await read_request(body, exchange, self._settings)
        job = await self.job(request, exchange)
        counter = UsageCounter([job.prompt_tokens], 1)
        whole = VideoWriter(exchange.created, counter, self._results)
        return Plan([job], VideoEvents(whole), counter, whole=whole) if exchange.durable else Plan([job], whole, counter)

    async def job(self, request: VideoRequest, exchange: HttpExchange) -> Job:
        """Check a request and make its job. Raises as `plan`."""
        return await self._jobs.make(request, exchange, seed=request.seed or 0, seconds=seconds_of(request.seconds))


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
