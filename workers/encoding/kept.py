"""Keeps the embeddings that a worker used last, in bounded memory, so that the choices of a request fetch them once."""

from __future__ import annotations

from collections import OrderedDict

MOST_BYTES = 128 << 20


class KeptEmbeddings:
    """The last used embeddings by name, `most_bytes` of them."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self.bytes = 0

    def get(self, name: str) -> bytes | None:
        data = self._kept.get(name)
        if data is not None:
            self._kept.move_to_end(name)
        return data

    def put(self, name: str, data: bytes) -> None:
        """Keep embeddings; those that were not used for longest make room. What is larger than everything is not kept."""
        if len(data) > self._most_bytes or name in self._kept:
            return
        self._kept[name] = data
        self.bytes += len(data)
        while self.bytes > self._most_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.bytes -= len(dropped)
