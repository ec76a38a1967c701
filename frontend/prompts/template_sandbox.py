"""A sandboxed Jinja environment for chat templates, with limits on the time and the size of a rendering.

Templates come with the model and are written for transformers: sandboxed, blocks trimmed, `break` and `continue`, a `tojson`
that does not escape HTML, `raise_exception`, `strftime_now`, and the `generation` tag, which only marks text for training.

Every iteration of a loop and every call of a macro counts towards a check of the clock, so a rendering ends at its deadline in
any thread; a thread cannot be stopped from outside. Nothing is computed while a template is compiled, which no clock guards,
and what makes text longer (operators, methods, filters: `headrace.frontend.prompts.growth`) makes none over the limit of
prompts.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import datetime
from types import TracebackType
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.frontend.prompts.growth import MAX_CHARS, bounded_filter, check_method, check_percent, check_size

_STEPS = 64  # between two checks of the clock
_MAX_BITS = 4096  # of the integers that a template computes
_SIZED = (str, bytes, list, tuple)  # no union, which would be made anew for each check
_LOOP_ATTRIBUTES = frozenset({"first", "last", "index", "index0", "length"})


class TemplateTimeout(jinja2.TemplateRuntimeError):
    """The rendering exceeded its time limit."""


class _Deadline(threading.local):
    """The deadline of the rendering in this thread."""

    ends: float = float("inf")  # time.monotonic()
    steps: int = _STEPS  # until the next check of the clock


_deadline = _Deadline()


class Limited:
    """Makes renderings in its block raise TemplateTimeout after this long. A class, which costs half of a generator."""

    __slots__ = ("_seconds",)

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        _deadline.ends, _deadline.steps = time.monotonic() + self._seconds, _STEPS

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _deadline.ends = float("inf")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _NothingComputed(CodeGenerator):
    """Compiles templates without computing any part of them: what is constant is computed when it is rendered."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - the name is Jinja's
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment of a model's templates. Safe to use from several threads."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})
    code_generator_class = _NothingComputed

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols])
        self.optimized = False
        self.filters["tojson"] = _tojson
        self.filters = {name: bounded_filter(name, function) for name, function in self.filters.items()}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    @property
    def step(self) -> None:
        """Check the clock at every `_STEPS`th read. Every iteration of a loop reads this property.

        Reading an attribute is the cheapest thing that a compiled template can do with its environment.
        """
        _deadline.steps -= 1
        if _deadline.steps <= 0:
            _deadline.steps = _STEPS
            if time.monotonic() > _deadline.ends:
                raise TemplateTimeout("it took too long")

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is LoopContext and attribute in _LOOP_ATTRIBUTES:  # the most frequent ones; the checks allow them
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        if template.find(nodes.EvalContextModifier) is not None:  # its value is computed while compiling
            raise jinja2.TemplateSyntaxError("autoescape is not for prompts", 1, name, filename)
        for node in list(template.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            step = nodes.ExprStmt(nodes.EnvironmentAttribute("step"), lineno=node.lineno)
            step.set_environment(self)
            node.body.insert(0, step)  # type: ignore[attr-defined]  # all three have a body
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a sum, product, power or formatted text. Raises SecurityError if it would be larger than any prompt."""
        if operator == "+":
            if type(left) is str is type(right):  # nearly every sum of a template
                if len(left) + len(right) > MAX_CHARS:
                    check_size(len(left) + len(right))
                return left + right
            if isinstance(left, _SIZED) and isinstance(right, _SIZED):
                check_size(len(left) + len(right))
        elif operator == "%":
            check_percent(left)
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() * max(right, 0) > _MAX_BITS:
                raise SecurityError("a power too large")
        else:
            for many, times in ((left, right), (right, left)):
                if not isinstance(times, int):
                    continue
                if isinstance(many, _SIZED):
                    check_size(len(many) * times)
                if isinstance(many, int) and many.bit_length() + times.bit_length() > _MAX_BITS:
                    raise SecurityError("a product too large")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the sandboxed form of a text's `format`. Raises SecurityError for one with an excessive width."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            check_method(value.__self__, "format", (), {})
        return wrapped

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function of a template. Raises SecurityError for a method that would make text larger than any prompt."""
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str | bytes):
            check_method(owner, obj.__name__, args, kwargs)
        return super().call(context, obj, *args, **kwargs)

    def joined(self, values: tuple[Any, ...]) -> str:
        """Join values as the operator `~` does. Raises SecurityError for a text larger than any prompt."""
        texts = [str(value) for value in values]
        check_size(sum(map(len, texts)))
        return "".join(texts)


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
    return datetime.now().strftime(pattern)  # noqa: DTZ005  # templates expect local time
