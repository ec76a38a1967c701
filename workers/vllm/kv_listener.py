"""Describes to vLLM the sockets on which the worker listens to its KV events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.workers.kv.rank_listeners import RankListeners
from headrace.workers.kv.zmq_listener import KEPT_STEPS
from headrace.workers.vllm.events import read_batch


class KvListener(RankListeners):
    """Listens to vLLM's KV events. Create it before vLLM starts, with `config()`."""

    def __init__(self, folder: Path, *, ranks: int = 1) -> None:
        super().__init__(folder, engine="vLLM", read_batch=read_batch, ranks=ranks)

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
