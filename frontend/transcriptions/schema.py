"""Types of the routes for transcriptions and translations: the fields of the form, and the answer."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

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
