"""vLLM's KV events as it writes them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import structlog

from headrace.workers.engine import KvBatch
from headrace.workers.vllm.events import KvListener, media_digest, read_batch

STORED = {"type": "BlockStored", "block_hashes": [5], "parent_block_hash": 4, "token_ids": [1, 2], "block_size": 2}


def batch(*events: dict[str, object]) -> KvBatch:
    return read_batch(3, msgspec.msgpack.encode([1.5, list(events), 0]))


def test_a_stored_block():
    more = {"lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [None], "group_idx": 1, "kind_to_come": "x"}
    read = batch(STORED | more)
    assert (read.number, read.partial) == (3, False)
    (event,) = read
    assert (event.kind, event.tier, event.hashes, event.parent, event.token_ids) == ("stored", "device", [5], 4, [1, 2])
    assert (event.adapter, event.salt, event.media, event.group, event.block_size) == (None, None, [], 1, 2)


def test_removed_and_cleared():
    removed, cleared = batch({"type": "BlockRemoved", "block_hashes": [5, 6], "medium": "CPU"}, {"type": "AllBlocksCleared"})
    assert (removed.kind, removed.tier, removed.hashes, removed.group) == ("removed", "host", [5, 6], None)
    assert cleared.kind == "cleared"


@pytest.mark.parametrize("medium", ["CPU", "STORAGE"])
def test_the_content_of_blocks_is_taken_from_the_device_alone(medium):
    """Events of lower tiers do not tell salts: with their tokens a salted block would have the name of one without."""
    (event,) = batch(STORED | {"medium": medium})
    assert (event.hashes, event.token_ids) == ([5], ())


def test_mediums_are_tiers():
    tiers = [batch(STORED | {"medium": medium})[0].tier for medium in ("GPU", "CPU", "cpu", "STORAGE", None)]
    assert tiers == ["device", "host", "host", "disk", "device"]


def test_raw_digests_are_shortened_as_vllm_does():
    digest = bytes(range(32))
    (event,) = batch(STORED | {"block_hashes": [digest], "parent_block_hash": digest})
    assert event.hashes == [event.parent] == [int.from_bytes(digest[24:], "big")]


def test_adapter_salt_and_media_come_in_the_extra_keys():
    keys = [["a", ["00000000000000ff", 3], "tenant"], ["a", ["00000000000000ff", -1], ["other", 1]]]
    stored = STORED | {"block_hashes": [5, 6], "parent_block_hash": None, "token_ids": [1, 2, 3, 4], "lora_name": "a"}
    (event,) = batch(stored | {"extra_keys": keys})
    assert (event.adapter, event.salt) == ("a", "tenant")
    assert event.media == [((255, 3),), ((255, 0), (media_digest("other"), 1))]
    assert event.token_ids == [1, 2, 3, 4]


def test_an_adapter_that_is_called_like_a_salt_is_told_apart():
    (event,) = batch(STORED | {"parent_block_hash": None, "lora_name": "x", "extra_keys": [["x", "x"]]})
    assert (event.adapter, event.salt) == ("x", "x")


def test_embeddings_in_place_of_tokens_give_no_name():
    (event,) = batch(STORED | {"extra_keys": [[b"\0" * 32]]})
    assert event.token_ids == ()


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        msgspec.msgpack.encode([1.5, [{"type": "BlockMoved"}]]),
        msgspec.msgpack.encode([1.5, [STORED | {"medium": "TAPE"}]]),
        msgspec.msgpack.encode([1.5, [STORED | {"token_ids": "x"}]]),
    ],
)
def test_what_cannot_be_read_leaves_nothing_known_and_is_logged(payload):
    with structlog.testing.capture_logs() as logs:
        read = read_batch(8, payload)
    assert ([event.kind for event in read], read.number, read.partial) == (["cleared"], 8, True)
    assert [(line["event"], line["number"]) for line in logs] == [("kv.malformed", 8)]


pytest.importorskip("zmq")  # comes with vLLM


async def test_vllm_is_told_the_sockets_of_the_listener(tmp_path: Path) -> None:
    listener = KvListener(tmp_path)
    config = listener.config()
    assert (config["enable_kv_cache_events"], config["publisher"]) == (True, "zmq")
    assert (config["endpoint"], config["topic"]) == (listener[0].endpoint, listener.topic)
    assert config["replay_endpoint"] == f"ipc://{tmp_path}/replay"
    listener.close()


async def test_an_engine_with_a_rank_of_its_own_publishes_where_vllm_counts_to(tmp_path: Path) -> None:
    listener = KvListener(tmp_path, first=3)
    config = listener.config()
    base = int(config["endpoint"].rpartition(":")[2])
    assert listener[0].port == base + 3
    assert int(listener[0].replay_endpoint.rpartition(":")[2]) == int(config["replay_endpoint"].rpartition(":")[2]) + 3
    listener.close()
