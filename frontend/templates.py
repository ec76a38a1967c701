"""Chat templates: messages become the prompt text the model was trained on.

Templates come with the model and are written for transformers, so the environment is the one they expect: sandboxed, blocks
trimmed, `break` and `continue`, a `tojson` that leaves HTML alone, `raise_exception`, `strftime_now`, and the `generation` tag,
which only marks text for training.  Compiled once per model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from frontend.errors import BadRequest, ModelUnusable

_MARK = "\ue0aaHEADRACE-CONTINUE\ue0aa"  # private-use characters: no prompt contains this by accident
_PROBE = _MARK + " "  # the blank tells whether the template trims contents

RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template"}
)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


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


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One model's template. `names` are the special tokens and constants it may refer to."""

    def __init__(self, source: str, *, names: Mapping[str, Any]) -> None:
        """Raises ModelUnusable when the source is no template."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelUnusable(f"the model's chat template does not compile: {error}") from None
        # The environment's globals under the template's own names: handed over as one shared mapping, because a context of
        # its own, made from both at every call, costs more than the rendering of a short chat.
        self._names = {**self._template.globals, **names}

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
        """The prompt. Raises BadRequest with the template's own message when it refuses the conversation."""
        if continue_final_message:
            messages = _mark_last(messages)
        names = self._names
        if extra:
            if clash := RESERVED.intersection(extra):
                param = f"chat_template_kwargs.{min(clash)}"
                raise BadRequest(f"{param} cannot be set this way", param=param)
            names = {**names, **extra}
        try:
            context = self._template.new_context(
                {
                    **names,
                    "messages": messages,
                    "tools": tools,
                    "documents": documents,
                    "add_generation_prompt": add_generation_prompt,
                },
                shared=True,
            )
            text = "".join(self._template.root_render_func(context))
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
        return _cut_at_mark(text) if continue_final_message else text


def _mark_last(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    last = messages[-1]
    content = last.get("content")
    if not isinstance(content, str):
        raise BadRequest("continue_final_message needs a final message with text", param="continue_final_message")
    return [*messages[:-1], {**last, "content": content + _PROBE}]


def _cut_at_mark(text: str) -> str:
    """Everything before the mark: what the template puts after a message would tell the model that it has ended."""
    at = text.rfind(_MARK)
    if at < 0:
        raise BadRequest("this model's template does not allow to continue the final message", param="continue_final_message")
    kept = text[:at]
    return kept if text.startswith(_PROBE, at) else kept.rstrip()
