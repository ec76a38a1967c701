"""Which paths lead to which pooling API: the official ones and vLLM's short ones."""

from __future__ import annotations

from headrace.frontend.generation.endpoint import Api
from headrace.frontend.pooling.embeddings import ClassifyApi, EmbeddingApi, PoolingApi
from headrace.frontend.pooling.scoring import RerankApi, ScoreApi
from headrace.frontend.prompts.model_cache import ModelCache
from headrace.frontend.settings import FrontendSettings


def pooling_routes(shelf: ModelCache, settings: FrontendSettings) -> dict[str, Api]:
    """Path → API; POST only."""
    rerank, score, classify = RerankApi(shelf, settings), ScoreApi(shelf, settings), ClassifyApi(shelf, settings)
    pooling = PoolingApi(shelf, settings)
    return {
        "/v1/embeddings": EmbeddingApi(shelf, settings),
        "/v1/rerank": rerank,
        "/v2/rerank": rerank,
        "/rerank": rerank,
        "/v1/score": score,
        "/score": score,
        "/v1/classify": classify,
        "/classify": classify,
        "/v1/pooling": pooling,
        "/pooling": pooling,
    }
