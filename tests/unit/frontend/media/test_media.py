"""Media in chat requests: errors that name the part, and items that end up in the prompt, its hashes and the job."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from headrace.broker.blocks import MediaSpan, block_chain
from headrace.broker.codec import pack_u64, unpack_u32
from headrace.broker.models.cards import MediaSlot
from headrace.frontend.prompts.media import Malformed, TooMuch, content_digest, decode_base64, decode_data_url
from headrace.frontend.prompts.media_parts import may_be, sniff
from tests.support.frontend.fakes import CARD, FILES, MODEL, TEMPLATE, Call, FakeIngress, FakeServed, frontend, post
from tests.support.frontend.media_server import GIF, MP4, PNG, WAV, answer, data_url, web_server

IMAGE, VIDEO = 300, 301
SLOTS = {"image": MediaSlot("<|img|>", IMAGE, 20), "video": MediaSlot("<|vid|>", VIDEO, 5)}
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|img|>{% elif p.type == 'video' %}<|vid|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)


def tokenizer() -> bytes:
    made = Tokenizer.from_str(FILES["tokenizer.json"].decode())
    made.add_special_tokens([f"<|x{i}|>" for i in range(IMAGE - made.get_vocab_size())] + ["<|img|>", "<|vid|>"])
    assert made.token_to_id("<|vid|>") == VIDEO
    return bytes(made.to_str().encode())


TOKENIZER = tokenizer()


def world(template: str = TEMPLATE, slots: dict[str, MediaSlot] | None = None, **settings: Any) -> tuple[FakeIngress, Any]:
    ingress = FakeIngress()
    card = msgspec.structs.replace(CARD, media=SLOTS if slots is None else slots)
    files = {"tokenizer.json": TOKENIZER, "chat_template.jinja": template.encode()}
    ingress.models.served[MODEL] = FakeServed(card, files)
    return ingress, frontend(ingress, **settings).app


def image(url: str = "", **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url or data_url(PNG), **more}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def body(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": list(parts)}], **more}


async def refused(app: Any, request: Any) -> tuple[str, str, str]:
    call = await post(app, request)
    assert call.status == 400, call.body
    return call.error["code"], call.error["param"], call.error["message"]


# -- errors --------------------------------------------------------------------------------------------------

URL = "messages[0].content[1].image_url.url"


@pytest.mark.parametrize(
    ("part", "code", "param", "words"),
    [
        ({"type": "image_url"}, "missing_required_parameter", "messages[0].content[1].image_url", "missing"),
        ({"type": "image_url", "image_url": {}}, "missing_required_parameter", URL, "missing"),
        ({"type": "image_url", "image_url": {"url": 5}}, "invalid_parameter", URL, "expected a URL"),
        ({"type": "image_url", "image_url": ["x"]}, "invalid_parameter", "messages[0].content[1].image_url", "expected a URL"),
        (image(detail="huge"), "invalid_parameter", "messages[0].content[1]", "detail must be one of auto, low, high"),
        (image("data:image/png;base64,!!!!"), "invalid_media", URL, "not base64"),
        (image("data:image/png;base64,"), "invalid_media", URL, "empty"),
        (image("data:image/png;base64"), "invalid_media", URL, "not a data URL"),
        (image("data:;base64;base64,AAAA"), "invalid_media", URL, "not a data URL"),
        (image(data_url(PNG + b"x").rstrip("=")), "invalid_media", URL, "not base64"),
        (image(data_url(PNG)[:-8] + "\n" + data_url(PNG)[-8:]), "invalid_media", URL, "not base64"),
        (image(data_url(WAV)), "media_type", URL, "its bytes are audio/wav, not an image"),
        (image(data_url(b"<svg xmlns=''/>" * 4)), "media_type", URL, "of no known type"),
        (image(data_url(PNG + b"x" * 5000)), "media_too_large", URL, "at most 4000"),
        (image("http://127.0.0.1/a.png"), "media_forbidden", URL, "not a public address"),
        (image("file:///etc/passwd"), "media_forbidden", URL, "only http, https and data"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "unsupported_media", "", "takes no audio"),
        ({"type": "file", "file": {}}, "unsupported_parameter", "messages[0].content[1].type", "'file' is not supported"),
        ({"type": 7}, "unsupported_parameter", "messages[0].content[1].type", "'7' is not supported"),
        ({"text": "x"}, "missing_required_parameter", "messages[0].content[1].type", "missing"),
    ],
)
async def test_a_part_that_is_wrong_is_named(part: Any, code: str, param: str, words: str) -> None:
    _, app = world(media_max_bytes=4000)
    got = await refused(app, body(text("look"), part))
    assert got[0] == code
    assert not param or got[1] == param
    assert words in got[2]


async def test_sounds_are_checked_in_their_own_shape() -> None:
    _, app = world(slots={"audio": MediaSlot("<|img|>", IMAGE, 3)})
    where = "messages[0].content[0].input_audio"

    def sound(**more: Any) -> dict[str, Any]:
        good = {"data": base64.b64encode(WAV).decode(), "format": "wav"}
        return body({"type": "input_audio", "input_audio": {**good, **more}})

    assert (await post(app, sound())).status == 200
    assert (await post(app, body({"type": "audio_url", "audio_url": {"url": data_url(WAV, "audio/wav")}}))).status == 200
    for more, param in (
        ({"format": "mod"}, f"{where}.format"),
        ({"format": None}, f"{where}.format"),
        ({"data": None}, f"{where}.data"),
        ({"data": 1}, f"{where}.data"),
        ({"data": "AAA"}, f"{where}.data"),
        ({"data": base64.b64encode(PNG).decode()}, f"{where}.data"),
    ):
        assert (await refused(app, sound(**more)))[1] == param
    assert (await refused(app, body({"type": "input_audio", "input_audio": "x"})))[1] == where


async def test_a_model_that_takes_no_media_says_so_and_what_it_takes() -> None:
    _, app = world(slots={})
    code, param, message = await refused(app, body(image()))
    assert (code, param) == ("unsupported_media", "messages[0].content[0].type")
    assert message.endswith(f"{MODEL!r} takes no image parts, only: text")
    _, app = world()
    assert (await refused(app, body({"type": "input_audio"})))[2].endswith("takes no audio parts, only: text, image, video")


async def test_only_users_show_something() -> None:
    _, app = world()
    request = {"model": MODEL, "messages": [{"role": "system", "content": [image()]}, {"role": "user", "content": "x"}]}
    assert "only messages of the user" in (await refused(app, request))[2]


async def test_too_many_items_are_refused_before_any_is_fetched() -> None:
    async with web_server(answer()) as web:
        _, app = world(media_max_items=2, media_private=True)
        got = await refused(app, body(*[image(web.url)] * 3))
        assert got[:2] == ("too_many_media", "messages[0].content[2]")
        assert not web.heads


async def test_fetching_can_be_switched_off() -> None:
    async with web_server(answer()) as web:
        _, app = world(media_fetch=False, media_private=True)
        assert (await refused(app, body(image(web.url))))[0] == "media_forbidden"
        assert (await post(app, body(image()))).status == 200
        assert not web.heads


async def test_one_bad_item_ends_the_fetching_of_the_others() -> None:
    hung = asyncio.Event()

    async def play(path: str, writer: asyncio.StreamWriter) -> None:
        if path == "/bad":
            await hung.wait()
            writer.write(answer(status="500 No"))
        else:
            hung.set()
            await asyncio.sleep(30)

    async with web_server(play) as web:
        _, app = world(media_private=True)
        assert (await refused(app, body(image(web.url + "/hangs"), image(web.url + "/bad"))))[0] == "media_unreachable"


async def test_a_client_that_leaves_ends_the_fetching() -> None:
    gone = asyncio.Event()

    async def play(path: str, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            await asyncio.sleep(0.001)
            writer.write(b"")
            if writer.transport.is_closing():
                break
        gone.set()

    async with web_server(play) as web:
        _, app = world(media_private=True)
        call = Call(app, "/v1/chat/completions", body(image(web.url)))
        task = asyncio.create_task(call.run())
        async with asyncio.timeout(5):
            while not web.heads:
                await asyncio.sleep(0.001)
            call.leave()
            await task
        assert call.sent == []


# -- the prompt ----------------------------------------------------------------------------------------------


async def test_an_item_takes_its_tokens_where_the_template_shows_it() -> None:
    ingress, app = world(PARTS)
    call = await post(app, body(text("see "), image(), text(" and "), image(data_url(GIF))))
    assert call.status == 200
    job = ingress.jobs[0]
    ids = unpack_u32(job.generation.token_ids)
    before, between = len("<user>see "), len(" and ")
    assert [at for at, token in enumerate(ids) if token == IMAGE] == [
        *range(before, before + 20),
        *range(before + 20 + between, before + 40 + between),
    ]
    assert call.json()["usage"]["prompt_tokens"] == len(ids) == job.prompt_tokens == before + between + 40
    first, second = job.generation.media
    assert (first["kind"], first["start"], first["length"], first["data"]) == ("image", before, 20, PNG)
    assert (second["start"], second["digest"], second["type"]) == (before + 20 + between, content_digest(GIF), "image/gif")


async def test_a_template_that_knows_of_no_items_gets_their_placeholders_before_the_text() -> None:
    ingress, app = world()
    assert (await post(app, body(text("what is"), image(), text("this?")))).status == 200
    ids = unpack_u32(ingress.jobs[0].generation.token_ids)
    assert ids[6:26] == [IMAGE] * 20
    assert len(ids) == len("<user>") + 20 + len("\nwhat is\nthis?") + len("</s>") - 3 + len("<assistant>")


async def test_the_same_image_has_the_same_hashes_and_another_one_has_not() -> None:
    async with web_server(answer(PNG)) as web:
        ingress, app = world(PARTS, media_private=True)
        for request in (image(), image(web.url), image(data_url(GIF))):
            assert (await post(app, body(text("x" * 20), request, text("y" * 20)))).status == 200
    inline, fetched, other = (job.hashes for job in ingress.jobs)
    ids = ingress.jobs[0].generation.token_ids
    assert inline == fetched == pack_u64(block_chain(ids, 16, media=[MediaSpan(26, 20, content_digest(PNG))]))
    assert inline[:8] == other[:8]  # before the image
    assert inline[8:16] != other[8:16]


async def test_hashes_end_where_only_the_engine_knows_the_prompt() -> None:
    ingress, app = world(PARTS, slots={"image": MediaSlot("<|img|>", IMAGE)})
    assert (await post(app, body(text("x" * 40), image(), text("y" * 90)))).status == 200
    job = ingress.jobs[0]
    assert len(job.hashes) == 8 * (46 // 16)
    assert job.generation.media[0]["length"] == 1


async def test_an_item_becomes_what_the_engine_makes_of_it() -> None:
    made = [40, IMAGE, IMAGE, 41]
    ingress, app = world(PARTS, slots={"image": MediaSlot("<|img|>", IMAGE, 4, made)})
    assert (await post(app, body(text("x" * 20), image(), text("y" * 20)))).status == 200
    job = ingress.jobs[0]
    ids = unpack_u32(job.generation.token_ids)
    assert ids[26:30] == made
    assert job.hashes == pack_u64(block_chain(ids, 16, media=[MediaSpan(26, 4, content_digest(PNG))]))


@pytest.mark.parametrize("template", [PARTS, TEMPLATE])
async def test_a_placeholder_in_the_text_is_refused(template: str) -> None:
    _, app = world(template)
    code, param, message = await refused(app, body(text("<|img|>"), image()))
    assert (code, param) == ("media_placeholders", "messages")
    assert "<|img|>" in message


async def test_items_and_truncation_do_not_go_together() -> None:
    _, app = world()
    assert (await refused(app, body(image(), truncate_prompt_tokens=10)))[1] == "truncate_prompt_tokens"


# -- bytes ---------------------------------------------------------------------------------------------------


def test_data_urls_are_taken_in_all_their_forms() -> None:
    for url in (data_url(PNG), data_url(PNG).replace("image/png", ""), data_url(PNG).replace(";base64", ";a=b;base64")):
        assert decode_data_url(url, limit=100) == PNG
    assert decode_data_url("data:,a%20b", limit=10) == b"a b"


def test_large_base64_is_decoded_piece_by_piece_to_the_same_bytes() -> None:
    data = bytes(range(256)) * 13_000
    encoded = base64.b64encode(data).decode()
    assert decode_base64(encoded, limit=len(data)) == data
    assert decode_data_url(data_url(data), limit=len(data)) == data
    with pytest.raises(TooMuch):
        decode_base64(encoded, limit=len(data) - 1)
    half = 1 << 20
    with pytest.raises(Malformed, match="padding in the middle"):
        decode_base64(encoded[: half - 4] + "AA==" + encoded[half:], limit=len(data))


@pytest.mark.parametrize(
    ("start", "found", "image", "video", "audio"),
    [
        (PNG, "image/png", True, False, False),
        (b"\xff\xd8\xff\xe0", "image/jpeg", True, False, False),
        (GIF, "image/gif", True, False, False),
        (b"RIFF\0\0\0\0WEBPVP8 ", "image/webp", True, False, False),
        (b"\0\0\0\x1cftypavif", "image/avif", True, False, False),
        (MP4, "video/mp4", False, True, True),
        (b"\x1aE\xdf\xa3", "video/x-matroska", False, True, True),
        (WAV, "audio/wav", False, False, True),
        (b"ID3\x04", "audio/mpeg", False, False, True),
        (b"\xff\xfb\x90", "audio/mpeg", False, False, True),
        (b"\xff\xf1P", "audio/aac", False, False, True),
        (b"fLaC", "audio/flac", False, False, True),
        (b"OggS", "application/ogg", False, True, True),
    ],
)
def test_bytes_are_told_apart_by_how_they_begin(start: bytes, found: str, image: bool, video: bool, audio: bool) -> None:
    assert sniff(start) == found
    assert (may_be(found, "image"), may_be(found, "video"), may_be(found, "audio")) == (image, video, audio)
