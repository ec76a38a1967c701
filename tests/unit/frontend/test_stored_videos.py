"""The routes over stored videos: how one stands, its file, lists and deletion, and that no tenant sees another's."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.broker.messages.durable import JobResult, ResultError
from headrace.broker.messages.frames import JobFault
from headrace.frontend import stored_videos
from headrace.frontend.stored_videos import VideoRecord
from tests.support.frontend.fakes import Call
from tests.support.frontend.videos import FILE, Studio


async def made(studio: Studio, **tenant: str) -> str:
    """Return the id of a new video, which waits."""
    call = await studio.ask(prompt="A river", **({"headers": tenant} if tenant else {}))
    assert call.status == 200, call.body
    return str(call.json()["id"])


async def test_a_video_is_queued_then_in_progress_then_completed_with_a_file() -> None:
    studio = Studio()
    video = await made(studio)
    assert (await studio.get(video)).json()["status"] == "queued"
    early = await studio.get(f"{video}/content")
    assert (early.status, early.error["code"]) == (404, "video_not_ready")
    studio.begin()
    seen = (await studio.get(video)).json()
    assert (seen["status"], seen["progress"]) == ("in_progress", 0)
    await studio.carry()
    seen = (await studio.get(video)).json()
    assert (seen["status"], seen["progress"], seen["size"], seen["seconds"]) == ("completed", 100, "96x64", "2")
    assert seen["expires_at"] - seen["completed_at"] == 16 * 86_400
    file = await studio.get(f"{video}/content")
    assert (file.status, file.body, file.headers["content-type"]) == (200, FILE, "video/mp4")
    assert video in file.headers["content-disposition"]


async def test_how_a_video_ended_is_stored_so_that_it_is_known_when_its_result_is_not_any_more() -> None:
    studio = Studio()
    video = await made(studio)
    await studio.carry()
    completed = (await studio.get(video)).json()
    studio.jobs.results.clear()
    assert (await studio.get(video)).json() == completed
    gone = await studio.get(f"{video}/content")
    assert (gone.status, gone.error["code"]) == (410, "video_expired")


@pytest.mark.parametrize(
    ("result", "code", "words"),
    [
        ({"status": "expired", "error": ResultError(code="job_expired", message="too late")}, "job_expired", "too late"),
        ({"status": "failed", "error": None}, "server_error", "could not be made"),
    ],
)
async def test_a_job_without_an_answer_is_a_failed_video(result: dict[str, Any], code: str, words: str) -> None:
    studio = Studio()
    video = await made(studio)
    studio.jobs.end("_", JobResult(id=studio.jobs.published[-1].name, **result))
    seen = (await studio.get(video)).json()
    assert (seen["status"], seen["error"]["code"], seen["progress"]) == ("failed", code, 0)
    assert words in seen["error"]["message"]
    assert (await studio.get(f"{video}/content")).error["code"] == "video_not_ready"


async def test_what_the_worker_refused_is_told_by_the_video() -> None:
    studio = Studio()
    video = await made(studio)
    await studio.carry(JobFault("invalid_request", "seconds is 99; this worker takes 1 to 12", param="seconds"))
    seen = (await studio.get(video)).json()
    assert seen["status"] == "failed"
    assert "this worker takes 1 to 12" in seen["error"]["message"]


async def test_a_video_that_nobody_asked_after_while_its_result_was_stored_does_not_wait_for_ever() -> None:
    studio = Studio()
    video = await made(studio)
    ((key, value),) = studio.records.held.items()
    record = msgspec.json.decode(value, type=VideoRecord)
    long_ago = record.until - stored_videos.KEPT_S - 3600
    studio.records.held[key] = msgspec.json.encode(msgspec.structs.replace(record, until=long_ago))
    seen = (await studio.get(video)).json()
    assert (seen["status"], seen["error"]["code"]) == ("failed", "video_expired")


async def test_lists_have_pages_and_say_how_each_stands() -> None:
    studio = Studio()
    videos = [await made(studio) for _ in range(3)]
    await studio.carry()
    listed = (await studio.get("?limit=2")).json()
    order = sorted(videos, reverse=True) if len({video["created_at"] for video in listed["data"]}) == 1 else videos[::-1]
    assert ([video["id"] for video in listed["data"]], listed["has_more"]) == (order[:2], True)
    assert (listed["first_id"], listed["last_id"]) == (order[0], order[1])
    rest = (await studio.get(f"?after={order[1]}&limit=2")).json()
    assert ([video["id"] for video in rest["data"]], rest["has_more"]) == (order[2:], False)
    statuses = {video["id"]: video["status"] for video in listed["data"] + rest["data"]}
    assert statuses == {videos[0]: "queued", videos[1]: "queued", videos[2]: "completed"}
    assert (await studio.get("?limit=0")).error["param"] == "limit"


async def test_a_deleted_video_is_gone_with_its_file() -> None:
    studio = Studio()
    video = await made(studio)
    await studio.carry()
    answer = (await studio.get(video, method="DELETE")).json()
    assert answer == {"id": video, "object": "video.deleted", "deleted": True}
    assert studio.jobs.dropped == [studio.jobs.published[-1].name]
    for path in (video, f"{video}/content"):
        missing = await studio.get(path)
        assert (missing.status, missing.error["code"]) == (404, "video_not_found")
    assert (await studio.get("")).json()["data"] == []


async def test_a_video_that_is_still_made_is_cancelled_when_it_is_deleted() -> None:
    studio = Studio()
    video = await made(studio)
    studio.begin()
    assert (await studio.get(video, method="DELETE")).status == 200
    assert studio.result().status == "cancelled"
    assert (await studio.get(video)).status == 404


async def test_a_tenant_neither_sees_nor_deletes_the_videos_of_another() -> None:
    studio = Studio()
    video = await made(studio, **{"x-headrace-tenant": "blue"})
    await studio.carry()
    for method, path in (("GET", video), ("GET", f"{video}/content"), ("DELETE", video)):
        call = await studio.get(path, method=method, **{"x-headrace-tenant": "red"})
        assert (call.status, call.error["code"]) == (404, "video_not_found")
    assert (await studio.get("", **{"x-headrace-tenant": "red"})).json()["data"] == []
    assert (await studio.get(video, **{"x-headrace-tenant": "blue"})).json()["status"] == "completed"


async def test_only_the_video_itself_can_be_fetched_and_what_is_not_served_is_named() -> None:
    studio = Studio()
    video = await made(studio)
    call: Call = await studio.get(f"{video}/content?variant=thumbnail")
    assert (call.status, call.error["param"], call.error["code"]) == (400, "variant", "unsupported_parameter")
    remix = await studio.get(f"{video}/remix", method="POST")
    assert (remix.status, remix.error["code"]) == (404, "not_served")
    assert (await studio.get("x" * 4000)).status in (404, 414)
