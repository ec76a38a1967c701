"""The requests and answers of Ollama's API. Names are Ollama's; unknown fields are ignored, as everywhere.

Options that only tune how Ollama itself loads and runs a model are accepted and have no effect.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.frontend.answer_schema import UNSET, ContentLogprob, UnsetType
from headrace.frontend.chat_schema import MAX_LOGPROBS, Int64, Penalty, TokenId, Tool
from headrace.frontend.errors import FrontendError

ModelName = Annotated[str, Meta(min_length=1, max_length=512)]
KeepAlive = int | float | str | None
Think = bool | Literal["low", "medium", "high", "max"]
Format = str | dict[str, Any]


class OllamaOptions(msgspec.Struct, kw_only=True):
    """The sampling options. A `num_predict` of 0 or less means: as many tokens as fit."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Int64 | None = None  # below 0 = a random one
    num_predict: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    stop: str | list[str] | None = None
    # refused, if they ask for something
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: int | None = None


class OllamaFunction(msgspec.Struct, kw_only=True):
    """A called function."""

    name: Annotated[str, Meta(min_length=1)]
    arguments: dict[str, Any] | None = None


class OllamaCall(msgspec.Struct, kw_only=True):
    """A tool call."""

    function: OllamaFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    """A message of a conversation. `images` are base64."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaRequest(msgspec.Struct, kw_only=True):
    """The fields of chats and prompts. Answers are streamed unless `stream` is false."""

    model: ModelName
    stream: bool | None = None
    format: Format | None = None  # "json" or a JSON schema
    options: OllamaOptions | None = None
    think: Think | None = None
    keep_alive: KeepAlive = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """A conversation to be answered. Without messages the answer says that the model is loaded."""

    messages: list[OllamaMessage] | None = None
    tools: list[Tool] | None = None


class OllamaPromptRequest(OllamaRequest, kw_only=True):
    """A prompt to be answered. With `raw` it is not put into the model's template. Without one as for a chat."""

    prompt: str | None = None
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[TokenId] | None = None


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    """Texts to be embedded. They are cut at the context length unless `truncate` is false."""

    model: ModelName
    input: str | list[str]
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    keep_alive: KeepAlive = None


class OllamaVectorRequest(msgspec.Struct, kw_only=True):
    """A text to be embedded, in the older form."""

    model: ModelName
    prompt: str
    keep_alive: KeepAlive = None


class OllamaShowRequest(msgspec.Struct, kw_only=True):
    """A model to be described. `name` is an older name of `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class OllamaCounts(msgspec.Struct, kw_only=True):
    """The record of an answer, which every line repeats; the last line has all of it. Durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool = True
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[ContentLogprob] | UnsetType = UNSET


class OllamaCalledFunction(msgspec.Struct, kw_only=True):
    """A function that the model calls. `index` counts the calls of an answer."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCalled(msgspec.Struct, kw_only=True):
    """A tool call by the model."""

    id: str
    function: OllamaCalledFunction


class OllamaSaid(msgspec.Struct, kw_only=True):
    """A message of the model, or the piece of it that a line brings."""

    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCalled] | UnsetType = UNSET


class OllamaChatAnswer(OllamaCounts, kw_only=True):
    """The answer of `POST /api/chat`."""

    message: OllamaSaid


class OllamaPromptAnswer(OllamaCounts, kw_only=True):
    """The answer of `POST /api/generate`."""

    response: str
    thinking: str | UnsetType = UNSET


class OllamaEmbedAnswer(msgspec.Struct, kw_only=True):
    """The answer of `POST /api/embed`."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaVectorAnswer(msgspec.Struct, kw_only=True):
    """The answer of `POST /api/embeddings`."""

    embedding: list[float]


class OllamaDetails(msgspec.Struct, kw_only=True):
    """Details of a model's files, which are not known here."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(msgspec.Struct, kw_only=True):
    """A served model. Its size is not known; `digest` changes with its card."""

    name: str
    model: str
    modified_at: str
    size: int = 0
    digest: str
    details: OllamaDetails
    expires_at: str | UnsetType = UNSET
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class OllamaModels(msgspec.Struct, kw_only=True):
    """The answer of `GET /api/tags` and `/api/ps`."""

    models: list[OllamaModel]


class OllamaShown(msgspec.Struct, kw_only=True):
    """The answer of `POST /api/show`."""

    modified_at: str
    license: str = ""
    modelfile: str = ""
    parameters: str = ""
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]


class OllamaVersion(msgspec.Struct, kw_only=True):
    """The answer of `GET /api/version`: the version of Ollama whose API is spoken, and that of Headrace."""

    version: str
    headrace: str


class OllamaFault(msgspec.Struct, kw_only=True):
    """The shape of every error, also as the last line of a stream that broke."""

    error: str


SCHEMAS: tuple[type[msgspec.Struct], ...] = (
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaEmbedAnswer,
    OllamaEmbedRequest,
    OllamaFault,
    OllamaModels,
    OllamaPromptAnswer,
    OllamaPromptRequest,
    OllamaShown,
    OllamaShowRequest,
    OllamaVectorAnswer,
    OllamaVectorRequest,
    OllamaVersion,
)


PREFIX = "/api/"

# names of parameters in the chat that a request became → in the request
_NAMES = {
    "max_tokens": "options.num_predict",
    "stop": "options.stop",
    "temperature": "options.temperature",
    "response_format.json_schema.schema": "format",
    "structured_outputs": "format",
    "response_format": "format",
}


class OllamaForm:
    """The error form of Ollama's API: one sentence, which names the parameter."""

    def __call__(self, error: FrontendError, /) -> bytes:
        message = str(error)
        param = _NAMES.get(error.param or "", error.param)
        if param is not None and param not in message:
            message = f"{param}: {message}"
        return msgspec.json.encode(OllamaFault(error=message))
