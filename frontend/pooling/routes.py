"""Maps paths to the pooling APIs: the official paths and vLLM's short ones."""

from __future__ import annotations

from headrace.frontend.generation.endpoint import Api
from headrace.frontend.pooling.embeddings import ClassifyApi, EmbeddingApi, PoolingApi
from headrace.frontend.pooling.scoring import RerankApi, ScoreApi
from headrace.frontend.prompts.model_cache import ModelCache
from headrace.frontend.settings import FrontendSettings


def pooling_routes(model_cache: ModelCache, settings: FrontendSettings) -> dict[str, Api]:
    """Return the APIs by path. All routes are POST only."""
    rerank = RerankApi(model_cache, settings)
    score = ScoreApi(model_cache, settings)
    classify = ClassifyApi(model_cache, settings)
    pooling = PoolingApi(model_cache, settings)
    return {
        "/v1/embeddings": EmbeddingApi(model_cache, settings),
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
