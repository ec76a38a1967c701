"""Chat templates: a sandbox with limits on time and size, content formats, and rendering."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.frontend.errors import BadRequest, ModelUnusable

# Detects the content format of a chat template: whether it expects a message's content as text or as a list of parts.
#
# A template that loops over the content was written for parts. Given a string, it would loop over its characters, or miss the
# parts of a message that has several.


def takes_parts(template: nodes.Template) -> bool:
    """Return True if the template loops over the content of messages."""
    passed = set(_macro_names(template))
    in_macros = {id(loop): macro for macro in template.find_all(nodes.Macro) for loop in macro.find_all(nodes.For)}
    for loop in template.find_all(nodes.For):
        looped = _bare(loop.iter)
        macro = in_macros.get(id(loop))
        if _is_content(looped):
            return True
        if isinstance(looped, nodes.Name) and (
            (macro.name, looped.name) in passed if macro is not None else looped.name == "content"
        ):
            return True
    return False


def _macro_names(template: nodes.Template) -> Iterator[tuple[str, str]]:
    """Yield (macro, parameter) for every parameter that some call fills with the content of a message."""
    macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
    for call in template.find_all(nodes.Call):
        macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
        if macro is None:
            continue
        for parameter, value in zip(macro.args, call.args, strict=False):
            if _is_content(_bare(value)):
                yield macro.name, parameter.name
        for keyword in call.kwargs:
            if _is_content(_bare(keyword.value)):
                yield macro.name, keyword.key


def _bare(node: nodes.Node | None) -> nodes.Node | None:
    """Return the expression without the filters and slices around it."""
    while isinstance(node, nodes.Filter) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
        node = node.node
    return node


def _is_content(node: nodes.Node | None) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"


# Bounds how much longer one operation of a template may make a text: what would be over the limit on prompts raises.

MAX_CHARS = 64 * 1024 * 1024  # of a rendered prompt; twice the largest body, by default
MAX_WIDTH = 10_000  # to which a text is padded, or into which parts it is cut
MAX_INDENT = 256  # before each of the lines of a text

_WIDE_PERCENT = re.compile(r"%(?:\([^)]*\))?[#0 +-]*(?:\d{5,}|\*|\d*\.(?:\d{5,}|\*))")
_WIDE_FORMAT = re.compile(r"\{[^{}]*:[^{}]*(?:\d{5,}|\{)")
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_FILTERS = {"indent": MAX_INDENT, "tojson": MAX_INDENT} | dict.fromkeys(
    ("center", "slice", "batch", "wordwrap", "truncate", "round", "urlize"), MAX_WIDTH
)


def check_size(size: int) -> None:
    """Raise SecurityError for a text or list that is larger than any prompt."""
    if size > MAX_CHARS:
        raise SecurityError("a text longer than any prompt")


def check_percent(text: object) -> None:
    """Raise SecurityError for a format of the operator `%` that pads to an excessive width."""
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    if isinstance(text, str) and _WIDE_PERCENT.search(text):
        raise SecurityError("a format with an excessive width")


def check_method(owner: str | bytes, name: str, args: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Raise SecurityError for a call of a text's method whose result would be larger than any prompt."""
    if name in _PADDING:
        _check_numbers((*args, *named.values()), MAX_WIDTH)
    elif name in ("format", "format_map"):
        if isinstance(owner, str) and _WIDE_FORMAT.search(owner):
            raise SecurityError("a format with an excessive width")
    elif name == "replace" and len(args) >= 2 and all(isinstance(arg, type(owner)) for arg in args[:2]):
        check_size(len(owner) + owner.count(args[0]) * len(args[1]))
    elif name == "join" and args and isinstance(args[0], Sized):
        check_size(len(owner) * len(args[0]))
    elif name == "translate":
        raise SecurityError("translate is not for prompts")


def bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that raises SecurityError for arguments with which its result would be excessive."""
    most = _FILTERS.get(name)
    if name == "format":

        @wraps(function)
        def formatting(*args: Any, **named: Any) -> Any:
            check_percent(args[0] if args else "")
            return function(*args, **named)

        return formatting
    if name == "replace":

        @wraps(function)
        def replacing(*args: Any, **named: Any) -> Any:
            texts = [arg for arg in args if isinstance(arg, str)]
            if len(texts) >= 3:
                check_size(len(texts[0]) + texts[0].count(texts[1]) * len(texts[2]))
            return function(*args, **named)

        return replacing
    if most is None:
        return function

    @wraps(function)
    def bounded(*args: Any, **named: Any) -> Any:
        _check_numbers((*args[1:], *named.values()), most)
        return function(*args, **named)

    return bounded


def _check_numbers(values: Sequence[Any], most: int) -> None:
    for value in values:
        if isinstance(value, int | float) and abs(value) > most:
            raise SecurityError(f"{value} is more than {most}")


# A sandboxed Jinja environment for chat templates, with limits on the time and the size of a rendering.
#
# Templates come with the model and are written for transformers: sandboxed, blocks trimmed, `break` and `continue`, a
# `tojson` that does not escape HTML, `raise_exception`, `strftime_now`, and the `generation` tag, which only marks text for
# training.
#
# Every iteration of a loop and every call of a macro counts towards a check of the clock, so a rendering ends at its deadline
# in any thread; a thread cannot be stopped from outside. Nothing is computed while a template is compiled, which no clock
# guards, and what makes text longer (operators, methods, filters: `headrace.frontend.prompts.templates`) makes none over the
# limit of prompts.

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
                both: str = left + right  # both are there already, so this is no leap
                if len(both) > MAX_CHARS:
                    check_size(len(both))
                return both
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


_MARK = "\ue0aaHEADRACE-CONTINUE\ue0aa"  # private-use characters: no prompt contains this by accident
_PROBE = _MARK + " "  # the blank shows whether the template trims contents

MAX_TEMPLATE_CHARS = 512 * 1024
RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template"}
)
DEFAULT, TOOL_USE = "default", "tool_use"
DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class _Compiled:
    template: jinja2.Template
    names: Mapping[str, Any]
    parts: bool


class ChatTemplate:
    """The chat templates of a model by name: with tools the one called "tool_use" is used, else "default"."""

    def __init__(self, source: str | Mapping[str, str], *, names: Mapping[str, Any], deadline_s: float = DEADLINE_S) -> None:
        """`names` are the special tokens and constants that templates refer to. A rendering may take `deadline_s`.

        Raises ModelUnusable if a source is no template, or if there are several and none is the default one.
        """
        sources = {DEFAULT: source} if isinstance(source, str) else source
        self._deadline_s = deadline_s
        self._sources = tuple(sources.values())
        self._compiled = {name: _compile(name, text, names) for name, text in sources.items()}
        if DEFAULT not in self._compiled:
            raise ModelUnusable(f"none of the model's chat templates is called {DEFAULT!r}, only: {', '.join(sorted(sources))}")

    def knows_role(self, role: str) -> bool:
        """Return True if the source has the name of the role, which is the rule of vLLM's server."""
        return any(f"'{role}'" in source or f'"{role}"' in source for source in self._sources)

    def takes_parts(self, *, tools: bool) -> bool:
        """Return True if the template for requests with or without tools expects contents as lists of parts."""
        return self._chosen(tools=tools).parts

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the prompt. Raises BadRequest with the template's own message if it refuses the conversation."""
        final = ""
        if continue_final_message:
            messages, final = _mark_last(messages)
        chosen = self._chosen(tools=tools is not None)
        names = chosen.names
        if extra:
            if clash := RESERVED.intersection(extra):
                param = f"chat_template_kwargs.{min(clash)}"
                raise BadRequest(f"{param} cannot be set this way", param=param)
            names = {**names, **extra}
        _deadline.ends, _deadline.steps = time.monotonic() + self._deadline_s, _STEPS
        try:
            text = _run(
                chosen.template,
                {
                    **names,
                    "messages": messages,
                    "tools": tools,
                    "documents": documents,
                    "add_generation_prompt": add_generation_prompt,
                },
            )
        except TemplateTimeout:
            problem = f"the chat template took longer than {self._deadline_s:g} s on the messages"
            raise BadRequest(problem, param="messages", code="template_error") from None
        except jinja2.TemplateError as error:
            raise BadRequest(
                f"the chat template refused the messages: {error}", param="messages", code="template_error"
            ) from None
        except (
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            LookupError,
            ArithmeticError,
            RecursionError,
            MemoryError,
        ) as error:
            problem = f"the chat template failed on the messages: {type(error).__name__}: {error}"
            raise BadRequest(problem, param="messages", code="template_error") from None
        finally:
            _deadline.ends = float("inf")
        return _cut_at_mark(text, final) if continue_final_message else text

    def _chosen(self, *, tools: bool) -> _Compiled:
        return (self._compiled.get(TOOL_USE) if tools else None) or self._compiled[DEFAULT]


def _compile(name: str, source: str, names: Mapping[str, Any]) -> _Compiled:
    which = "" if name == DEFAULT else f" {name!r}"
    if len(source) > MAX_TEMPLATE_CHARS:
        raise ModelUnusable(f"the model's chat template{which} has {len(source)} characters; the limit is {MAX_TEMPLATE_CHARS}")
    environment = TemplateEnvironment()
    try:
        template = environment.from_string(source)
        parts = takes_parts(environment.parse(source))
    except (jinja2.TemplateError, ValueError, RecursionError, MemoryError, SyntaxError) as error:
        why = str(error) if isinstance(error, jinja2.TemplateError) else type(error).__name__
        raise ModelUnusable(f"the model's chat template{which} does not compile: {why}") from None
    # The environment's globals and the template's own names are one shared mapping, because building a context from both at
    # every call costs more than the rendering of a short chat.
    return _Compiled(template, {**template.globals, **names}, parts)


def _run(template: jinja2.Template, names: dict[str, Any]) -> str:
    pieces: list[str] = []
    size = 0
    environment = template.environment
    # `new_context` would list the environment's globals at every call, for imports, which are never used here.
    context = environment.context_class(environment, names, template.name, template.blocks)
    for piece in template.root_render_func(context):
        size += len(piece)
        if size > MAX_CHARS:
            raise jinja2.TemplateRuntimeError(f"the prompt is longer than {MAX_CHARS} characters")
        pieces.append(piece)
    return "".join(pieces)


def _mark_last(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    last = messages[-1]
    content = last.get("content")
    marked: Any = None
    if isinstance(content, str):
        text, marked = content, content + _PROBE
    elif isinstance(content, list):
        for i in reversed(range(len(content))):
            if isinstance(content[i], dict) and isinstance(content[i].get("text"), str):
                text = content[i]["text"]
                marked = [*content[:i], {**content[i], "text": text + _PROBE}, *content[i + 1 :]]
                break
    if marked is None:
        raise BadRequest("continue_final_message needs a final message with text", param="continue_final_message")
    return [*messages[:-1], {**last, "content": marked}], text


def _cut_at_mark(text: str, final: str) -> str:
    """Cut the prompt at the mark, because the template's text after a message would tell the model that it has ended."""
    at = text.rfind(_MARK)
    if at < 0 or final.strip() not in text:
        raise BadRequest("this model's template does not allow to continue the final message", param="continue_final_message")
    kept = text[:at]
    return kept if text.startswith(_PROBE, at) else kept.rstrip()
