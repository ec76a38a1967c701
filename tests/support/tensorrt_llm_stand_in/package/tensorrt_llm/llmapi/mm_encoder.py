"""The stand-in's encoder: handles and hashes of the media of a prompt."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any

from tensorrt_llm.disaggregated_params import DisaggregatedParams
from tensorrt_llm.executor.result import GenerationResult, Response
from tensorrt_llm.sampling_params import SamplingParams
from tensorrt_llm.version import IS_1_3

from .llm import HANDLES


class MultimodalEncoder:
    def __init__(
        self,
        model: str | Path,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        **kwargs: Any,
    ) -> None:
        self._running = True

    def generate_async(self, inputs: Any, sampling_params: SamplingParams | None = None) -> GenerationResult:
        if not self._running:
            raise RuntimeError("LLM is shutting down")
        if not isinstance(inputs, dict) or "prompt" not in inputs or not inputs.get("multi_modal_data"):
            raise TypeError("an encoder takes a prompt and multi_modal_data")
        handles, hashes = [], []
        for items in inputs["multi_modal_data"].values():
            for item in items:
                digest = blake2b(repr(item).encode(), digest_size=32).digest()
                HANDLES.add(digest.hex())
                handles.append({"handle": digest.hex(), "tensor_size": (4, 8), "storage_handle": digest[:8]})
                hashes.append([int.from_bytes(digest[at : at + 4], "little", signed=True) for at in range(0, 32, 4)])
        result = GenerationResult(0, [], sampling_params, streaming=False, abort=lambda _: None)
        result.mm_embedding_handle = handles[0]
        params = DisaggregatedParams(multimodal_embedding_handles=handles, multimodal_hashes=hashes)
        if not IS_1_3:
            params.multimodal_embedding_handles = (handles,)  # type: ignore[assignment]  # as 1.2 does
        result.put(Response(finish="length", disagg=params))
        return result

    def shutdown(self) -> None:
        self._running = False
