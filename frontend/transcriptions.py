"""Serves transcriptions and translations of speech (`/v1/audio/…`) as chats with a model that hears.

No engine here has a way of its own for transcriptions. A chat model that takes sounds gets the file and an instruction, which
is also how vLLM asks most models of this kind.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.broker.jobs import parts_of
from headrace.broker.messages.frames import Row
from headrace.frontend.apis import HttpApi, Site
from headrace.frontend.chat_schema import ChatRequest
from headrace.frontend.errors import BadRequest, FrontendError
from headrace.frontend.generation.plan import Plan
from headrace.frontend.generation.sse import StreamWriter, UsageCounter, WholeWriter
from headrace.frontend.http.bodies import ReportingDecoder, explain, unsupported
from headrace.frontend.http.exchange import HttpExchange
from headrace.frontend.http.multipart import FileBegin, FileData, FormField, FormReader
from headrace.frontend.openai.api import chat_api
from headrace.frontend.openai.chat import ChatAdapter, ChatOptions
from headrace.frontend.openapi import all_errors, json_answer, operation
from headrace.frontend.prompts.model_cache import ModelCache

ResponseFormat = Literal["json", "text", "srt", "verbose_json", "vtt", "diarized_json"]


class SpeechForm(msgspec.Struct, kw_only=True):
    """The fields beside the file. `prompt` guides the model; `language` is that of the speech, for transcriptions."""

    model: str | None = None
    prompt: Annotated[str, Meta(max_length=4096)] = ""
    language: Annotated[str, Meta(min_length=2, max_length=40)] | None = None
    response_format: ResponseFormat = "json"
    temperature: Annotated[float, Meta(ge=0, le=1)] = 0.0
    stream: bool = False
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    seed: int | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    chunking_strategy: str | None = None
    include: str | None = None
    timestamp_granularities: str | None = None
    user: str | None = None


class SpeechUsage(msgspec.Struct, kw_only=True):
    """The tokens of the instruction and the speech, and of the text."""

    type: Literal["tokens"] = "tokens"
    input_tokens: int
    output_tokens: int
    total_tokens: int


class Transcript(msgspec.Struct, kw_only=True):
    """The text of the speech."""

    text: str
    usage: SpeechUsage


class TranscriptDelta(msgspec.Struct, kw_only=True):
    """An event of a stream: a piece of the text."""

    type: Literal["transcript.text.delta"] = "transcript.text.delta"
    delta: str


class TranscriptDone(msgspec.Struct, kw_only=True):
    """The last event of a stream: the whole text."""

    type: Literal["transcript.text.done"] = "transcript.text.done"
    text: str
    usage: SpeechUsage


SCHEMAS = (Transcript, TranscriptDelta, TranscriptDone)


FILE = "file"
_FIELDS = frozenset(SpeechForm.__struct_fields__)
_decoder = ReportingDecoder(SpeechForm)


@dataclass(frozen=True, slots=True)
class Speech:
    """A file with speech, and what is asked of it."""

    sound: bytes
    form: SpeechForm


def read_form(body: bytes, content_type: str) -> Speech:
    """Parse a whole body. Raises BadRequest that names the field."""
    reader = FormReader(content_type, FILE)
    fields: dict[str, Any] = {}
    sound = bytearray()
    for event in reader.feed(body):
        match event:
            case FormField(name, value):
                name = name.removesuffix("[]")  # of lists
                fields[name] = f"{fields[name]}, {value}" if name in fields else value
            case FileData(data):
                sound += data
            case FileBegin():
                pass
    reader.finish()
    if not sound:
        raise BadRequest("file is empty", param=FILE)
    _decoder.report(fields.keys() - _FIELDS)
    try:
        form = msgspec.convert(fields, SpeechForm, strict=False)
    except msgspec.ValidationError as error:
        raise explain(str(error)) from None
    _refuse(form)
    return Speech(bytes(sound), form)


def _refuse(form: SpeechForm) -> None:
    """Refuse options that a chat model cannot fulfil. Raises BadRequest."""
    if form.response_format not in ("json", "text"):
        raise unsupported("response_format", f"{form.response_format!r} is not supported here: use json or text")
    if form.include is not None:
        raise unsupported("include")
    if form.timestamp_granularities is not None:
        raise unsupported("timestamp_granularities")
    if form.chunking_strategy is not None:
        raise unsupported("chunking_strategy", "is not supported here: the model hears the file as a whole")


_encode = msgspec.json.Encoder().encode


class _Text:
    def __init__(self, counter: UsageCounter) -> None:
        self.said: list[str] = []
        self._counter = counter

    def take(self, row: Row) -> str:
        fin = row.fin
        texts = row.texts if fin is None or not fin.tail else [*row.texts, fin.tail]
        text = "".join(part.text for part in parts_of(texts) if part.kind == "content")
        self.said.append(text)
        self._counter.completion += len(row.ids)
        if fin is not None:
            self._counter.end(0, fin)
        return text

    def whole(self) -> str:
        """Return the text without the space that models begin and end with."""
        return "".join(self.said).strip()

    def usage(self) -> SpeechUsage:
        counter = self._counter
        prompt, text = counter.prompt, counter.completion
        return SpeechUsage(input_tokens=prompt, output_tokens=text, total_tokens=prompt + text)


class TranscriptWriter(WholeWriter):
    def __init__(self, counter: UsageCounter, form: ResponseFormat) -> None:
        self.open = 1
        self._text = _Text(counter)
        self._plain = form == "text"
        if self._plain:
            self.content_type = b"text/plain; charset=utf-8"

    def take(self, rows: list[Row]) -> None:
        for row in rows:
            self._text.take(row)
            if row.fin is not None:
                self.open -= 1

    def body(self) -> bytes:
        text = self._text.whole()
        if self._plain:
            return f"{text}\n".encode()
        return _encode(Transcript(text=text, usage=self._text.usage()))


class TranscriptEvents(StreamWriter):
    """Writes the transcript as events: its pieces, then all of it."""

    def __init__(self, counter: UsageCounter, form: ResponseFormat) -> None:
        self.open = 1
        self._text = _Text(counter)

    def events(self, rows: list[Row]) -> bytes:
        out: list[bytes] = []
        for row in rows:
            if text := self._text.take(row):
                out.append(_event(TranscriptDelta(delta=text)))
            if row.fin is not None:
                self.open -= 1
        return b"".join(out)

    def closing(self) -> bytes:
        return _event(TranscriptDone(text=self._text.whole(), usage=self._text.usage()))

    def failure(self, error: FrontendError) -> bytes:
        return b"data: " + error.body() + b"\n\n"


def _event(event: TranscriptDelta | TranscriptDone) -> bytes:
    return b"data: " + _encode(event) + b"\n\n"


Task = Literal["transcribe", "translate"]

_SOUND = "messages[0].content[0]"  # how the chat's errors name the file


class SpeechApi:
    """Plans one of both tasks."""

    def __init__(self, task: Task, chat: ChatAdapter, model_cache: ModelCache) -> None:
        self._task = task
        self._chat = chat
        self._model_cache = model_cache
        self.error_form = FrontendError.body

    async def plan(self, body: bytes, exchange: HttpExchange) -> Plan:
        content_type = exchange.header(b"content-type") or ""
        speech = await exchange.aside(partial(read_form, body, content_type))
        if speech.form.language is not None and self._task == "translate":
            raise BadRequest("language is a parameter of transcriptions, not of translations", param="language")
        model = await self._model_cache.get(speech.form.model)
        if "audio" not in model.card.media:
            raise BadRequest(
                f"{model.card.model!r} takes no sounds, so it cannot {self._task} speech",
                param="model",
                code="unsupported_media",
            )
        chat = await exchange.aside(partial(chat_of, speech, self._task))
        try:
            plan = await self._chat.plan_chat(chat, exchange, ChatOptions(id_prefix="transcr-"))
        except BadRequest as error:
            if error.param is None or not error.param.startswith(_SOUND):
                raise
            raise BadRequest(str(error).replace(error.param, FILE), param=FILE, code=error.code) from None
        writer = TranscriptEvents if speech.form.stream else TranscriptWriter
        return plan.answered_by(writer(plan.counter, speech.form.response_format))


def chat_of(speech: Speech, task: Task) -> ChatRequest:
    """Return the chat that asks for the text of the speech."""
    form = speech.form
    url = f"data:;base64,{base64.b64encode(speech.sound).decode()}"
    content: list[dict[str, Any]] = [
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "text", "text": instruction(form, task)},
    ]
    return ChatRequest(
        model=form.model,
        messages=[{"role": "user", "content": content}],
        temperature=form.temperature,
        top_p=form.top_p,
        seed=form.seed,
        max_completion_tokens=form.max_completion_tokens,
        stream=form.stream,
        user=form.user,
        include_reasoning=False,
    )


def instruction(form: SpeechForm, task: Task) -> str:
    if task == "translate":
        told = "Translate the speech in this recording into English. Answer with the translation only."
    else:
        spoken = f" The language is {form.language}." if form.language else ""
        told = f"Transcribe the speech in this recording, word for word.{spoken} Answer with the transcript only."
    return f"{told}\n{form.prompt}" if form.prompt else told


def _mount(site: Site) -> None:
    tasks: dict[str, Task] = {"/v1/audio/transcriptions": "transcribe", "/v1/audio/translations": "translate"}
    for path, task in tasks.items():
        site.generate(path, SpeechApi(task, chat_api(site), site.model_cache), takes_form=True)


_FORM: dict[str, Any] = {
    "file": {"type": "string", "format": "binary"},
    "model": {"type": "string"},
    "prompt": {"type": "string", "maxLength": 4096},
    "response_format": {"type": "string", "enum": ["json", "text"]},
    "temperature": {"type": "number", "minimum": 0, "maximum": 1},
    "stream": {"type": "boolean"},
}


def _paths() -> dict[str, Any]:
    def asking(summary: str, fields: dict[str, Any]) -> dict[str, Any]:
        schema = {"type": "object", "required": ["file"], "properties": fields}
        answer = json_answer("the text; with `stream` server-sent events", "Transcript")
        answer["content"]["text/plain"] = {"schema": {"type": "string"}}
        answer["content"]["text/event-stream"] = {"schema": {"type": "string"}}
        body = {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
        return {"post": {**operation(summary, {"200": answer, **all_errors()}), "requestBody": body}}

    return {
        "/v1/audio/transcriptions": asking("Transcribe speech", _FORM | {"language": {"type": "string"}}),
        "/v1/audio/translations": asking("Translate speech into English", _FORM),
    }


API = HttpApi(mount=_mount, paths=_paths, types=SCHEMAS)
