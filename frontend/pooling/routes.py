"""Which paths lead to which pooling API: the official ones and vLLM's short ones."""

from __future__ import annotations

from frontend.generate import Api
from frontend.pooling.embeddings import ClassifyApi, EmbeddingApi, PoolingApi
from frontend.pooling.scoring import RerankApi, ScoreApi
from frontend.settings import FrontendSettings
from frontend.shelf import ModelShelf


def pooling_routes(shelf: ModelShelf, settings: FrontendSettings) -> dict[str, Api]:
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
