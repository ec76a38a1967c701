"""Reads the query of routes that list stored objects page by page, and the small bodies of routes that change one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request
from starlette.types import Message

from headrace.frontend.errors import BadRequest
from headrace.frontend.http.http_exchange import HttpExchange
from headrace.frontend.settings import FrontendSettings

T = TypeVar("T")

DEFAULT_LIMIT = 20
MAX_LIMIT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class PageQuery:
    """The page that a request asks for. `after` is the id of the object before it."""

    limit: int
    ascending: bool
    after: str | None

    @classmethod
    def of(cls, request: Request, *, ascending: bool = False, most: int = MAX_LIMIT, usual: int = DEFAULT_LIMIT) -> PageQuery:
        """Read a query. `ascending` and `usual` are the order and the limit where none is given. Raises BadRequest."""
        query = request.query_params
        order = query.get("order", "asc" if ascending else "desc")
        if order not in ("asc", "desc"):
            raise BadRequest(f"order must be asc or desc, got {order[:100]!r}", param="order")
        return cls(limit=_limit(query.get("limit"), most, usual), ascending=order == "asc", after=query.get("after"))

    def page(self, objects: Sequence[T], names: Sequence[str]) -> tuple[list[T], bool]:
        """Return the objects of the page and whether more follow. `objects` are in ascending order, `names` are their ids.

        Raises BadRequest if no object has the id in `after`.
        """
        order = list(range(len(objects))) if self.ascending else list(reversed(range(len(objects))))
        if self.after is not None:
            if self.after not in names:
                raise BadRequest(f"after: the list has no object {self.after[:100]!r}", param="after")
            order = order[order.index(names.index(self.after)) + 1 :]
        return [objects[i] for i in order[: self.limit]], len(order) > self.limit


def _limit(value: str | None, most: int, usual: int) -> int:
    if value is None:
        return usual
    if not value.isascii() or not value.isdigit() or not 1 <= int(value[:9]) <= most:
        raise BadRequest(f"limit must be a number from 1 to {most}, got {value[:100]!r}", param="limit")
    return int(value)


async def read_body(request: Request, settings: FrontendSettings) -> bytes:
    """Read the body of a request that Starlette routes, within the limits of all bodies. Raises as `HttpExchange.read_body`."""
    return await HttpExchange(request.scope, request.receive, _nothing).read_body(settings)


async def _nothing(message: Message) -> None:
    """Send nothing: the answer is Starlette's."""
