"""SGLang's KV events as it writes them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import structlog

from headrace.workers.engine import KvBatch
from headrace.workers.sglang.engine import read_batch

STORED = {"type": "BlockStored", "block_hashes": [5], "parent_block_hash": 4, "token_ids": [1, 2], "block_size": 2}


def batch(*events: dict[str, object]) -> KvBatch:
    return read_batch(3, msgspec.msgpack.encode([1.5, list(events), 0]))


def test_stored_pages() -> None:
    more = {"lora_id": None, "medium": "GPU", "session_id": "s", "field_to_come": "x"}
    read = batch(STORED | more)
    assert (read.number, read.partial) == (3, False)
    (event,) = read
    assert (event.kind, event.tier, event.hashes, event.parent, event.token_ids) == ("stored", "device", [5], 4, [1, 2])
    assert (event.adapter, event.salt, event.group, event.block_size) == (None, None, None, 2)


def test_signed_hashes_become_unsigned() -> None:
    stored, removed = batch(
        STORED | {"block_hashes": [-1, 7], "parent_block_hash": -(2**63), "token_ids": [1, 2, 3, 4]},
        {"type": "BlockRemoved", "block_hashes": [-2]},
    )
    assert stored.hashes == [2**64 - 1, 7]
    assert stored.parent == 2**63
    assert removed.hashes == [2**64 - 2]


def test_the_first_pages_of_a_prompt_have_no_parent() -> None:
    assert batch(STORED | {"parent_block_hash": None})[0].parent is None


def test_removed_and_cleared() -> None:
    removed, cleared = batch(
        {"type": "BlockRemoved", "block_hashes": [5, 6], "medium": "CPU_PINNED"}, {"type": "AllBlocksCleared"}
    )
    assert (removed.kind, removed.tier, removed.hashes) == ("removed", "host", [5, 6])
    assert cleared.kind == "cleared"


def test_mediums_are_tiers() -> None:
    tiers = [batch(STORED | {"medium": medium})[0].tier for medium in ("GPU", "CPU_PINNED", "DISK", "EXTERNAL", None)]
    assert tiers == ["device", "host", "disk", "disk", "device"]


def test_salt_and_adapter_are_fields_of_the_event() -> None:
    (event,) = batch(STORED | {"cache_salt": "tenant", "lora_name": "a"})
    assert (event.salt, event.adapter) == ("tenant", "a")


def test_pairs_of_tokens_are_read_as_their_first() -> None:
    (event,) = batch(STORED | {"token_ids": [[1, 2], [2, 3]]})
    assert event.token_ids == [1, 2]


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        msgspec.msgpack.encode([1.5, [{"type": "BlockMoved"}]]),
        msgspec.msgpack.encode([1.5, [STORED | {"medium": "TAPE"}]]),
        msgspec.msgpack.encode([1.5, [STORED | {"token_ids": "x"}]]),
    ],
)
def test_an_unreadable_batch_leaves_nothing_known_and_is_logged(payload: bytes) -> None:
    with structlog.testing.capture_logs() as logs:
        read = read_batch(8, payload)
    assert ([event.kind for event in read], read.number, read.partial) == (["cleared"], 8, True)
    assert [(line["event"], line["number"]) for line in logs] == [("kv.malformed", 8)]


async def test_sglang_is_told_the_sockets_of_the_listener(tmp_path: Path) -> None:
    pytest.importorskip("zmq")  # comes with SGLang
    from headrace.workers.sglang.engine import KvListener

    listener = KvListener(tmp_path)
    config = listener.config()
    assert (config["endpoint"], config["bind"], config["topic"]) == (listener[0].endpoint, False, listener.topic)
    assert config["replay_endpoint"] == f"ipc://{tmp_path}/replay"
    assert config["format"] == "dynamo"
    listener.close()
