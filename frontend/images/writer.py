"""Writes the pictures of a request as OpenAI's answer."""

from __future__ import annotations

import asyncio
import binascii
import struct
from typing import Protocol

from headrace.broker.errors import BrokerError
from headrace.broker.messages import Finish, Row, Spill
from headrace.frontend.writers.base import WholeWriter
from headrace.frontend.writers.usage import UsageCounter


class Results(Protocol):
    """Reads results that were too large for a frame (`headrace.broker.result_objects.ResultObjects`)."""

    async def get(self, spill: Spill) -> bytes:
        """Raises BrokerError."""


class ImageWriter(WholeWriter):
    """Collects the pictures, and fetches those that were too large for a frame."""

    def __init__(self, created: int, pictures: int, counter: UsageCounter, results: Results | None) -> None:
        self.open = pictures
        self.unsettled = True
        self._created = created
        self._counter = counter
        self._results = results
        self._ends: list[Finish | None] = [None] * pictures
        self._body = b""

    def take(self, rows: list[Row]) -> None:
        for row in rows:
            if row.fin is not None:
                self._ends[row.choice] = row.fin
                self._counter.end(row.choice, row.fin)
                self.open -= 1

    async def settle(self) -> None:
        """Fetch what is missing and make the body. Raises BrokerError."""
        files = [await self._file(end) for end in self._ends if end is not None]
        self._body = await asyncio.to_thread(_answer, self._created, files)

    async def _file(self, end: Finish) -> bytes:
        if end.spill is None:
            return end.vector
        if self._results is None:
            raise BrokerError("a picture lies in the object store, which this frontend does not read")
        return await self._results.get(end.spill)

    def body(self) -> bytes:
        return self._body


def _answer(created: int, files: list[bytes]) -> bytes:
    """Return the answer of PNG files; all of a request have the same size."""
    width, height = struct.unpack_from(">2I", files[0], 16) if len(files[0]) >= 24 else (0, 0)
    data = b",".join(b'{"b64_json":"%b"}' % binascii.b2a_base64(file, newline=False) for file in files)
    return b'{"created":%d,"data":[%b],"output_format":"png","size":"%dx%d"}' % (created, data, width, height)
