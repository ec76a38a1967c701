"""`POST /v1/images/generations` over a fake ingress: the job, the answer, and what is refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from headrace.broker.jobs import Job
from headrace.broker.messages.requests import Picture, Spill
from headrace.frontend.apis import Stores
from headrace.frontend.app import build_frontend
from headrace.frontend.images import PATH
from headrace.frontend.settings import FrontendSettings
from tests.support.frontend.fakes import CARD, FILES, MODEL, Call, FakeIngress, FakeServed, Script, Step, end, frontend, row
from tests.support.painter import png

FILE = png(Picture(prompt="x", width=64, height=72))


def pictures(**more: Any) -> Script:
    def script(job: Job) -> Iterable[Step]:
        for choice in range(job.choices):
            yield [row(choice=choice, ids=[], fin=end(prompt_tokens=job.prompt_tokens, **({"vector": FILE} | more)))]

    return script


def painting(script: Script | None = None) -> FakeIngress:
    ingress = FakeIngress(script or pictures())
    ingress.models.served = {MODEL: FakeServed(msgspec.structs.replace(CARD, kinds=["image"]), FILES)}
    return ingress


async def ask(ingress: FakeIngress, **body: Any) -> Call:
    given = {"model": MODEL, "prompt": "A river", **body}
    return await Call(frontend(ingress).app, PATH, json.dumps(given).encode()).run()


async def test_a_prompt_becomes_one_job_and_each_picture_a_choice_of_it() -> None:
    ingress = painting()
    call = await ask(
        ingress, n=2, size="64x72", seed=7, negative_prompt="a boat", num_inference_steps=3, guidance_scale=2.5, user="u"
    )
    assert call.status == 200, call.body
    answer = call.json()
    assert [base64.b64decode(one["b64_json"]) for one in answer["data"]] == [FILE, FILE]
    assert (answer["size"], answer["output_format"]) == ("64x72", "png")
    [job] = ingress.jobs
    assert job.pooling is not None
    assert (job.pooling.task, len(job.pooling.inputs), job.choices) == ("image", 2, 2)
    assert job.prompt_tokens == 2 * len("A river"), "a token per byte, for each picture"
    assert job.pooling.picture == Picture(
        prompt="A river", negative_prompt="a boat", width=64, height=72, steps=3, guidance=2.5, seed=7
    )


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": None}, "prompt", "invalid_value"),
    ({"n": 0}, "n", ""),
    ({"n": 11}, "n", ""),
    ({"size": "big"}, "size", ""),
    ({"size": "63x64"}, "size", ""),
    ({"size": "65x64"}, "size", ""),
    ({"size": "4104x64"}, "size", ""),
    ({"size": "٦٤x٦٤"}, "size", ""),
    ({"seed": -1}, "seed", ""),
    ({"response_format": "url"}, "response_format", "unsupported_parameter"),
    ({"output_format": "webp"}, "output_format", "unsupported_parameter"),
    ({"quality": "hd"}, "quality", "unsupported_parameter"),
    ({"background": "transparent"}, "background", "unsupported_parameter"),
    ({"style": "vivid"}, "style", "unsupported_parameter"),
    ({"stream": True}, "stream", "unsupported_parameter"),
    ({"partial_images": 1}, "partial_images", "unsupported_parameter"),
    ({"output_compression": 50}, "output_compression", "unsupported_parameter"),
]


@pytest.mark.parametrize(("change", "param", "code"), WRONG, ids=lambda value: str(value)[:40])
async def test_what_is_wrong_is_named(change: dict[str, Any], param: str, code: str) -> None:
    ingress = painting()
    call = await ask(ingress, **change)
    assert (call.status, call.error["param"]) == (400, param), call.body
    if code == "unsupported_parameter":
        assert call.error["code"] == code
    assert not ingress.jobs


async def test_a_model_that_makes_no_pictures_is_named_and_one_that_does_answers_no_chats() -> None:
    call = await ask(FakeIngress(pictures()))
    assert (call.status, call.error["code"], call.error["param"]) == (400, "wrong_kind", "model")
    assert MODEL in call.error["message"]
    body = json.dumps({"model": MODEL, "prompt": "x"}).encode()
    text = await Call(frontend(painting()).app, "/v1/completions", body).run()
    assert (text.status, text.error["code"]) == (400, "wrong_kind")


class Kept:
    async def get(self, spill: Spill) -> bytes:
        assert spill.object == "p"
        return FILE


async def test_a_picture_that_was_too_large_for_a_frame_is_fetched_and_a_frontend_without_a_store_says_so() -> None:
    script = pictures(vector=b"", spill=Spill(object="p", size=len(FILE), digest=""))
    body = json.dumps({"model": MODEL, "prompt": "x"}).encode()
    app = build_frontend(painting(script), FrontendSettings(), stores=Stores(results=Kept())).app
    call = await Call(app, PATH, body).run()
    assert (call.status, base64.b64decode(call.json()["data"][0]["b64_json"])) == (200, FILE)
    assert (await Call(frontend(painting(script)).app, PATH, body).run()).status >= 500
