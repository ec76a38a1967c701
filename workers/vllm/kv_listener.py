"""Describes to vLLM the sockets on which the worker listens to its KV events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.workers.kv.rank_listeners import RankListeners
from headrace.workers.kv.zmq_listener import KEPT_STEPS, ZmqKvListener
from headrace.workers.vllm.events import read_batch


class KvListener(RankListeners):
    """Listens to vLLM's KV events. Create it before vLLM starts, with `config()`."""

    def __init__(self, folder: Path, *, ranks: int = 1, first: int = 0) -> None:
        """`first`: the number of this engine's first rank among those of other engines, from which vLLM counts its ports."""
        super().__init__(folder, engine="vLLM", read_batch=read_batch, ranks=first + ranks)
        self._first = first

    def __getitem__(self, rank: int) -> ZmqKvListener:
        return super().__getitem__(self._first + rank)

    def config(self) -> dict[str, Any]:
        """Return vLLM's `kv_events_config`."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "buffer_steps": KEPT_STEPS,
            "topic": self.topic,
        }
