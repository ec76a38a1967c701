"""Describes to SGLang the sockets on which the worker listens to its KV events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.workers.kv.rank_listeners import RankListeners
from headrace.workers.kv.zmq_listener import KEPT_STEPS
from headrace.workers.sglang.kv_events import read_batch


class KvListener(RankListeners):
    """Listens to SGLang's KV events. Create it before SGLang starts, with `config()`."""

    def __init__(self, folder: Path, *, ranks: int = 1) -> None:
        super().__init__(folder, engine="SGLang", read_batch=read_batch, ranks=ranks)

    def config(self) -> dict[str, Any]:
        """Return SGLang's `kv_events_config`."""
        return {
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "bind": False,  # the worker binds
            "replay_endpoint": self.replay_endpoint,
            "buffer_steps": KEPT_STEPS,
            "topic": self.topic,
            "format": "dynamo",  # hashes that differ between salts and adapters, and the names of adapters
        }
