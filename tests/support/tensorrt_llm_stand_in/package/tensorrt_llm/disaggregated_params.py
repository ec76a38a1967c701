"""Parameters of requests that are served by two engines (1.2; 1.3 adds fields)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .version import IS_1_3

_TYPES = ("context_only", "generation_only", "context_and_generation")


def _check(params: Any) -> None:
    if params.request_type is not None:
        params.request_type = params.request_type.lower()
        if params.request_type not in _TYPES:
            raise ValueError(f"request_type is {params.request_type}, not one of {', '.join(_TYPES)}")


if IS_1_3:

    @dataclass(slots=True, kw_only=True)
    class DisaggregatedParams:
        request_type: str | None = None
        first_gen_tokens: list[int] | None = None
        first_gen_log_probs: list[Any] | None = None
        first_gen_logits: list[Any] | None = None
        ctx_request_id: int | None = None
        opaque_state: bytes | None = None
        draft_tokens: list[int] | None = None
        disagg_request_id: int | None = None
        ctx_dp_rank: int | None = None
        ctx_info_endpoint: str | None = None
        schedule_style: Any = None
        ctx_usage: dict[str, Any] | None = None
        multimodal_embedding_handles: list[dict[str, Any]] | None = None
        multimodal_hashes: list[list[int]] | None = None
        mrope_position_ids_handle: dict[str, Any] | None = None
        mrope_position_deltas_handle: dict[str, Any] | None = None

        def __post_init__(self) -> None:
            _check(self)

else:

    @dataclass(slots=True, kw_only=True)
    class DisaggregatedParams:  # type: ignore[no-redef]
        request_type: str | None = None
        first_gen_tokens: list[int] | None = None
        ctx_request_id: int | None = None
        opaque_state: bytes | None = None
        draft_tokens: list[int] | None = None
        multimodal_embedding_handles: list[dict[str, Any]] | None = None
        multimodal_hashes: list[list[int]] | None = None

        def __post_init__(self) -> None:
            _check(self)
