"""Writes rows as a response: `ResponseProgress` keeps the items, writers send them as events or as a whole."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Iterator, Mapping
from types import MappingProxyType
from typing import Protocol

import msgspec

from headrace.broker.jobs import parts_of
from headrace.broker.messages.frames import Finish, Row, Text, TokenLogprob
from headrace.frontend.answer_schema import ContentLogprob
from headrace.frontend.errors import FrontendError
from headrace.frontend.generation.content_blocks import BlockStep, ContentBlock, ContentBlocks, FreeformParts
from headrace.frontend.generation.sse import LogprobWriter, StreamWriter, UsageCounter, WholeWriter
from headrace.frontend.responses.answer import (
    CustomCallItem,
    FunctionCallItem,
    IncompleteDetails,
    OutputItem,
    OutputText,
    ReasoningText,
    ResponseAnswer,
    ResponseFault,
    SearchCallItem,
    Status,
    item_of,
    usage_of,
)
from headrace.frontend.responses.toolset import ClientTool

_encode = msgspec.json.Encoder().encode

_FAULTS = {400: "invalid_prompt", 413: "invalid_prompt", 429: "rate_limit_exceeded"}  # other statuses: server_error
_NO_TOOLS: Mapping[str, ClientTool] = MappingProxyType({})


class Keep(Protocol):
    """Stores an ended response. Returns False if that failed; raises nothing."""

    def __call__(self, response: ResponseAnswer, /) -> Awaitable[bool]: ...


class ResponseProgress:
    """The state of a response while it is generated.

    `logprobs` None = not requested. `tools` has the client's tools by the names under which the model calls them.
    """

    def __init__(
        self,
        response: ResponseAnswer,
        job_id: str,
        counter: UsageCounter,
        logprobs: LogprobWriter | None,
        tools: Mapping[str, ClientTool] = _NO_TOOLS,
    ) -> None:
        self.response = response
        self.job_id = job_id
        self._counter = counter
        self._writer = logprobs
        self._tools = tools
        freeform = {offer for offer, tool in tools.items() if tool.kind == "custom"}
        self._parts = FreeformParts(freeform) if freeform else None
        self._blocks = ContentBlocks()
        self._waiting: list[TokenLogprob] = []  # tokens whose text is held back
        self._fresh: list[ContentLogprob] = []
        self._of_block: dict[int, list[ContentLogprob]] = {}  # index of a block → its log probabilities

    def steps(self, row: Row) -> Iterator[tuple[BlockStep, list[ContentLogprob]]]:
        """Yield the steps of a row, each with the log probabilities of its text. Raises PartsOutOfOrder."""
        self._counter.completion += len(row.ids)
        if self._writer is None or not row.logprobs:
            yield from self._take(row.texts)
        else:
            for text, logprob in zip(row.texts, row.logprobs, strict=False):
                self._waiting.append(logprob)
                if text:
                    yield from self._take([text])
        if (fin := row.fin) is not None:
            yield from self._end(fin)

    def _take(self, texts: list[Text]) -> Iterator[tuple[BlockStep, list[ContentLogprob]]]:
        parts = parts_of(texts)
        if self._parts is not None:
            parts = self._parts.convert(parts)
        for step in self._blocks.take(parts):
            yield step, self._logprobs(step)

    def _logprobs(self, step: BlockStep) -> list[ContentLogprob]:
        if step.what != "text" or self._writer is None:
            return []
        if step.block.kind != "content":
            self._waiting.clear()
            return []
        tokens, self._waiting = tokens_of(step.text, self._waiting)
        fresh = self._writer.chat(tokens).content
        self._of_block.setdefault(step.block.index, []).extend(fresh)
        return fresh

    def _end(self, fin: Finish) -> Iterator[tuple[BlockStep, list[ContentLogprob]]]:
        if fin.tail:
            yield from self._take([fin.tail])
        cut = fin.reason in ("length", "content_filter")
        if cut:
            self.response.status = "incomplete"
            reason = "max_output_tokens" if fin.reason == "length" else "content_filter"
            self.response.incomplete_details = IncompleteDetails(reason=reason)  # type: ignore[arg-type]
        else:
            self.response.status = "completed"
        for step in self._blocks.end():
            yield step, self._logprobs(step)
        self.response.completed_at = None if cut else int(time.time())
        self._counter.end(0, fin)
        self.response.usage = usage_of(self._counter)
        self.response.output = [self.item(block, self.closed(block)) for block in self._blocks.all]

    def closed(self, block: ContentBlock) -> Status:
        """Return the status of an ended block: incomplete for the last block of an incomplete response."""
        cut = self.response.status == "incomplete" and block is self._blocks.all[-1]
        return "incomplete" if cut else "completed"

    def item(self, block: ContentBlock, status: Status) -> OutputItem:
        return item_of(block, self.job_id, status, self.logprobs(block), tool=self._tools.get(block.name))

    def logprobs(self, block: ContentBlock) -> list[ContentLogprob]:
        return self._of_block.get(block.index, [])


def event_of(data: bytes) -> bytes:
    """Return the event for its data, which has its name."""
    start = len(b'{"type":"')
    return b"event: %b\ndata: %b\n\n" % (data[start : data.index(b'"', start)], data)


def tokens_of(text: str, waiting: list[TokenLogprob]) -> tuple[list[TokenLogprob], list[TokenLogprob]]:
    """Split waiting tokens into those of `text` and those after it. Tokens before it are markers that a parser removed."""
    raw = text.encode()
    start = b"".join(token.token for token in waiting).rfind(raw)
    if start < 0:
        return waiting, []  # the tokens spell the text differently, so keep all
    tokens: list[TokenLogprob] = []
    at = 0
    for i, token in enumerate(waiting):
        if at >= start + len(raw):
            return tokens, waiting[i:]
        at += len(token.token)
        if at > start:
            tokens.append(token)
    return tokens, []


class ResponseWriter(WholeWriter):
    def __init__(self, progress: ResponseProgress, keep: Keep | None) -> None:
        self.open = 1
        self.unsettled = keep is not None
        self._progress = progress
        self._keep = keep

    def take(self, rows: list[Row]) -> None:
        for row in rows:
            for _ in self._progress.steps(row):
                pass
            if row.fin is not None:
                self.open -= 1

    async def settle(self) -> None:
        if self._keep is not None:
            self._progress.response.store = await self._keep(self._progress.response)

    def body(self) -> bytes:
        return _encode(self._progress.response)


class ResponseView(WholeWriter):
    """Shows the response that a stream's writer makes, as a whole."""

    def __init__(self, progress: ResponseProgress) -> None:
        self.open = 0
        self._progress = progress

    def take(self, rows: list[Row]) -> None:
        """Take nothing: the stream's writer has taken the rows."""

    def body(self) -> bytes:
        return _encode(self._progress.response)


class ResponseEvents(StreamWriter):
    """Writes the events of a streamed response, numbered without gaps. The type of the last event marks the end, not [DONE]."""

    def __init__(self, progress: ResponseProgress, keep: Keep | None) -> None:
        self.open = 1
        self.unsettled = keep is not None
        self._progress = progress
        self._keep = keep
        self._number = 0
        self._begun = False
        self._around: tuple[bytes, bytes] | None = None  # around a piece of text of the open block; None: none is sent
        self._out: list[bytes] = []

    def events(self, rows: list[Row]) -> bytes:
        if not self._begun:
            self._begun = True
            self._begin()
        for row in rows:
            for step, logprobs in self._progress.steps(row):
                if step.what == "text":
                    self._piece(step.text, logprobs)
                elif step.what == "open":
                    self._open(step.block)
                else:
                    self._close(step.block)
            if row.fin is not None:
                self.open -= 1
        return self._flush()

    async def settle(self) -> None:
        if self._keep is not None:
            self._progress.response.store = await self._keep(self._progress.response)

    def closing(self) -> bytes:
        self._whole(f"response.{self._progress.response.status}")
        return self._flush()

    def failure(self, error: FrontendError) -> bytes:
        """Return a failed response, or a plain error if the response has not begun."""
        code = _FAULTS.get(error.status, "server_error")
        if self._number:
            response = self._progress.response
            response.status, response.error = "failed", ResponseFault(code=code, message=str(error))
            self._whole("response.failed")
        else:
            self._event("error", b'"code":%b,"message":%b,"param":null' % (_encode(code), _encode(str(error))))
        return self._flush()

    def _begin(self) -> None:
        self._whole("response.created")
        self._whole("response.in_progress")

    # -- blocks ------------------------------------------------------------------------------------------------

    def _open(self, block: ContentBlock) -> None:
        item = self._progress.item(block, "in_progress")
        self._event("response.output_item.added", b'"output_index":%d,"item":%b' % (block.index, _encode(item)))
        where = self._where(block, item)
        if isinstance(item, SearchCallItem):
            self._around = None
            return
        if isinstance(item, CustomCallItem):
            kind, extra = "response.custom_tool_call_input.delta", b""
        elif block.kind == "tool":
            kind, extra = "response.function_call_arguments.delta", b""
        elif block.kind == "content":
            self._event("response.content_part.added", b'%b,"part":%b' % (where, _encode(OutputText(text=""))))
            kind, extra = "response.output_text.delta", b',"logprobs":'
        else:
            self._event("response.content_part.added", b'%b,"part":%b' % (where, _encode(ReasoningText(text=""))))
            kind, extra = "response.reasoning_text.delta", b""
        name = kind.encode()
        self._around = (b'event: %b\ndata: {"type":"%b",%b,"delta":' % (name, name, where), extra)

    def _piece(self, text: str, logprobs: list[ContentLogprob]) -> None:
        if self._around is None:
            return
        before, extra = self._around
        known = extra + (_encode(logprobs) if logprobs else b"[]") if extra else b""
        self._out.append(b'%b%b%b,"sequence_number":%d}\n\n' % (before, _encode(text), known, self._number))
        self._number += 1

    def _close(self, block: ContentBlock) -> None:
        item = self._progress.item(block, self._progress.closed(block))
        where, text = self._where(block, item), _encode(block.text)
        if isinstance(item, CustomCallItem):
            self._event("response.custom_tool_call_input.done", b'%b,"input":%b' % (where, text))
        elif isinstance(item, FunctionCallItem):
            named = b'%b,"name":%b,"arguments":%b' % (where, _encode(item.name), text)
            self._event("response.function_call_arguments.done", named)
        elif not isinstance(item, SearchCallItem):
            if block.kind == "content":
                logprobs = self._progress.logprobs(block)
                self._event("response.output_text.done", b'%b,"text":%b,"logprobs":%b' % (where, text, _encode(logprobs)))
                part: OutputText | ReasoningText = OutputText(text=block.text, logprobs=logprobs)
            else:
                self._event("response.reasoning_text.done", b'%b,"text":%b' % (where, text))
                part = ReasoningText(text=block.text)
            self._event("response.content_part.done", b'%b,"part":%b' % (where, _encode(part)))
        self._event("response.output_item.done", b'"output_index":%d,"item":%b' % (block.index, _encode(item)))

    @staticmethod
    def _where(block: ContentBlock, item: OutputItem) -> bytes:
        place = b'"item_id":%b,"output_index":%d' % (_encode(item.id), block.index)
        return place if block.kind == "tool" else place + b',"content_index":0'

    # -- events ------------------------------------------------------------------------------------------------

    def _whole(self, kind: str) -> None:
        self._event(kind, b'"response":' + _encode(self._progress.response))

    def _event(self, kind: str, inner: bytes) -> None:
        name = kind.encode()
        self._out.append(b'event: %b\ndata: {"type":"%b",%b,"sequence_number":%d}\n\n' % (name, name, inner, self._number))
        self._number += 1

    def _flush(self) -> bytes:
        out = b"".join(self._out)
        self._out.clear()
        return out


class BackgroundEvents(ResponseEvents):
    """Writes the events of a background response, which is queued first and can be cancelled."""

    def queued(self) -> bytes:
        """Return the first events, before any row."""
        self._whole("response.created")
        self._whole("response.queued")
        return self._flush()

    def _begin(self) -> None:
        self._progress.response.status = "in_progress"
        self._whole("response.in_progress")

    def cancelled(self) -> bytes:
        """Return the last event of a cancelled response. The API has no such event; clients read the status."""
        response = self._progress.response
        response.status, response.output = "cancelled", []
        self._whole("response.failed")
        return self._flush()
