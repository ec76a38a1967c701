"""What vLLM is told of the sockets for its KV events."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("zmq")  # comes with vLLM

from headrace.workers.vllm.kv_listener import KvListener


async def test_vllm_is_told_the_sockets_of_the_listener(tmp_path: Path) -> None:
    listener = KvListener(tmp_path)
    config = listener.config()
    assert (config["enable_kv_cache_events"], config["publisher"]) == (True, "zmq")
    assert (config["endpoint"], config["topic"]) == (listener.endpoint, listener.topic)
    assert config["replay_endpoint"] == f"ipc://{tmp_path}/replay"
    listener.close()


async def test_an_engine_with_a_rank_of_its_own_publishes_where_vllm_counts_to(tmp_path: Path) -> None:
    listener = KvListener(tmp_path, first=3)
    config = listener.config()
    base = int(config["endpoint"].rpartition(":")[2])
    assert listener[0].port == base + 3
    assert int(listener[0].replay_endpoint.rpartition(":")[2]) == int(config["replay_endpoint"].rpartition(":")[2]) + 3
    listener.close()
