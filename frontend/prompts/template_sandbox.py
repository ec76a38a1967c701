"""The Jinja environment chat templates are written for, and what keeps a template from running for ever.

Templates come with the model and are written for transformers: sandboxed, blocks trimmed, `break` and `continue`, a `tojson`
that leaves HTML alone, `raise_exception`, `strftime_now`, and the `generation` tag, which only marks text for training.

Every turn of a loop and every call of a macro looks at the clock, so a rendering ends when its time is over, in whatever thread
it runs; a thread cannot be stopped from outside.  Multiplication cannot make text larger than a prompt may be.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARS = 64 * 1024 * 1024  # of a rendered prompt; twice the largest body, by default
_LOOK = 64  # turns between two looks at the clock
_MAX_BITS = 4096  # of the integers a template may make
_OF_LOOPS = frozenset({"first", "last", "index", "index0", "length"})


class TemplateTimeout(jinja2.TemplateRuntimeError):
    """The rendering took longer than it may."""


class _Time(threading.local):
    """What is left to the rendering in this thread."""

    ends: float = float("inf")  # time.monotonic()
    turns: int = _LOOK  # until the next look at the clock


_time = _Time()


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Renderings inside raise TemplateTimeout after this long."""
    _time.ends, _time.turns = time.monotonic() + seconds, _LOOK
    try:
        yield
    finally:
        _time.ends = float("inf")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """One per model is enough; safe to use from several threads."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    @property
    def turn(self) -> None:
        """Read by every turn of a loop: the cheapest thing compiled templates can do with their environment."""
        _time.turns -= 1
        if _time.turns <= 0:
            _time.turns = _LOOK
            if time.monotonic() > _time.ends:
                raise TemplateTimeout("it took too long")

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is LoopContext and attribute in _OF_LOOPS:  # what templates ask most, and what the checks let through
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for node in list(template.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            look = nodes.ExprStmt(nodes.EnvironmentAttribute("turn"), lineno=node.lineno)
            look.set_environment(self)
            node.body.insert(0, look)  # type: ignore[attr-defined]  # all three have a body
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Raises SecurityError for products beyond any prompt."""
        if operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * max(right, 0) > _MAX_BITS:
                raise SecurityError("a power too large")
        else:
            for many, times in ((left, right), (right, left)):
                if not isinstance(times, int):
                    continue
                if isinstance(many, str | bytes | list | tuple) and len(many) * times > MAX_CHARS:
                    raise SecurityError("a repetition too long")
                if isinstance(many, int) and many.bit_length() + times.bit_length() > _MAX_BITS:
                    raise SecurityError("a product too large")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005  # local time is what templates mean by it
