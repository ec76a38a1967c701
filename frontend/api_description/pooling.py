"""Describes the routes of vectors and scores."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.frontend.api_description.operations import generation
from headrace.frontend.pooling.schema import (
    ClassifyAnswer,
    ClassifyRequest,
    EmbeddingAnswer,
    EmbeddingRequest,
    PoolingAnswer,
    PoolingRequest,
    RerankAnswer,
    RerankRequest,
    ScoreAnswer,
    ScoreRequest,
)

TYPES: tuple[type[msgspec.Struct], ...] = (
    EmbeddingRequest,
    EmbeddingAnswer,
    PoolingRequest,
    PoolingAnswer,
    ClassifyRequest,
    ClassifyAnswer,
    ScoreRequest,
    ScoreAnswer,
    RerankRequest,
    RerankAnswer,
)


def paths() -> dict[str, Any]:
    """Return the paths of the pooling routes."""
    routes = {
        ("/v1/embeddings",): ("Embed inputs", "EmbeddingRequest", "EmbeddingAnswer"),
        ("/v1/score", "/score"): ("Score pairs of texts", "ScoreRequest", "ScoreAnswer"),
        ("/v1/rerank", "/v2/rerank", "/rerank"): ("Order documents by a query", "RerankRequest", "RerankAnswer"),
        ("/v1/classify", "/classify"): ("Classify inputs", "ClassifyRequest", "ClassifyAnswer"),
        ("/v1/pooling", "/pooling"): ("The plain vectors of inputs", "PoolingRequest", "PoolingAnswer"),
    }
    return {path: {"post": generation(*texts, streams=False)} for names, texts in routes.items() for path in names}
