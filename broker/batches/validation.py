"""Validates an input file in one pass over its bytes, and plans its lines.

Nothing of the file is kept but the places of its lines, hashes of their ids, and the line that is being read.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from headrace.broker.batches.record import InputInvalid, LineError
from headrace.broker.codec import NOT_DECODED

# Keeps the places of the lines of an input file, 24 bytes a line, and the order in which they are published.
#
# Lines that begin alike come one after the other, so that they find their common prefix in a worker's cache; the groups are
# in the order of the file. All lines of a batch have the same deadline, so the order costs none of them its own.

VERSION = 1  # of the order: an owner that knows another one publishes what has no result from the start

GAP = 64 * 1024  # bytes between two lines that are read together all the same
RANGE = 1024 * 1024  # bytes that are read together


class LinePlan:
    """The lines of one input file. Lines are numbered from 1, blank ones left out."""

    __slots__ = ("_group", "_length", "_offset", "_order", "_whole", "digest", "prompt_tokens")

    def __init__(self) -> None:
        self._offset = array("Q")
        self._length = array("I")
        self._group = array("I")  # hash of the beginning, such as a system prompt
        self._whole = array("I")  # hash of more of it
        self._order = array("I")
        self.digest = ""
        self.prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._offset)

    def add(self, offset: int, length: int, group: int, whole: int) -> None:
        """Add the next line of the file, with 32-bit hashes of the beginning of its prompt."""
        self._offset.append(offset)
        self._length.append(length)
        self._group.append(group)
        self._whole.append(whole)

    def close(self, digest: str, prompt_tokens: int) -> None:
        groups: dict[int, int] = {}
        wholes: dict[int, int] = {}
        for i, (group, whole) in enumerate(zip(self._group, self._whole, strict=True)):
            groups.setdefault(group, i)
            wholes.setdefault(whole, i)
        ranks = [(groups[group], wholes[whole]) for group, whole in zip(self._group, self._whole, strict=True)]
        self._order = array("I", (i + 1 for i in sorted(range(len(self)), key=ranks.__getitem__)))
        self.digest = digest
        self.prompt_tokens = prompt_tokens

    def published(self, start: int, stop: int) -> Sequence[int]:
        return self._order[start:stop]

    def place(self, number: int) -> tuple[int, int]:
        return self._offset[number - 1], self._length[number - 1]

    def ranges(self, numbers: Sequence[int]) -> Iterator[tuple[int, int, list[int]]]:
        start = stop = 0
        inside: list[int] = []
        for number in sorted(numbers):
            offset, length = self.place(number)
            if inside and (offset - stop > GAP or offset + length - start > RANGE):
                yield start, stop - start, inside
                inside = []
            if not inside:
                start = offset
            stop = offset + length
            inside.append(number)
        if inside:
            yield start, stop - start, inside


ENDPOINTS = ("/v1/responses", "/v1/chat/completions", "/v1/embeddings", "/v1/completions")
MAX_ERRORS = 100  # reported; the rest of the file is not read after so many
MAX_CUSTOM_ID = 512
BEGINNING = 512  # bytes of a prompt that is one text, for the coarse order
MORE = 8192  # the same for the fine order
BYTES_PER_TOKEN = 4  # for the estimate of prompt tokens

_BOM = b"\xef\xbb\xbf"


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    """The fields that all endpoints need here."""

    model: str
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLimits:
    """Limits of one input file. `line_bytes` is what a message can carry."""

    lines: int = 50_000
    file_bytes: int = 200 * 1024 * 1024
    line_bytes: int = 1024 * 1024 - 4096
    embedding_inputs: int = 50_000


class InputValidator:
    def __init__(self, endpoint: str, limits: InputLimits) -> None:
        self._endpoint = endpoint
        self._limits = limits
        self._plan = LinePlan()
        self._errors: list[LineError] = []
        self._ids: set[int] = set()
        self._digest = hashlib.sha256()
        self._rest = bytearray()  # of a line that has not ended
        self._skipping = False  # the line is too long, and its end is looked for
        self._size = 0
        self._start = 0  # of the line in `_rest`
        self._number = 0  # lines that have ended, blank ones too
        self._requests = 0
        self._ended = False  # the file is too large
        self._inputs = 0
        self._tokens = 0
        self.model = ""

    @property
    def full(self) -> bool:
        return self._ended or len(self._errors) >= MAX_ERRORS

    def feed(self, data: bytes) -> None:
        self._digest.update(data)
        if not self._size and data.startswith(_BOM):
            self._start, begin = len(_BOM), len(_BOM)
        else:
            begin = 0
        base = self._size
        self._size += len(data)
        if self._size > self._limits.file_bytes:
            message = f"the file is larger than the {self._limits.file_bytes} bytes of a batch"
            self._errors = [LineError(code="file_too_large", message=message)]
            self._ended = True
            return
        while not self.full and (end := data.find(b"\n", begin)) >= 0:
            self._keep(data[begin:end])
            self._end_line()
            begin = end + 1
            self._start = base + begin
        self._keep(data[begin:])

    def close(self) -> LinePlan:
        """Return the plan of the file after its last byte. Raises InputInvalid."""
        if (self._rest or self._skipping) and not self.full:
            self._end_line()
        if not self._errors and not len(self._plan):
            self._error("empty_file", "The input file is empty. Please ensure that the batch contains at least one request.")
        if self._errors:
            raise InputInvalid(self._errors)
        self._plan.close(self._digest.hexdigest(), self._tokens)
        return self._plan

    def _keep(self, part: bytes) -> None:
        if self._skipping:
            return
        self._rest += part
        if len(self._rest) > self._limits.line_bytes + 2:  # a carriage return at its end does not count
            self._skipping = True
            self._rest.clear()

    def _end_line(self) -> None:
        self._number += 1
        line = bytes(self._rest)
        self._rest.clear()
        skipped, self._skipping = self._skipping, False
        if skipped or len(line.rstrip()) > self._limits.line_bytes:
            message = f"The line is longer than the {self._limits.line_bytes} bytes that a message of this server can carry."
            self._error("line_too_long", message, line=self._number)
            return
        if line.strip():
            self._check(line)

    def _check(self, line: bytes) -> None:
        self._requests += 1
        if self._requests == self._limits.lines + 1:
            message = f"The file has more than the {self._limits.lines} requests that a batch may have."
            self._error("too_many_tasks", message, line=self._number)
        try:
            line.decode()
            request = _line.decode(line)
        except UnicodeDecodeError as error:
            self._error(
                "invalid_json_line", f"This line is not UTF-8: {error.reason} at byte {error.start}.", line=self._number
            )
            return
        except msgspec.ValidationError as error:
            self._wrong_type(error)
            return
        except NOT_DECODED as error:
            self._error("invalid_json_line", f"This line is not parseable as valid JSON: {error}.", line=self._number)
            return
        body = self._checked(request)
        if body is None or self._errors:
            return
        group, whole = _beginnings(body)
        self._tokens += len(request.body) // BYTES_PER_TOKEN
        self._plan.add(self._start, len(line), group, whole)

    def _checked(self, request: _Line) -> _Body | None:
        if not request.custom_id or len(request.custom_id) > MAX_CUSTOM_ID:
            message = f"custom_id must have 1 to {MAX_CUSTOM_ID} characters."
            self._error("invalid_custom_id", message, line=self._number, param="custom_id")
        digest = xxhash.xxh3_128_intdigest(request.custom_id.encode(errors="surrogatepass"))
        if digest in self._ids:
            message = (
                f"The custom_id {request.custom_id[:80]!r} is a duplicate of another request. "
                "The custom_id must be unique for each request in a batch."
            )
            self._error("duplicate_custom_id", message, line=self._number, param="custom_id")
        elif len(self._ids) <= self._limits.lines:
            self._ids.add(digest)
        if request.method != "POST":
            message = f"The method is {request.method[:20]!r}; it must be POST."
            self._error("invalid_method", message, line=self._number, param="method")
        if request.url != self._endpoint:
            message = f"The URL {request.url[:80]!r} does not match the batch's endpoint {self._endpoint!r}."
            self._error("invalid_url", message, line=self._number, param="url")
        try:
            body = _body.decode(request.body)
        except NOT_DECODED as error:
            self._wrong_type(error, "body")
            return None
        self.model = self.model or body.model
        if body.model != self.model:
            message = (
                f"The model {body.model[:80]!r} is not the model {self.model[:80]!r} of the lines before. "
                "All requests of a batch must have the same model."
            )
            self._error("mismatched_model", message, line=self._number, param="body.model")
        if self._endpoint == "/v1/embeddings":
            self._count_inputs(body)
        return body

    def _count_inputs(self, body: _Body) -> None:
        before, self._inputs = self._inputs, self._inputs + _inputs(bytes(body.input))
        if before <= self._limits.embedding_inputs < self._inputs:
            message = f"The batch has more than the {self._limits.embedding_inputs} embedding inputs that it may have."
            self._error("too_many_inputs", message, line=self._number, param="body.input")

    def _wrong_type(self, error: Exception, inside: str = "") -> None:
        text = str(error)
        missing = text.partition("missing required field `")[2].partition("`")[0]
        where = text.partition("at `$")[2].partition("`")[0].lstrip(".")
        param = ".".join(part for part in (inside, where, missing) if part) or None
        if missing:
            self._error("missing_required_parameter", f"Missing required parameter: {param!r}.", line=self._number, param=param)
        else:
            self._error("invalid_json_line", f"This line is not a request: {text}.", line=self._number, param=param)

    def _error(self, code: str, message: str, *, line: int | None = None, param: str | None = None) -> None:
        if not self.full:
            self._errors.append(LineError(code=code, message=message, line=line, param=param))


async def validate(chunks: AsyncIterator[bytes], endpoint: str, limits: InputLimits) -> tuple[LinePlan, str]:
    """Read a whole input file. Returns its plan and the model of its lines. Raises InputInvalid and what `chunks` raises."""
    validator = InputValidator(endpoint, limits)
    async for chunk in chunks:
        validator.feed(chunk)
        if validator.full:
            break
    return validator.close(), validator.model


def _beginnings(body: _Body) -> tuple[int, int]:
    """Return hashes of what a prompt begins with: its first message, and all but its last one."""
    head = bytes(body.tools) + bytes(body.instructions)
    messages = _items(body.messages) or _items(body.input)
    if len(messages) > 1:
        first, more = bytes(messages[0]), b"".join(bytes(message) for message in messages[:-1])
    else:
        text = bytes(body.messages) or bytes(body.prompt) or bytes(body.input)
        first, more = text[:BEGINNING], text[:MORE]
    return xxhash.xxh32_intdigest(head + first), xxhash.xxh32_intdigest(head + more)


def _items(raw: msgspec.Raw) -> list[msgspec.Raw]:
    data = bytes(raw)
    return _raws.decode(data) if data[:1] == b"[" else []


def _inputs(data: bytes) -> int:
    """Return the number of texts in the input of an embeddings request: a text, token ids, or a list of either."""
    if data[:1] != b"[":
        return 1
    items = _raws.decode(data)
    return len(items) if items and bytes(items[0])[:1] in (b'"', b"[") else 1


_line = msgspec.json.Decoder(_Line)
_body = msgspec.json.Decoder(_Body)
_raws = msgspec.json.Decoder(list[msgspec.Raw])
