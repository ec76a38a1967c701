"""`POST /v1/videos` over a fake ingress: the stored job, what it becomes when a carrier runs it, and what is refused."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from headrace.broker.errors import Overloaded
from headrace.broker.messages.requests import Picture
from tests.support.frontend.fakes import MODEL, Call, chat
from tests.support.frontend.videos import FILE, Studio


async def test_a_prompt_becomes_a_stored_job_and_the_answer_says_that_it_waits() -> None:
    studio = Studio()
    call = await studio.ask(prompt="A river", seconds="2", size="96x64", seed=7, negative_prompt="a boat", guidance_scale=2.5)
    assert call.status == 200, call.body
    video = call.json()
    [job] = studio.jobs.published
    assert video == {
        "id": f"video_{job.name}",
        "object": "video",
        "model": MODEL,
        "prompt": "A river",
        "status": "queued",
        "progress": 0,
        "created_at": video["created_at"],
        "completed_at": None,
        "expires_at": None,
        "seconds": "2",
        "size": "96x64",
        "remixed_from_video_id": None,
        "error": None,
    }
    assert (job.endpoint, job.tenant, job.durable, job.request_class) == ("/v1/videos", "_", True, "std")
    assert not studio.runs
    assert not studio.ingress.jobs, "a carrier runs it"
    await studio.carry()
    [run] = studio.runs
    assert run.pooling is not None
    assert (run.pooling.task, len(run.pooling.inputs), run.prompt_tokens) == ("video", 1, len("A river"))
    assert run.pooling.picture == Picture(
        prompt="A river", negative_prompt="a boat", width=96, height=64, guidance=2.5, seed=7, seconds=2
    )


async def test_a_form_is_the_same_request_as_json_as_openais_client_sends_it() -> None:
    studio = Studio()
    form = {"prompt": "Ä river", "seconds": "2", "size": "96x64", "model": MODEL, "num_inference_steps": "3"}
    call = await studio.ask_form(form)
    assert call.status == 200, call.body
    await studio.carry()
    picture = studio.picture()
    assert (picture.prompt, picture.seconds, picture.width, picture.height, picture.steps) == ("Ä river", 2, 96, 64, 3)


async def test_what_is_not_given_is_left_to_the_model_but_for_the_seed_which_a_second_run_repeats() -> None:
    studio = Studio()
    call = await studio.ask(prompt="x", size="auto")
    assert (call.json()["seconds"], call.json()["size"]) == ("", "auto")
    await studio.carry()
    await studio.carry()
    first, second = (run.pooling.picture for run in studio.runs if run.pooling is not None)
    assert first == second
    assert first is not None
    assert (first.seconds, first.width, first.steps) == (None, None, None)
    await studio.ask(prompt="x")
    await studio.carry()
    assert studio.picture().seed != first.seed


async def test_the_result_of_the_job_has_the_file_and_what_the_file_says_of_itself() -> None:
    studio = Studio()
    await studio.ask(prompt="x")
    await studio.carry()
    response = studio.result().response
    assert response is not None
    answer = msgspec.json.decode(response.body)
    assert base64.b64decode(answer["b64_json"]) == FILE
    assert (answer["size"], answer["seconds"]) == ("96x64", "2")


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", ""),
    ({"prompt": None}, "prompt", ""),
    ({"prompt": "x" * 600}, "prompt", ""),
    ({"seconds": 0}, "seconds", ""),
    ({"seconds": "121"}, "seconds", ""),
    ({"seconds": "0"}, "seconds", ""),
    ({"seconds": "long"}, "seconds", ""),
    ({"size": "95x64"}, "size", ""),
    ({"seed": -1}, "seed", ""),
    ({"input_reference": {"file_id": "f"}}, "input_reference", "unsupported_parameter"),
]


@pytest.mark.parametrize(("change", "param", "code"), WRONG, ids=lambda value: str(value)[:40])
async def test_what_is_wrong_is_named_and_no_job_is_stored(change: dict[str, Any], param: str, code: str) -> None:
    studio = Studio()
    call = await studio.ask(**({"prompt": "x"} | change))
    assert (call.status, call.error["param"]) == (400, param), call.body
    assert not code or call.error["code"] == code
    assert not studio.jobs.published
    assert not studio.records.held


async def test_a_picture_to_begin_with_is_refused_by_name_in_a_form_too() -> None:
    studio = Studio()
    call = await studio.ask_form({"prompt": "x"}, file=("input_reference", b"\x89PNG"))
    assert (call.status, call.error["param"], call.error["code"]) == (400, "input_reference", "unsupported_parameter")
    assert not studio.jobs.published


async def test_a_model_that_makes_no_videos_is_named_and_one_that_does_answers_no_chats() -> None:
    call = await Studio(kinds=["image"]).ask(prompt="x")
    assert (call.status, call.error["code"], call.error["param"]) == (400, "wrong_kind", "model")
    text = await Studio().call("/v1/chat/completions", chat())
    assert (text.status, text.error["code"]) == (400, "wrong_kind")


async def test_a_job_that_cannot_be_stored_leaves_no_video_behind() -> None:
    studio = Studio()
    studio.jobs.error = Overloaded("full", retry_after_s=1.0)
    call = await studio.ask(prompt="x")
    assert call.status in (429, 503), call.body
    assert not studio.records.held


async def test_without_stored_jobs_there_are_no_videos() -> None:
    call = await Call(Studio().bare(), "/v1/videos", b'{"prompt": "x"}').run()
    assert (call.status, call.error["code"]) == (404, "not_served")
