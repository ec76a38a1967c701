"""Renders messages into prompt text with the chat templates of a model, which are compiled once per model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from headrace.frontend.errors import BadRequest, ModelUnusable
from headrace.frontend.prompts.content_format import takes_parts
from headrace.frontend.prompts.growth import MAX_CHARS
from headrace.frontend.prompts.template_sandbox import Limited, TemplateEnvironment, TemplateTimeout

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
        try:
            with Limited(self._deadline_s):
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
    """Return the messages with the mark behind the last text of the last one, and this text."""
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
