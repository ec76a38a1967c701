"""A request body becomes a typed request, or an error that names the parameter."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from frontend.errors import BadRequest, MalformedBody

T = TypeVar("T")

_WHERE = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`\Z")
_MISSING = re.compile(r"missing required field `(?P<field>[^`]+)`")


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Raises MalformedBody (not JSON) or BadRequest (wrong type, out of range, missing) with `param` set."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise explain(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedBody(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise MalformedBody("the body is nested too deeply") from None


def explain(problem: str) -> BadRequest:
    """msgspec's words, turned around so that the parameter comes first, as clients of OpenAI's API expect it in `param`."""
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
