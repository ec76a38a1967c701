"""Serves the routes over videos that are stored: list, read, fetch the file, delete."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.frontend.generation.tenant import tenant_in
from headrace.frontend.http.field_checks import unsupported
from headrace.frontend.http.page_query import PageQuery
from headrace.frontend.videos.api import PATH
from headrace.frontend.videos.schema import DeletedVideo, VideoList
from headrace.frontend.videos.stored_videos import MAX_ID, StoredVideos, VideoUnknown


class VideoRoutes:
    """The routes over the videos of a tenant. `videos` None = nothing is stored here."""

    def __init__(self, videos: StoredVideos | None) -> None:
        self._videos = videos

    def routes(self) -> list[Route]:
        """Return the Starlette routes."""
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
