"""Carries freeform tools, whose input is plain text, through models and parsers that know functions with JSON arguments only.

A freeform tool (`custom` in OpenAI's APIs) becomes a function with one text parameter, and the text is read out of the
arguments while they are being generated. A regex becomes the `pattern` of that parameter, which structured output keeps to
wherever a call is forced. A lark grammar has no place in a JSON schema: it is part of the description, so the model sees it and
nothing enforces it, as nothing enforces the schema of a function that the model chooses to call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set
from typing import Any, Literal, NamedTuple

import msgspec
import structlog

from headrace.broker.jobs import Call, OutputParts, parts_of
from headrace.broker.messages.frames import Part, Row
from headrace.frontend.answer_schema import UNSET, CalledFunction, CalledTool, ChatMessage, MessageCustomCall, MessageToolCall
from headrace.frontend.chat_schema import CustomTool
from headrace.frontend.errors import FrontendError
from headrace.frontend.generation.sse import AnswerOptions, EventForm, EventWriter, Head, UsageCounter

INPUT = "input"

_HEAD = f'{{"{INPUT}":"'
_SPACE_BEFORE = frozenset({0, 1, len(INPUT) + 3, len(INPUT) + 4})  # places in the head where JSON allows white space
_SPACE = " \t\r\n"
_SPECIAL = re.compile(r'["\\]')
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_UNPAIRED = "\ufffd"


def as_function(tool: CustomTool) -> dict[str, Any]:
    """Return the function that stands for a freeform tool, with the keys that chat templates print."""
    described = [tool.description] if tool.description else []
    parameter: dict[str, Any] = {"type": "string", "description": "the whole input of the tool, as plain text"}
    grammar = tool.format.grammar if tool.format is not None else None
    if grammar is not None:
        described.append(f"The input has to match this {grammar.syntax} grammar:\n{grammar.definition}")
        if grammar.syntax == "regex":
            parameter["pattern"] = f"^(?:{grammar.definition})$"
    return {
        "name": tool.name,
        "description": "\n\n".join(described) or None,
        "parameters": {
            "type": "object",
            "properties": {INPUT: parameter},
            "required": [INPUT],
            "additionalProperties": False,
        },
    }


def freeform_arguments_of(text: str) -> str:
    """Return the arguments of the function that stands for a freeform tool, for this input."""
    return msgspec.json.encode({INPUT: text}).decode()


def input_in(arguments: str) -> str:
    """Return the input in arguments. Text that is not such an object is the input itself."""
    return InputReader().feed(arguments)


class InputReader:
    """Reads the input out of arguments that come in pieces. All pieces together give the same input, however they are cut."""

    __slots__ = ("_cut", "_held", "_inside", "_place", "_raw")

    def __init__(self) -> None:
        self._place = 0  # how much of the head was read
        self._held = ""  # what was read before it is known whether this is the head
        self._raw = False
        self._inside = False
        self._cut = ""  # the beginning of an escape

    def feed(self, text: str) -> str:
        """Return the input that this piece adds."""
        if self._place < len(_HEAD) and not self._raw:
            text = self._head(text)
        if self._raw or not self._inside:
            return text if self._raw else ""
        return "".join(self._string(text))

    def _head(self, text: str) -> str:
        """Read the text before the input. Return the rest of the text, or all of it if there is no such head."""
        for at, char in enumerate(text):
            if char == _HEAD[self._place]:
                self._place += 1
            elif char not in _SPACE or self._place not in _SPACE_BEFORE:
                self._raw = True
                return self._held + text[at:]
            self._held += char
            if self._place == len(_HEAD):
                self._inside = True
                return text[at + 1 :]
        return ""

    def _string(self, text: str) -> Iterator[str]:
        text, self._cut, at = self._cut + text, "", 0
        while at < len(text):
            special = _SPECIAL.search(text, at)
            if special is None:
                yield text[at:]
                return
            yield text[at : special.start()]
            at = special.start()
            if text[at] == '"':
                self._inside = False
                return
            length, char = _escape(text, at)
            if not length:
                self._cut = text[at:]
                return
            yield char
            at += length


def _escape(text: str, at: int) -> tuple[int, str]:
    """Return the length of the escape at this place and its character; length 0 if more text is needed."""
    kind = text[at + 1 : at + 2]
    if kind != "u":
        return (2, _ESCAPES.get(kind, kind)) if kind else (0, "")
    digits = text[at + 2 : at + 6]
    if not _HEX.fullmatch(digits):
        return (0, "") if len(digits) < 4 and _HEX.fullmatch(digits.ljust(4, "0")) else (2, _UNPAIRED)
    code = int(digits, 16)
    if not 0xD800 <= code < 0xE000:
        return 6, chr(code)
    following = text[at + 6 : at + 12]
    if code < 0xDC00 and len(following) < 6 and "\\u"[: len(following)] == following[:2]:
        return 0, ""
    digits = following[2:] if following.startswith("\\u") else ""
    low = int(digits, 16) if _HEX.fullmatch(digits) else 0
    if code < 0xDC00 <= low < 0xE000:
        return 12, chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00))
    return 6, _UNPAIRED


class FreeformParts:
    """Replaces the arguments of freeform tools by their input, in the parts of one choice."""

    __slots__ = ("_names", "_readers")

    def __init__(self, names: Set[str]) -> None:
        self._names = names
        self._readers: dict[int, InputReader] = {}

    def took(self, index: int) -> bool:
        return index in self._readers

    def convert(self, parts: Iterable[Part]) -> list[Part]:
        """Return the parts; pieces of a call that add nothing to its input are left out."""
        return list(self._convert(parts))

    def _convert(self, parts: Iterable[Part]) -> Iterator[Part]:
        for part in parts:
            if part.kind != "tool":
                yield part
                continue
            if part.name in self._names:
                self._readers[part.index] = InputReader()
            if (reader := self._readers.get(part.index)) is None:
                yield part
                continue
            text = reader.feed(part.text)
            if text or part.name is not None:
                yield Part("tool", text, part.index, part.id, part.name)


# Splits an answer into a sequence of content blocks, for APIs that stream typed items instead of one message.
#
# A block is a stretch of reasoning, a stretch of text or a tool call. Blocks do not overlap: each begins after the end of the
# one before. The steps of every answer are well formed: open, pieces, close, and at least one block.
#
# White space before a block of text is held back, because parsers pass on the line breaks between calls. It is dropped,
# instead of becoming a block, unless the answer consists of nothing else.

Kind = Literal["content", "reasoning", "tool"]


class PartsOutOfOrder(FrontendError, status=502, code="engine_error"):
    """The model's tool parser went back to a call that had ended."""


class ContentBlock:
    """A block. `index` is the number of blocks before it; `id` and `name` are those of a tool call."""

    __slots__ = ("_pieces", "call", "id", "index", "kind", "name")

    def __init__(self, kind: Kind, index: int, part: Part) -> None:
        self.kind = kind
        self.index = index
        self.call = part.index
        self.id = part.id or ""
        self.name = part.name or ""
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Return the text so far; for a tool call the JSON of its arguments."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def add(self, text: str) -> None:
        self._pieces.append(text)


class BlockStep(NamedTuple):
    """A step of a block. `text` is the new text of a "text" step."""

    what: Literal["open", "text", "close"]
    block: ContentBlock
    text: str = ""


_EMPTY = Part("content")


class ContentBlocks:
    """The blocks of one choice. Call `take` with its parts, then `end` once."""

    __slots__ = ("_current", "_held", "_last_call", "all")

    def __init__(self) -> None:
        self.all: list[ContentBlock] = []
        self._current: ContentBlock | None = None
        self._held = ""
        self._last_call = -1

    def take(self, parts: Iterable[Part]) -> list[BlockStep]:
        """Add parts and return their steps. Raises PartsOutOfOrder."""
        steps: list[BlockStep] = []
        for part in parts:
            if part.kind == "tool":
                self._call(part, steps)
            elif part.text:
                self._text(part, steps)
        return steps

    def end(self) -> list[BlockStep]:
        """Close the open block and return the last steps. An empty answer has one empty block of text."""
        steps: list[BlockStep] = []
        if not self.all:
            self._open("content", _EMPTY, steps)
            if self._held:
                self._piece(self._held, steps)
        self._close(steps)
        self._held = ""
        return steps

    def _text(self, part: Part, steps: list[BlockStep]) -> None:
        current = self._current
        text = part.text
        if current is None or current.kind != part.kind:
            if part.kind == "content":
                text = self._held + text
                if text.isspace():
                    self._held = text
                    return
            self._held = ""
            self._open(part.kind, part, steps)
        self._piece(text, steps)

    def _call(self, part: Part, steps: list[BlockStep]) -> None:
        current = self._current
        if current is None or current.kind != "tool" or current.call != part.index:
            if part.index <= self._last_call:
                if not part.text:
                    return
                raise PartsOutOfOrder
            self._held = ""
            self._last_call = part.index
            self._open("tool", part, steps)
        if part.text:
            self._piece(part.text, steps)

    def _open(self, kind: Kind, part: Part, steps: list[BlockStep]) -> None:
        self._close(steps)
        block = self._current = ContentBlock(kind, len(self.all), part)
        self.all.append(block)
        steps.append(BlockStep("open", block))

    def _piece(self, text: str, steps: list[BlockStep]) -> None:
        block = self._current
        assert block is not None  # noqa: S101  # opened just before
        block.add(text)
        if steps and steps[-1].what == "text":  # always of the same block: opening one is a step
            steps[-1] = BlockStep("text", block, steps[-1].text + text)
        else:
            steps.append(BlockStep("text", block, text))

    def _close(self, steps: list[BlockStep]) -> None:
        if self._current is not None:
            steps.append(BlockStep("close", self._current))
            self._current = None


log = structlog.get_logger()


def arguments_of(block: ContentBlock, answer_id: str) -> dict[str, Any]:
    """Return the arguments of a call as an object. `answer_id` is for the log."""
    text = block.text
    if not text.strip():
        return {}
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    # invalid or truncated arguments are shown rather than dropped
    log.warning("tool_input.not_an_object", message=answer_id, tool=block.name, characters=len(text))
    return {"unparsed_arguments": text}


_encode = msgspec.json.Encoder().encode


class ParsedWriter(EventWriter):
    """Writes the events of a parsed chat: one for each row with output, for all of its parts."""

    def __init__(self, form: EventForm, head: Head, counter: UsageCounter, *, choices: int, options: AnswerOptions) -> None:
        super().__init__(form, head, counter, choices=choices, options=options)
        self._freeform = [FreeformParts(options.freeform) for _ in range(choices)] if options.freeform else []

    def events(self, rows: list[Row]) -> bytes:
        out: list[bytes] = []
        for row in rows:
            choice = row.choice
            opening = self.opening(choice)
            if opening is not None:
                out.append(opening)
            self.counter.completion += len(row.ids)
            fin = row.fin
            parts = parts_of(row.texts if fin is None or not fin.tail else [*row.texts, fin.tail])
            freeform = self._freeform[choice] if self._freeform else None
            if freeform is not None:
                parts = freeform.convert(parts)
            if parts or (row.ids and self.tells_tokens):
                out.append(
                    self.event(choice, b'"delta":' + _encode(delta(parts, freeform)), row.ids, self.logprobs(choice, row))
                )
            if fin is not None:
                out.append(self.finish(choice, fin))
        return b"".join(out)


def delta(parts: Iterable[Part], freeform: FreeformParts | None = None) -> dict[str, Any]:
    """Return the delta of an OpenAI chunk. The first piece of a call has its id, its name and `type`."""
    fields: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if part.kind == "content":
            fields["content"] = fields.get("content", "") + part.text
        elif part.kind == "reasoning":
            fields["reasoning"] = fields["reasoning_content"] = fields.get("reasoning", "") + part.text
        else:
            call = calls.setdefault(part.index, {"index": part.index})
            custom = freeform is not None and freeform.took(part.index)
            kind, text = ("custom", "input") if custom else ("function", "arguments")
            called = call.setdefault(kind, {})
            if part.id is not None:
                call["id"], call["type"] = part.id, kind
            if part.name is not None:
                called["name"] = part.name
            called[text] = called.get(text, "") + part.text
    if calls:
        fields["tool_calls"] = list(calls.values())
    return fields


def _called(call: Call, freeform: Set[str]) -> MessageToolCall | MessageCustomCall:
    if call.name in freeform:
        return MessageCustomCall(id=call.id, custom=CalledTool(call.name, input_in(call.arguments)))
    return MessageToolCall(id=call.id, function=CalledFunction(call.name, call.arguments))


def message_of(parts: OutputParts, *, role: str, forced: bool, freeform: Set[str] = frozenset()) -> ChatMessage:
    """Return the message of a parsed answer. With `forced` a tool had to be called.

    vLLM's server then returns an empty text with the calls, otherwise none.
    """
    reasoning = parts.reasoning or None
    content: str | None = parts.content
    if not content and not forced and (parts.calls or reasoning is not None):
        content = None
    return ChatMessage(
        role=role,
        content=content,
        tool_calls=[_called(call, freeform) for call in parts.calls] or UNSET,
        reasoning=reasoning,
        reasoning_content=reasoning,
    )
