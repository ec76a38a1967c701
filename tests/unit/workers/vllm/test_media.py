"""Media for vLLM without vLLM: what a model's card says of them, and how the items of a job become a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.messages.requests import Sampling
from headrace.broker.models.cards import MediaSlot
from headrace.frontend.prompts.media import MediaItem, content_name, place
from headrace.workers.engine import Sequence
from headrace.workers.errors import RequestInvalid, UnsupportedByEngine
from headrace.workers.vllm import convert, media
from headrace.workers.vllm import media as media_support
from headrace.workers.vllm import start as missing_packages
from headrace.workers.vllm.events import media_digest
from headrace.workers.vllm.media import (
    MediaReader,
    MediaSupport,
    NotOffered,
    check_kinds,
    expansion,
    items_of,
    missing_decoder,
    offered_media,
    with_placeholders,
)

TOKEN, SOUND = 90, 91
IMAGE_IDS = [80, TOKEN, TOKEN, 81]
SLOTS = {"image": MediaSlot("<image>", TOKEN, 4, IMAGE_IDS), "audio": MediaSlot("<sound>", SOUND, 3)}


@dataclass
class Place:
    offset: int
    length: int


@dataclass
class Renderer:
    """Makes of each placeholder what a test says, as vLLM's does: `becomes(kind, item)`."""

    becomes: Any
    tokens: dict[int, str] = field(default_factory=lambda: {TOKEN: "image", SOUND: "audio"})
    limits: dict[str, int] = field(default_factory=lambda: {"image": 9})
    asked: list[dict[str, Any]] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    text: list[int] = field(default_factory=lambda: [TOKEN])

    @property
    def mm_processor(self) -> Any:
        return SimpleNamespace(info=SimpleNamespace(allowed_mm_limits=self.limits))

    @property
    def mm_processor_cache(self) -> Any:
        return SimpleNamespace(invalidate=self.forgotten.append)

    def get_tokenizer(self) -> Any:
        return SimpleNamespace(encode=lambda text, add_special_tokens: list(self.text))

    async def render_cmpl_async(self, prompts: list[dict[str, Any]], *, skip_mm_cache: bool = False) -> list[dict[str, Any]]:
        (prompt,) = prompts
        self.asked.append(prompt)
        left = {kind: list(items) for kind, items in prompt["multi_modal_data"].items()}
        ids: list[int] = []
        places: dict[str, list[Place]] = {}
        for token in prompt["prompt_token_ids"]:
            kind = self.tokens.get(token)
            if kind is None or not left.get(kind):
                ids.append(token)
                continue
            made = self.becomes(kind, left[kind].pop(0))
            places.setdefault(kind, []).append(Place(len(ids), len(made)))
            ids += made
        return [{"type": "multimodal", "prompt_token_ids": ids, "mm_placeholders": places}]


def llm(renderer: Renderer, **model: Any) -> Any:
    settings = SimpleNamespace(**({"model": "m", "is_encoder_decoder": False, "max_model_len": 64} | model))
    return SimpleNamespace(renderer=renderer, model_config=settings)


@pytest.fixture
def readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are what they decode to, `bad` ones do not, and a sound has no decoder."""

    def image(data: bytes) -> bytes:
        if data.startswith(b"bad"):
            raise OSError("broken data stream")
        return data

    def sound(data: bytes) -> bytes:
        raise ModuleNotFoundError("No module named 'soundfile'", name="soundfile")

    readers = {"image": lambda: SimpleNamespace(load_bytes=image), "audio": lambda: SimpleNamespace(load_bytes=sound)}
    monkeypatch.setattr(media, "_readers", lambda model: readers)
    monkeypatch.setattr(media, "_most_pixels", lambda: 0)
    monkeypatch.setattr(convert, "translate_invalid", lambda error: None)


def item(start: int, length: int, data: bytes = b"one", **more: Any) -> dict[str, Any]:
    whole = {"kind": "image", "digest": 7, "start": start, "length": length, "type": "image/png", "data": data, "param": "here"}
    return whole | more


def sequence(token_ids: list[int], *items: dict[str, Any], emitted: list[int] | None = None, **more: Any) -> Sequence:
    return Sequence(
        id="s",
        token_ids=token_ids + (emitted or []),
        prompt_tokens=len(token_ids),
        sampling=Sampling(max_tokens=1),
        media=items,
        **more,
    )


# -- prompts -------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([1, 2, TOKEN, SOUND]), max_size=20))
def test_spans_are_taken_back_to_the_placeholders_they_were_made_of(ids: list[int]) -> None:
    kinds = {TOKEN: "image", SOUND: "audio"}
    contents = ["", content_name(b"x")]  # of an older frontend, and of this version
    items = [
        MediaItem(kinds[token], "", b"x", n, "p", contents[n % 2])  # type: ignore[arg-type]
        for n, token in enumerate(ids)
        if token in kinds
    ]
    placed = place(ids, items, SLOTS)
    there = items_of(sequence(placed.ids, *placed.media))
    assert with_placeholders(placed.ids, there, SLOTS) == ids
    assert [media_digest(one.name) for one in there] == [one.digest for one in items], "what KV events will say"


def test_items_of_one_short_digest_are_kept_apart_by_the_engine() -> None:
    """64 bits can be made to collide; an engine that took both for one item would answer about the wrong picture."""
    items = [MediaItem("image", "", data, 7, "p", content_name(data)) for data in (b"cat", b"dog")]
    placed = place([TOKEN, 1, TOKEN], items, SLOTS)
    cat, dog = items_of(sequence(placed.ids, *placed.media))
    assert cat.name != dog.name
    assert media_digest(cat.name) == media_digest(dog.name) == 7
    for content in ("x" * 32, "0" * 31):
        with pytest.raises(RequestInvalid):
            items_of(sequence(placed.ids, {**placed.media[0], "content": content}))


@pytest.mark.parametrize(
    "wrong",
    [
        [{"kind": "image"}],
        [item(0, 4, kind="smell")],
        [item(3, 4)],
        [item(0, 4), item(3, 1)],
        [item(0, 4, digest=1 << 64)],
        [item(-1, 2)],
    ],
)
def test_items_that_cannot_be_are_refused(wrong: list[dict[str, Any]]) -> None:
    with pytest.raises(RequestInvalid):
        items_of(sequence([1] * 6, *wrong))


def test_a_kind_that_is_not_taken_is_refused_with_what_is_missing() -> None:
    offer = MediaSupport({"image": SLOTS["image"]}, {"audio": "no decoder is installed; one of soundfile, av is needed"})
    sound, film = items_of(sequence([1] * 6, item(0, 1, kind="audio"), item(2, 1, kind="video")))
    with pytest.raises(UnsupportedByEngine, match="no audio parts: no decoder is installed; one of soundfile") as refused:
        check_kinds([sound], offer)
    assert refused.value.param == "here"
    with pytest.raises(UnsupportedByEngine, match="no video parts: the model takes: image"):
        check_kinds([film], offer)


@pytest.mark.usefixtures("readable")
async def test_vllm_gets_a_placeholder_the_bytes_and_their_name_for_each_item() -> None:
    renderer = Renderer(lambda kind, item: IMAGE_IDS)
    reader = MediaReader(llm(renderer), MediaSupport(SLOTS))
    prompt = [1, *IMAGE_IDS, 2, *IMAGE_IDS, 3]
    asked_for = sequence(prompt, item(1, 4), item(6, 4, b"two", digest=2**64 - 1), emitted=[TOKEN, 5], cache_salt="t")
    made = await reader.prompt(asked_for)
    (asked,) = renderer.asked
    assert asked["prompt_token_ids"] == [1, TOKEN, 2, TOKEN, 3], "what was emitted is not searched for placeholders"
    assert asked["multi_modal_data"] == {"image": [b"one", b"two"]}
    assert asked["multi_modal_uuids"] == {"image": ["0000000000000007", "ffffffffffffffff"]}
    assert asked["cache_salt"] == "t"
    assert made.given["prompt_token_ids"] == made.token_ids == [*prompt, TOKEN, 5]
    assert made.tokens == len(prompt)
    reader.forget(asked_for)
    assert renderer.forgotten == ["0000000000000007", "ffffffffffffffff"]
    reader.close()


@pytest.mark.usefixtures("readable")
async def test_vllm_says_how_long_a_prompt_is_where_the_card_cannot() -> None:
    reader = MediaReader(
        llm(Renderer(lambda kind, item: [TOKEN] * len(item))), MediaSupport({"image": MediaSlot("<image>", TOKEN)})
    )
    made = await reader.prompt(sequence([1, TOKEN, 2], item(1, 1, b"12345"), emitted=[8]))
    assert (made.token_ids, made.tokens) == ([1, *[TOKEN] * 5, 2, 8], 7)
    reader.close()


@pytest.mark.usefixtures("readable")
async def test_other_tokens_than_the_card_promised_are_counted() -> None:
    reader = MediaReader(llm(Renderer(lambda kind, item: [TOKEN] * 5)), MediaSupport(SLOTS))
    counter = media.metrics.MEDIA_UNEXPECTED
    before = counter._value.get()
    assert (await reader.prompt(sequence([1, *IMAGE_IDS], item(1, 4)))).tokens == 6
    assert counter._value.get() == before + 1
    reader.close()


@pytest.mark.usefixtures("readable")
async def test_what_cannot_be_read_is_refused_by_its_part() -> None:
    reader = MediaReader(llm(Renderer(lambda kind, item: IMAGE_IDS)), MediaSupport(SLOTS))
    with pytest.raises(RequestInvalid, match="image/png of 3 bytes cannot be read: broken data stream") as invalid:
        await reader.prompt(sequence([1] * 9, item(0, 4, param="first"), item(4, 4, b"bad", param="second")))
    assert invalid.value.param == "second"
    with pytest.raises(UnsupportedByEngine, match=r"cannot read audio parts: .*soundfile"):
        await reader.prompt(sequence([1] * 9, item(0, 3, kind="audio")))
    reader.close()


@pytest.mark.usefixtures("readable")
async def test_what_the_models_processor_cannot_work_with_is_the_requests_fault() -> None:
    def fail(kind: str, item: bytes) -> list[int]:
        raise ValueError("too thin") from ZeroDivisionError("aspect " + "x" * 5000)

    reader = MediaReader(llm(Renderer(fail)), MediaSupport(SLOTS))
    with pytest.raises(RequestInvalid, match="here: vLLM cannot process it: ZeroDivisionError: aspect") as invalid:
        await reader.prompt(sequence([1, *IMAGE_IDS], item(1, 4)))
    assert invalid.value.param == "here"
    assert len(str(invalid.value)) < 400
    reader.close()


# -- the card ------------------------------------------------------------------------------------------------


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_support, "_placeholder", lambda llm, kind: f"<{kind}>")
    monkeypatch.setattr(media_support, "_samples", lambda llm, kind: [1, 2, 3])


@pytest.mark.usefixtures("asked_for")
@pytest.mark.parametrize(
    ("becomes", "slot"),
    [
        (lambda kind, item: [TOKEN] * 5, MediaSlot("<image>", TOKEN, 5)),
        (lambda kind, item: IMAGE_IDS, MediaSlot("<image>", TOKEN, 4, IMAGE_IDS)),
        (lambda kind, item: [TOKEN] * item, MediaSlot("<image>", TOKEN)),
        (lambda kind, item: [TOKEN, item, TOKEN], MediaSlot("<image>", TOKEN)),
    ],
    ids=["always as long", "with others around", "longer when larger", "as long but not the same"],
)
async def test_the_card_promises_what_every_size_gives(becomes: Any, slot: MediaSlot) -> None:
    assert await offered_media(llm(Renderer(becomes))) == MediaSupport({"image": slot})


@pytest.mark.usefixtures("asked_for")
async def test_what_cannot_be_served_is_left_out_and_the_reason_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: str, item: int) -> list[int]:
        raise ValueError("no such size")

    assert (await offered_media(llm(Renderer(refuse)))).left_out == {
        "image": "vLLM's processor refuses a sample of it: ValueError: no such size"
    }
    assert not (await offered_media(llm(Renderer(refuse, limits={"image": 0})))).left_out, "the operator wants none"
    two = await offered_media(llm(Renderer(lambda kind, item: [TOKEN] * 3, text=[TOKEN, 4, TOKEN])))
    assert "places in the prompt" in two.left_out["image"] or "more than once" in two.left_out["image"]
    whisper = await offered_media(llm(Renderer(lambda kind, item: IMAGE_IDS), is_encoder_decoder=True))
    assert (whisper.slots, list(whisper.left_out)) == ({}, ["image"])
    monkeypatch.setattr(media_support, "find_spec", lambda name: None)
    deaf = await offered_media(llm(Renderer(lambda kind, item: IMAGE_IDS, limits={"audio": 1})))
    assert deaf.left_out["audio"].startswith("no decoder is installed; one of torchcodec, soundfile, av")


def test_any_decoder_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_support, "find_spec", lambda name: name if name == "av" else None)
    assert missing_decoder("audio") is None
    assert missing_decoder("image") is None
    assert missing_decoder("video") == "no decoder is installed; one of opencv-python-headless, torchcodec is needed"


@pytest.mark.parametrize(
    ("given_ids", "made", "places"),
    [
        ([60, 61, 62], [TOKEN] * 5, [Place(0, 5)]),
        ([1, TOKEN], [TOKEN] * 5 + [1, TOKEN], [Place(0, 5)]),
        ([TOKEN, TOKEN], [TOKEN] * 6, [Place(0, 5)]),
        ([TOKEN], [TOKEN], []),
    ],
    ids=["three tokens", "in front of the prompt", "two of them", "no place"],
)
def test_a_placeholder_is_one_token_or_nothing(given_ids: list[int], made: list[int], places: list[Place]) -> None:
    with pytest.raises(NotOffered):
        expansion(given_ids, {"prompt_token_ids": made, "mm_placeholders": {"image": places}}, "image")


# -- what is missing -----------------------------------------------------------------------------------------


def test_a_missing_torchvision_is_named_with_the_build_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(missing_packages, "version", lambda name: "2.13.0+cpu")
    told = missing_packages.explained(ModuleNotFoundError("No module named 'torchvision'", name="torchvision.transforms"))
    assert "torchvision is not installed" in told
    assert "2.13.0+cpu" in told
    assert "'timm' is not installed" in missing_packages.explained(ModuleNotFoundError("No module named 'timm'", name="timm"))
    assert missing_packages.missing_code("out of memory") is None
