"""Routes of OpenAI's API that are not served say so, for any method."""

from __future__ import annotations

import pytest

from tests.support.frontend.fakes import Call, FakeIngress, frontend

PATHS = [
    "/v1/audio/speech",
    "/v1/audio/voices",
    "/v1/images/edits",
    "/v1/images/variations",
    "/v1/moderations",
    "/v1/videos/video_1/remix",
    "/v1/realtime",
    "/v1/realtime/client_secrets",
    "/v1/assistants",
    "/v1/threads/t-1/runs",
    "/v1/fine_tuning/jobs",
    "/v1/vector_stores",
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_it_is_a_404_that_names_what_is_served(path: str, method: str) -> None:
    call = await Call(frontend(FakeIngress()).app, path, {"model": "m"}, method=method).run()
    assert call.status == 404
    assert (call.error["code"], call.error["type"], call.error["param"]) == ("not_served", "invalid_request_error", None)
    assert f"{path}: " in call.error["message"]
    assert "not served here" in call.error["message"]
    assert "/v1/chat/completions" in call.error["message"]
    assert "/v1/embeddings" in call.error["message"]


@pytest.mark.parametrize("path", ["/v1/audiobooks", "/audio/speech", "/v2/files", "//"])
async def test_other_paths_are_plain_misses(path: str) -> None:
    call = await Call(frontend(FakeIngress()).app, path, method="GET").run()
    assert (call.status, call.error["code"]) == (404, "not_found")
