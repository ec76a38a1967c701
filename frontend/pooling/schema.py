"""The bodies of the pooling routes: OpenAI's for embeddings, Jina's and Cohere's for rerank, vLLM's for the others."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.frontend.answer_schema import UNSET, UnsetType

Inputs = str | Annotated[list[str | int | list[int]], Meta(min_length=1)]  # a text, ids, or a list of either
Text = str | dict[str, Any]
Texts = Text | Annotated[list[Text], Meta(min_length=1)]


class PoolingBase(msgspec.Struct, kw_only=True):
    """The fields of all pooling requests. `None` always means: not given."""

    model: Annotated[str, Meta(min_length=1, max_length=512)] | None = None  # None = the only one that is served
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1 = to the context length
    truncation_side: Literal["left", "right"] | None = None  # the side to cut off; None = right
    add_special_tokens: bool | None = None
    use_activation: bool | None = None
    normalize: bool | None = None  # older name of use_activation
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None  # lower is sooner
    service_tier: str | None = None
    timeout: Annotated[float, Meta(gt=0)] | None = None  # seconds; the header x-request-timeout-s wins
    vllm_xargs: dict[str, Any] | None = None
    user: str | None = None


class EmbeddingRequest(PoolingBase, kw_only=True):
    """The request of `POST /v1/embeddings`."""

    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    embed_dtype: str | None = None
    endianness: str | None = None
    messages: Any = None


class ClassifyRequest(PoolingBase, kw_only=True):
    """The request of `POST /v1/classify`."""

    input: Inputs
    messages: Any = None


class PoolingRequest(PoolingBase, kw_only=True):
    """The request of `POST /pooling`, for plain vectors."""

    input: Inputs
    task: Literal["embed", "classify", "token_embed", "token_classify", "plugin"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: str | None = None
    endianness: str | None = None
    messages: Any = None


class ScoringBase(PoolingBase, kw_only=True):
    """The common fields of score and rerank requests."""

    max_tokens_per_query: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None  # longer queries are truncated; 0 = none
    max_tokens_per_doc: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ScoreRequest(ScoringBase, kw_only=True):
    """The request of `POST /v1/score`: one text with many, or pairs of texts. Both sides have several names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None


class RerankRequest(ScoringBase, kw_only=True):
    """The request of `POST /v1/rerank`. `top_n` 0 = all."""

    query: Text
    documents: Annotated[list[Text], Meta(min_length=1)]
    top_n: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    return_documents: bool | None = None  # None = yes


# -- answers, for `/openapi.json`; vectors are written without these ------------------------------------------


class PoolingUsage(msgspec.Struct, kw_only=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None
    completion_tokens_details: None = None


class Embedding(msgspec.Struct, kw_only=True):
    """The vector of an input: numbers, or base64 of f32 little endian."""

    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str


class EmbeddingAnswer(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/embeddings`, in the order of the inputs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage


class PooledData(msgspec.Struct, kw_only=True):
    """The vector of an input: numbers, or base64 of f32 little endian."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float] | str


class PoolingAnswer(msgspec.Struct, kw_only=True):
    """The answer of `POST /pooling`."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PooledData]
    usage: PoolingUsage


class Score(msgspec.Struct, kw_only=True):
    """The similarity of two texts."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreAnswer(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/score`."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class RankedDocument(msgspec.Struct, kw_only=True):
    """A document of the request."""

    text: str
    multi_modal: None = None


class Ranked(msgspec.Struct, kw_only=True):
    """A ranked document: its index in the request, and its relevance to the query."""

    index: int
    document: RankedDocument | UnsetType = UNSET
    relevance_score: float


class RerankUsage(msgspec.Struct, kw_only=True):
    """Tokens of all pairs."""

    prompt_tokens: int
    total_tokens: int


class RerankAnswer(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/rerank`, best first."""

    id: str
    model: str
    usage: RerankUsage
    results: list[Ranked]


class ClassData(msgspec.Struct, kw_only=True):
    """The class of an input: the most likely one, and the probabilities of all."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassifyAnswer(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/classify`."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassData]
    usage: PoolingUsage
