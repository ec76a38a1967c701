"""Limits the depth and the number of values of a JSON body before it is decoded.

A decoder turns a body of some megabytes into millions of objects in one call, and nothing else runs meanwhile. A deeply nested
body exhausts the stack of code that handles it later, also in other processes. So the values outside of strings are counted
first: at once for short bodies, in a thread for long ones, some kilobytes at a time, so that other threads can run.

The limit corresponds to some 30 ms of decoding, counted in numbers: a string counts as one value, two escaped characters as
one, and eight bytes of non-ASCII characters as one. Lists and objects have a limit of their own; a body may have half of each
limit.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar, cast, get_args

import msgspec
import structlog

from headrace.frontend.errors import BadRequest, BodiesFull, MalformedBody
from headrace.frontend.ports import Models
from headrace.frontend.settings import FrontendSettings

# Checks fields of parts that are decoded as plain mappings, because their type depends on their content.
#
# Errors name the path of the field.


def text_at(value: Mapping[str, Any], key: str, where: str) -> str:
    """Return the text under `key`. Raises BadRequest if it is missing or no string."""
    param = f"{where}.{key}"
    text = value.get(key)
    if text is None:
        raise missing(param)
    if not isinstance(text, str):
        raise wrong(param, "a string")
    return text


def mapping_at(value: Any, where: str) -> Mapping[str, Any]:
    """Return the value as an object. Raises BadRequest if it is missing or no object."""
    if value is None:
        raise missing(where)
    if not isinstance(value, Mapping):
        raise wrong(where, "an object")
    return value


def list_at(value: Any, where: str) -> Sequence[Any]:
    """Return the value as a list. Raises BadRequest if it is no list."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise wrong(where, "a list")
    return value


def model_name(name: str | None, models: Models) -> str:
    """Return `name`, or the only served model if the request names none. Raises BadRequest if there is not exactly one.

    A model that had a worker lately counts as served. If there is none of these, the only known model is meant.
    """
    if name is not None:
        return name
    names = models.offered_names() or models.names()
    if len(names) != 1:
        raise missing("model", f", one of: {', '.join(names) or 'nothing'}")
    return names[0]


def missing(param: str, more: str = "") -> BadRequest:
    """Return the error for a missing required parameter. `more` ends the message."""
    return BadRequest(f"missing required parameter: {param}{more}", param=param, code="missing_required_parameter")


def wrong(param: str, wanted: str) -> BadRequest:
    return BadRequest(f"invalid value for {param}: expected {wanted}", param=param)


def unsupported(param: str, why: str = "is not supported here") -> BadRequest:
    """Return the error for a parameter that Headrace knows and does not support."""
    return BadRequest(f"{param} {why}", param=param, code="unsupported_parameter")


INLINE_BYTES = 128 * 1024
_WINDOW = 64 * 1024
_ESCAPES = 2  # escaped characters that take as long to decode as a number
_FOREIGN = 8  # bytes of characters outside of ASCII that do
_ASCII = bytes(range(128))
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


async def check_shape(body: bytes, settings: FrontendSettings) -> None:
    """Check a body, in a thread if it is long. Raises MalformedBody."""
    size = len(body)
    if size <= INLINE_BYTES:
        if body.count(b"[") + body.count(b"{") > settings.max_json_depth:  # fewer brackets cannot nest too deeply
            check_shape_now(body, settings)
    else:
        await asyncio.to_thread(check_shape_now, body, settings)


def check_shape_now(body: bytes, settings: FrontendSettings) -> None:
    """Check a body in about 5 ns per byte. Raises MalformedBody."""
    depth = containers = values = 0
    at = 0
    in_text = False
    while at < len(body):
        end = min(at + _WINDOW, len(body))
        while end < len(body) and body[end - 1] == 0x5C:  # a backslash and the character it escapes stay together
            end += 1
        # One more quote closes a string that continues after the window. Otherwise the window then ends with a lone quote.
        window = (b'"' if in_text else b"") + body[at:end] + b'"'
        plain, texts = _TEXT.subn(b"", window)
        in_text = not plain.endswith(b'"')
        at = end
        containers += plain.count(b":")
        values += plain.count(b",") + texts + window.count(b"\\") // _ESCAPES
        if not window.isascii():
            values += len(window.translate(None, _ASCII)) // _FOREIGN
        brackets = plain.translate(None, _NOT_BRACKETS)
        containers += len(brackets) // 2
        if containers > settings.max_json_containers:
            raise MalformedBody(f"the body has more than {settings.max_json_containers} lists, objects and members of objects")
        if values > settings.max_json_values:
            raise MalformedBody(f"the body has more than {settings.max_json_values} values")
        if containers / settings.max_json_containers + values / settings.max_json_values > 1:
            counts = f"{containers} lists, objects and members of objects, and {values} values"
            raise MalformedBody(f"the body has too much of everything: {counts}")
        for bracket in brackets:
            depth += 1 if bracket in b"[{" else -1
            if depth > settings.max_json_depth:
                raise MalformedBody(f"the body is nested more than {settings.max_json_depth} levels deep")


# Bounds the memory of request bodies that are still arriving, over all connections and for each address.
#
# One body is bounded by its own limit; thousands of slow ones together are not. A body that is over the budget is refused,
# and its client may try again. The first bytes of every body are free, so that ordinary requests go on beside an attack.

FREE_BYTES = 64 * 1024  # of each body
PEER_SHARE = 0.5  # of the budget, for one address; clients behind a proxy share one
RETRY_AFTER_S = 1.0


class BodyBudget:
    """The bytes that bodies which have not arrived in full hold in memory. `on_change` is called with their sum."""

    def __init__(self, most: int, on_change: Callable[[float], None] = lambda _held: None) -> None:
        self.most = most
        self.held = 0
        self._by_peer: dict[str, int] = {}
        self._on_change = on_change

    def share(self, peer: str) -> BodyShare:
        """Return the part of one body, to be closed when it has arrived or was given up."""
        return BodyShare(self, peer)

    def add(self, peer: str, size: int) -> None:
        """Count bytes of a body. Raises BodiesFull, and counts none, if they are too many."""
        of_peer = self._by_peer.get(peer, 0) + size
        if self.held + size > self.most:
            message = f"bodies that are still arriving hold {self.held} of {self.most} bytes; try again shortly"
            raise BodiesFull(message, retry_after_s=RETRY_AFTER_S)
        if of_peer > self.most * PEER_SHARE:
            message = f"bodies of this address that are still arriving hold {of_peer - size} bytes; try again shortly"
            raise BodiesFull(message, retry_after_s=RETRY_AFTER_S)
        self.held += size
        self._by_peer[peer] = of_peer
        self._on_change(self.held)

    def remove(self, peer: str, size: int) -> None:
        self.held -= size
        left = self._by_peer.get(peer, 0) - size
        if left > 0:
            self._by_peer[peer] = left
        else:
            self._by_peer.pop(peer, None)
        self._on_change(self.held)


class BodyShare:
    """The part of the budget that one body holds."""

    __slots__ = ("_budget", "_counted", "_peer", "_size")

    def __init__(self, budget: BodyBudget, peer: str) -> None:
        self._budget = budget
        self._peer = peer
        self._size = 0
        self._counted = 0

    def add(self, size: int) -> None:
        """Count a part of the body. Raises BodiesFull."""
        self._size += size
        more = max(0, self._size - FREE_BYTES) - self._counted
        if more:
            self._budget.add(self._peer, more)
            self._counted += more

    def close(self) -> None:
        """Give everything back."""
        if self._counted:
            self._budget.remove(self._peer, self._counted)
            self._counted = 0


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
S = TypeVar("S", bound=msgspec.Struct)

MOST_NAMES = 256  # of fields that one API reports, as clients choose them
_NAME_CHARS = 64
_SLICE = 1 << 16

log = structlog.get_logger()

_WHERE = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`\Z")
_MISSING = re.compile(r"missing required field `(?P<field>[^`]+)`")


@functools.cache
def _decoder_thread() -> Executor:
    """Return a pool of one thread: a decoder never releases the interpreter, so the event loop waits for one body at a time."""
    return ThreadPoolExecutor(1, thread_name_prefix="decode")


class Decoder(Protocol[T_co]):
    """Decodes JSON. Raises as one of msgspec."""

    def decode(self, body: bytes, /) -> T_co: ...


class ReportingDecoder(Generic[S]):
    """Ignores fields of a request and of its parts that their types have not, and reports each name once.

    Requests are decoded by a type that forbids other fields, so that only those that have some are decoded a second time.
    """

    def __init__(self, kind: type[S], hints: Iterable[str] = ()) -> None:
        """`hints` are fields that are known and ignored, `part.field` those of a part."""
        hints = frozenset(hints)
        self._strict = msgspec.json.Decoder(_strict(kind, hints))
        self._known = _known(kind, hints)
        self._lenient = msgspec.json.Decoder(kind)
        self._reported: set[str] = set()

    def decode(self, body: bytes, /) -> S:
        try:
            return cast("S", self._strict.decode(body))
        except msgspec.ValidationError as error:
            if not str(error).startswith("Object contains unknown field"):
                raise
        request = self._lenient.decode(body)
        if len(self._reported) < MOST_NAMES:
            self.report(_unknown(body, self._known))
        return request

    def report(self, names: Iterable[str]) -> None:
        short = {name[:_NAME_CHARS] for name in names}  # a client may send long ones, which would be kept
        new = sorted(short - self._reported)[: MOST_NAMES - len(self._reported)]
        if new:
            self._reported.update(new)
            log.info("request.fields_ignored", fields=new)


Known = dict[str, "Known | None"]
"""The fields of a type; of those that are objects of one type, its fields."""


def _part(field: msgspec.structs.FieldInfo) -> type[msgspec.Struct] | None:
    """Return the type of a field that is an object of one type, or null."""
    if not field.required and field.default is not None:
        return None
    others = [one for one in get_args(field.type) or (field.type,) if one is not type(None)]
    (kind,) = others if len(others) == 1 else (None,)
    return kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None


def _strict(kind: type[msgspec.Struct], hints: Iterable[str], path: str = "") -> type[msgspec.Struct]:
    """Return a type that forbids other fields, also in its parts."""
    fields: list[Any] = [(hint.removeprefix(path), Any, None) for hint in hints if _inside(hint, path)]
    for one in msgspec.structs.fields(kind):
        if (part := _part(one)) is not None:
            strict: Any = _strict(part, hints, f"{path}{one.name}.")
            fields.append((one.name, strict) if one.required else (one.name, strict | None, one.default))
    return msgspec.defstruct(kind.__name__, fields, bases=(kind,), kw_only=True, forbid_unknown_fields=True)


def _known(kind: type[msgspec.Struct], hints: Iterable[str], path: str = "") -> Known:
    known: Known = {hint.removeprefix(path): None for hint in hints if _inside(hint, path)}
    for one in msgspec.structs.fields(kind):
        part = _part(one)
        known[one.encode_name] = None if part is None else _known(part, hints, f"{path}{one.name}.")
    return known


def _inside(hint: str, path: str) -> bool:
    return hint.startswith(path) and "." not in hint.removeprefix(path)


def _unknown(body: bytes | msgspec.Raw, known: Known, path: str = "") -> Iterator[str]:
    for name, value in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items():
        if name not in known:
            yield path + name
        elif (part := known[name]) is not None and memoryview(value)[0] == ord("{"):
            yield from _unknown(value, part, f"{path}{name}.")


async def decode_request(decoder: Decoder[T], body: bytes) -> T:
    """Call `decode_body`, in a thread if the body is long, one body after the other. Raises as `decode_body`."""
    if len(body) <= INLINE_BYTES:
        return decode_body(decoder, body)
    return await asyncio.get_running_loop().run_in_executor(_decoder_thread(), decode_body, decoder, body)


def decode_body(decoder: Decoder[T], body: bytes) -> T:
    """Decode a body. Raises MalformedBody (not JSON) or BadRequest (wrong type, out of range, missing) with `param` set."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise explain(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedBody(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise MalformedBody("the body is nested too deeply") from None


def explain(problem: str) -> BadRequest:
    """Turn a message of msgspec into an error with the parameter in `param`, where clients of OpenAI's API expect it."""
    where = _WHERE.search(problem)
    path = where["path"] if where else ""
    what = problem[: where.start()] if where else problem
    missing = _MISSING.search(what)
    if missing:
        param = f"{path}.{missing['field']}" if path else missing["field"]
        return BadRequest(f"missing required parameter: {param}", param=param, code="missing_required_parameter")
    if not path:
        return BadRequest(f"the body must be a JSON object: {what}")
    return BadRequest(f"invalid value for {path}: {what[0].lower()}{what[1:]}", param=path)


async def kinds_of(items: Sequence[object]) -> set[type]:
    """Return the types in a list that may have a million items, yielding to the event loop in between."""
    kinds: set[type] = set()
    for at in range(0, len(items), _SLICE):
        if at:
            await asyncio.sleep(0)
        kinds.update(map(type, items[at : at + _SLICE]))
    return kinds
