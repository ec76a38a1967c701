"""The stand-in's `LLM`: arguments and checks of the real one, in front of the stand-in's engine."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from tensorrt_llm.executor.core import Executor
from tensorrt_llm.executor.request import DEFAULT_REQUEST_PRIORITY
from tensorrt_llm.executor.result import GenerationResult as RequestOutput
from tensorrt_llm.executor.result import IterationResult, Reports
from tensorrt_llm.sampling_params import SamplingParams
from tensorrt_llm.version import IS_1_3
from tests.support.tensorrt_llm_stand_in import vocabulary_of

from .llm_args import TorchLlmArgs


class LLM:
    """`model_kwargs["stand_in"]` has the stand-in's own options: timing, mean_output_tokens, blocks, faults."""

    def __init__(
        self,
        model: str | Path,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        for name in kwargs:
            if name not in TorchLlmArgs.model_fields and name != "_mpi_session":
                raise ValueError(f"{type(self).__name__} got invalid argument: {name}")
        self.args: Any = TorchLlmArgs(
            model=model, tokenizer=tokenizer, tensor_parallel_size=tensor_parallel_size, dtype=dtype, **kwargs
        )
        options = (self.args.model_kwargs or {}).get("stand_in", {})
        if options.get("fails_to_start"):
            raise RuntimeError(options["fails_to_start"])
        self._vocabulary = vocabulary_of(str(model))
        self._executor: Executor | None = Executor(self.args, self._vocabulary, options)

    def generate_async(self, inputs: Any, sampling_params: SamplingParams | None = None, **options: Any) -> RequestOutput:
        raise NotImplementedError  # replaced below: its arguments differ by release line

    def _generate(self, inputs: Any, sampling_params: SamplingParams | None, **options: Any) -> RequestOutput:
        if self._executor is None or self._executor.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        params = sampling_params or SamplingParams()
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params is a {type(params).__name__}")
        disagg = options.pop("disaggregated_params", None)
        if params.end_id is None:
            params.end_id = params.pad_id = self._vocabulary.eos
        elif params.bad is not None:
            raise RuntimeError("bad words are not tokenised where end_id is given")
        self._check_handover(params, disagg)
        prompt = inputs.get("prompt_token_ids") if isinstance(inputs, dict) else inputs
        if not isinstance(prompt, list) or not prompt or not all(isinstance(one, int) for one in prompt):
            raise TypeError(f"the inputs must be a list of token ids, not {type(inputs).__name__}")
        self._check_length(len(prompt), fetched=disagg is not None and disagg.request_type == "generation_only")
        if params.guided_decoding is not None and self.args.guided_decoding_backend is None:
            raise ValueError("guided decoding needs guided_decoding_backend")
        lora = options.pop("lora_request", None)
        if lora is not None and self.args.lora_config is None:
            raise ValueError("a LoRA request needs lora_config")
        scheduling = options.pop("scheduling_params", None)
        priority = options.pop("priority", DEFAULT_REQUEST_PRIORITY)
        if not 0.0 <= priority <= 1.0:
            raise ValueError(f"priority is {priority}, not from 0 to 1")
        return self._executor.submit(
            prompt,
            params,
            streaming=options.pop("streaming", False),
            lora=lora,
            disagg=disagg,
            rank=scheduling.attention_dp_rank if scheduling is not None else None,
            salt=options.pop("cache_salt", None),
            priority=priority,
        )

    def _check_handover(self, params: SamplingParams, disagg: Any) -> None:
        if disagg is None:
            return
        if disagg.request_type == "context_only":
            if not self.args.disable_overlap_scheduler:
                raise ValueError("context-only requests need disable_overlap_scheduler")
            params.max_tokens = 1
        if disagg.request_type in ("context_only", "generation_only") and self.args.cache_transceiver_config is None:
            raise ValueError("a hand-over needs cache_transceiver_config")

    def _check_length(self, length: int, *, fetched: bool) -> None:
        if not self.args.enable_chunked_prefill and not fetched and length > self.args.max_num_tokens:
            raise ValueError(f"the prompt has {length} tokens, max_num_tokens is {self.args.max_num_tokens}")
        if length >= self.args.max_seq_len:
            raise ValueError(f"the prompt has {length} tokens, max_seq_len is {self.args.max_seq_len}")

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        return self._drained(self._engine().stats_reports)

    def get_stats_async(self, timeout: float | None = 2) -> IterationResult:
        return IterationResult(self._engine().stats_reports, timeout, sticky=not IS_1_3)

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        return self._drained(self._engine().kv_reports or Reports(1))

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> IterationResult:
        assert self._engine().submitted, "KV Event IterationResult is not properly instantiated."
        return IterationResult(self._engine().kv_reports or Reports(1), timeout, sticky=not IS_1_3)

    def shutdown(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def _engine(self) -> Executor:
        if self._executor is None:
            raise RuntimeError("LLM is shutting down")
        return self._executor

    @staticmethod
    def _drained(reports: Reports) -> list[dict[str, Any]]:
        found = list(reports.items)
        reports.items.clear()
        return found


def _generate_1_2(
    self: LLM,
    inputs: Any,
    sampling_params: SamplingParams | None = None,
    lora_request: Any = None,
    prompt_adapter_request: Any = None,
    streaming: bool = False,
    kv_cache_retention_config: Any = None,
    disaggregated_params: Any = None,
    _postproc_params: Any = None,
    scheduling_params: Any = None,
    cache_salt: str | None = None,
) -> RequestOutput:
    return self._generate(
        inputs,
        sampling_params,
        lora_request=lora_request,
        streaming=streaming,
        disaggregated_params=disaggregated_params,
        scheduling_params=scheduling_params,
        cache_salt=cache_salt,
    )


def _generate_1_3(
    self: LLM,
    inputs: Any,
    sampling_params: SamplingParams | None = None,
    lora_request: Any = None,
    prompt_adapter_request: Any = None,
    streaming: bool = False,
    kv_cache_retention_config: Any = None,
    disaggregated_params: Any = None,
    trace_headers: Any = None,
    _postproc_params: Any = None,
    scheduling_params: Any = None,
    conversation_params: Any = None,
    cache_salt: str | None = None,
    priority: float = DEFAULT_REQUEST_PRIORITY,
) -> RequestOutput:
    return self._generate(
        inputs,
        sampling_params,
        lora_request=lora_request,
        streaming=streaming,
        disaggregated_params=disaggregated_params,
        scheduling_params=scheduling_params,
        cache_salt=cache_salt,
        priority=priority,
    )


LLM.generate_async = _generate_1_3 if IS_1_3 else _generate_1_2  # type: ignore[method-assign]
assert "cache_salt" in inspect.signature(LLM.generate_async).parameters
