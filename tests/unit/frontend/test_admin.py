"""`DELETE /v1/requests/{id}`."""

from __future__ import annotations

import pytest

from headrace.broker.errors import BrokerUnavailable, JobWithdrawn
from tests.support.frontend.fakes import Call, FakeIngress, chat, frontend, post

JOB = "6b019ddcb1f5bba9deb83f0b88"


async def delete(ingress: FakeIngress, name: str, **headers: str) -> Call:
    call = Call(frontend(ingress).app, f"/v1/requests/{name}", method="DELETE", headers=headers)
    return await call.run()


@pytest.mark.parametrize("name", [JOB, f"chatcmpl-{JOB}", f"resp_{JOB}"])
async def test_a_request_is_cancelled_by_its_id_or_that_of_its_answer(name: str) -> None:
    ingress = FakeIngress()
    ingress.open_names = {(JOB, "_")}
    call = await delete(ingress, name)
    assert (call.status, call.json()) == (200, {"id": name, "object": "request.cancelled", "cancelled": True})


async def test_only_its_own_tenant_cancels_a_request() -> None:
    ingress = FakeIngress()
    ingress.open_names = {(JOB, "acme")}
    assert (await delete(ingress, JOB)).status == 404
    assert (await delete(ingress, JOB, **{"x-headrace-tenant": "acme"})).status == 200


async def test_when_not_every_frontend_can_be_asked_the_answer_is_not_no() -> None:
    class Unsure(FakeIngress):
        async def cancel(self, name: str, tenant: str, *, timeout_s: float) -> bool:
            raise BrokerUnavailable("not every frontend could be asked")

    call = await delete(Unsure(), JOB)
    assert (call.status, call.error["code"]) == (503, "broker_unavailable")


async def test_the_client_of_a_cancelled_request_is_told_so_and_not_to_try_again() -> None:
    def script(job):  # type: ignore[no-untyped-def]
        return [JobWithdrawn("the request was cancelled by a call")]

    call = await post(frontend(FakeIngress(script)).app, chat())
    assert (call.status, call.error["code"]) == (499, "request_cancelled")


async def test_a_request_is_known_by_what_its_client_calls_it() -> None:
    ingress = FakeIngress()
    await post(frontend(ingress).app, chat(), headers={"x-request-id": "mine"})
    await post(frontend(ingress).app, chat())
    assert [job.name for job in ingress.jobs] == ["mine", ""]


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
