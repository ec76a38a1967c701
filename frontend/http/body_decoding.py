"""Decodes the JSON of a request body into a typed request, or raises an error that names the parameter."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

import msgspec

from headrace.frontend.errors import BadRequest, MalformedBody
from headrace.frontend.http.json_limits import INLINE_BYTES

T = TypeVar("T")

_SLICE = 1 << 16

_WHERE = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`\Z")
_MISSING = re.compile(r"missing required field `(?P<field>[^`]+)`")


@functools.cache
def _decoder_thread() -> Executor:
    """Return a pool of one thread: a decoder never releases the interpreter, so the event loop waits for one body at a time."""
    return ThreadPoolExecutor(1, thread_name_prefix="decode")


async def decode_request(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Call `decode_body`, in a thread if the body is long, one body after the other. Raises as `decode_body`."""
    if len(body) <= INLINE_BYTES:
        return decode_body(decoder, body)
    return await asyncio.get_running_loop().run_in_executor(_decoder_thread(), decode_body, decoder, body)


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
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
