"""Images, videos and sounds in prompts of the simulator."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.blocks import MediaSpan, block_chain
from headrace.workers.engine import StoredTensor
from headrace.workers.errors import RequestInvalid
from headrace.workers.sim.engine import SimEngine
from headrace.workers.sim.run import media_slots
from headrace.workers.sim.tokens import bundled_vocabulary, expected_ids
from tests.support.sim_world import SIZE, World


def item(digest: int, start: int, length: int, kind: str = "image") -> dict[str, Any]:
    return {"kind": kind, "digest": digest, "start": start, "length": length, "url": "of no interest"}


def test_another_image_gives_another_answer_and_shares_no_blocks_from_there_on():
    world = World()
    node = world.node("n")
    prompt = [1] * 20
    for name, digest, cached in (("a", 7, 0), ("b", 7, 16), ("c", 8, 8)):
        node.submit(name, prompt, media=[item(digest, 9, 3)], max_tokens=6)
        world.run()
        assert node.outputs[name][0][1].cached_tokens == cached
        assert node.ids(name) == expected_ids(prompt, 6, media=[MediaSpan(9, 3, digest)])
    assert node.ids("a") == node.ids("b")
    assert len({tuple(ids) for ids in (node.ids("a"), node.ids("c"), expected_ids(prompt, 6))}) == 3


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 30), st.integers(1, 12))
def test_blocks_are_named_as_everywhere_else(data, length, most):
    spans = []
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, length - 1))
        spans.append(MediaSpan(start, data.draw(st.integers(1, length - start)), data.draw(st.integers(0, 2**64 - 1))))
    world = World()
    node = world.node("n")
    prompt = list(range(length))
    media = [item(span.digest, span.start, span.length) for span in spans]
    node.submit("a", prompt, media=media, max_tokens=most)
    world.run()
    whole = prompt + node.ids("a")[:-1]  # the last token is not computed
    chain = block_chain(whole, SIZE, media=spans)
    assert [value for event in node.events for value in event.hashes] == chain
    touched = [keys for event in node.events for keys in event.media or [()] * len(event.hashes)]
    assert len(touched) == len(chain)
    for n, keys in enumerate(touched):
        assert keys == tuple(
            (span.digest, max(0, span.start - n * SIZE))
            for span in spans
            if span.start < (n + 1) * SIZE and span.start + span.length > n * SIZE
        )


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "smell", "digest": 1, "start": 0, "length": 1},
        {"kind": "image", "start": 0, "length": 1},
        item(-1, 0, 1),
        item(2**64, 0, 1),
        item(1, 3, 3),
        item(1, 0, 0),
    ],
)
def test_a_wrong_item_is_refused(wrong):
    world = World()
    node = world.node("n")
    with pytest.raises(RequestInvalid) as refused:
        node.submit("a", [1] * 5, media=[wrong])
    assert refused.value.param == "media"
    assert node.scheduler.idle


def test_the_engine_says_what_it_takes():
    assert SimEngine().capabilities.media == {"image", "video", "audio"}


def embeds(*rows: float) -> StoredTensor:
    return StoredTensor("float32", (len(rows), 1), memoryview(struct.pack(f"<{len(rows)}f", *rows)))


def test_a_prompt_of_embeddings_has_an_answer_and_blocks_of_its_own():
    world = World()
    node = world.node("n")
    one, other = embeds(*range(8)), embeds(*range(1, 9))
    for name, given_, cached in (("a", one, 0), ("b", other, 0), ("c", one, SIZE), ("zeros", None, 0)):
        node.submit(name, [0] * 8, prompt_embeds=given_, max_tokens=6)
        world.run()
        assert node.outputs[name][0][1].cached_tokens == cached
    assert node.ids("a") == node.ids("c")
    assert len({tuple(node.ids(name)) for name in ("a", "b", "zeros")}) == 3


def test_rows_and_tokens_of_a_prompt_must_be_as_many():
    node = World().node("n")
    with pytest.raises(RequestInvalid, match="8 rows for 9 tokens") as caught:
        node.submit("a", [0] * 9, prompt_embeds=embeds(*range(8)))
    assert caught.value.param == "prompt_embeds"


def test_kinds_are_taken_whose_placeholder_the_tokenizer_knows() -> None:
    table = bundled_vocabulary().table
    slots = media_slots(table, 64)
    assert set(slots) == {"image", "video", "audio"}
    assert all(table.token_bytes(slot.token).decode() == slot.text and slot.tokens == 64 for slot in slots.values())
    assert media_slots(table, 0) == {}
