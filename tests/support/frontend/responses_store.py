"""A store of responses in memory, with faults on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.broker.errors import ResponseUnknown
from headrace.broker.ingress.response_store import StoredResponse


class MemoryStore:
    def __init__(self) -> None:
        self.held: dict[str, StoredResponse] = {}
        self.put_error: Exception | None = None
        self.get_error: Exception | None = None

    async def put(self, response: StoredResponse) -> None:
        if self.put_error is not None:
            raise self.put_error
        self.held[response.id] = response

    async def get(self, response_id: str, tenant: str) -> StoredResponse:
        if self.get_error is not None:
            raise self.get_error
        held = self.held.get(response_id)
        if held is None or held.tenant != tenant:
            raise ResponseUnknown(response_id)
        return held

    async def get_all(self, response_ids: Sequence[str], tenant: str) -> list[StoredResponse]:
        return [await self.get(response_id, tenant) for response_id in response_ids]

    async def delete(self, response_id: str, tenant: str) -> None:
        await self.get(response_id, tenant)
        del self.held[response_id]


class MemoryRecords:
    """Records in memory. `before_write` runs before each change is written, as another writer would."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, str, str], bytes] = {}
        self.put_error: Exception | None = None
        self.before_write: Callable[[], None] = lambda: None

    async def put(self, kind: str, tenant: str, name: str, value: bytes) -> None:
        if self.put_error is not None:
            raise self.put_error
        self.held[kind, tenant, name] = value

    async def get(self, kind: str, tenant: str, name: str) -> bytes | None:
        return self.held.get((kind, tenant, name))

    async def change(self, kind: str, tenant: str, name: str, change: Callable[[bytes], bytes]) -> bytes | None:
        self.before_write()
        if (value := self.held.get((kind, tenant, name))) is None:
            return None
        changed = self.held[kind, tenant, name] = change(value)
        return changed

    async def delete(self, kind: str, tenant: str, name: str) -> None:
        self.held.pop((kind, tenant, name), None)

    async def list(self, kind: str, tenant: str) -> list[bytes]:
        return [value for (k, t, _), value in self.held.items() if (k, t) == (kind, tenant)]
