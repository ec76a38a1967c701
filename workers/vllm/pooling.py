"""Runs vLLM as a pooling engine: embeddings, classes and scores of pairs.

vLLM decides by itself whether a model generates or pools (`runner="auto"`). Before it starts the answer is guessed from the
model's files; a wrong guess costs only KV events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from headrace.workers.engine import EngineConfig, Pooled, PoolItem
from headrace.workers.errors import EngineError, EngineStartFailed, RequestInvalid, UnsupportedByEngine
from headrace.workers.model_files import architectures
from headrace.workers.vllm.load_meter import LoadMeter

_GENERATING = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel")
_TASKS = {"embedding": "embed", "score": "classify", "classify": "classify"}


def pools(config: EngineConfig) -> bool:
    """Return whether vLLM will pool with this model, as far as settings and files tell."""
    runner = config.args.get("runner", "auto")
    if runner != "auto":
        return bool(runner == "pooling")
    if config.args.get("convert", "auto") in ("embed", "classify"):
        return True
    folder = Path(config.model)
    modules = folder / "modules.json"
    if (folder / "1_Pooling").is_dir() or (modules.is_file() and b"models.Pooling" in modules.read_bytes()):
        return True
    named = architectures(config.model)
    return bool(named) and not any(name.endswith(_GENERATING) for name in named)


def pooling_kinds(model: Any, tasks: tuple[str, ...]) -> tuple[str, ...]:
    """Return the kinds that a started pooling vLLM can serve. Raises EngineStartFailed if Headrace serves none of them."""
    task = model.get_pooling_task(tasks)
    if task == "embed":
        return ("embedding",)
    if task == "classify":
        return ("score", "classify") if _scores_pairs(model) else ("classify",)
    raise EngineStartFailed(f"{model.model} is for {', '.join(tasks) or 'nothing'}; embed and classify are served")


def _scores_pairs(model: Any) -> bool:
    """Return whether the model scores pairs: it has one class, and its tokenizer alone joins the two texts."""
    if getattr(model.hf_config, "num_labels", 0) != 1 or not model.use_sep_token:
        return False
    from vllm.model_executor.model_loader import get_model_cls
    from vllm.model_executor.models.interfaces import supports_score_template

    return not supports_score_template(get_model_cls(model))


def class_labels(model: Any) -> tuple[str, ...]:
    """Return the names of the classes, by number; empty for a model without names."""
    names: Mapping[int, str] = getattr(model.hf_config, "id2label", None) or {}
    return tuple(str(names[i]) for i in range(len(names))) if set(names) == set(range(len(names))) else ()


class VllmPooling:
    def __init__(self, llm: Any, kinds: tuple[str, ...], meter: LoadMeter, translate: Callable[[BaseException], BaseException]):
        self._llm = llm
        self._kinds = kinds
        self._tasks = {_TASKS[kind] for kind in kinds}
        self._meter = meter
        self._translate = translate
        # Only such models accept token types; any other model that gets them crashes its whole engine.
        self._segments = "score" in kinds and getattr(llm.vllm_config.model_config.hf_config, "type_vocab_size", 0) > 1
        self._priority = llm.vllm_config.scheduler_config.policy == "priority"
        self.running = 0

    async def pool(self, item: PoolItem) -> Pooled:
        """Compute the vector of an input, as `Engine.pool` does."""
        if item.task not in self._tasks:
            raise UnsupportedByEngine(f"this vLLM serves {', '.join(self._kinds)}, not {item.task}")
        if item.adapter is not None:
            raise UnsupportedByEngine("this vLLM worker does not serve adapters for vectors")
        self.running += 1
        self._meter.queued(item.id, len(item.token_ids))
        try:
            return await self._encode(item)
        except Exception as error:
            translated = self._translate(error)
            if translated is error:
                raise
            raise translated from error
        finally:
            self.running -= 1
            self._meter.gone(item.id)

    async def _encode(self, item: PoolItem) -> Pooled:
        from vllm.inputs import tokens_input

        params = to_pooling_params(item, segments=self._segments)
        priority = item.priority if self._priority else 0
        async with aclosing(self._llm.encode(tokens_input(item.token_ids), params, item.id, priority=priority)) as results:
            async for result in results:
                if result.error is not None:
                    failed = EngineError(f"vLLM gave up on the input: {result.error}")
                    failed.retriable = True
                    raise failed
                if result.finished:
                    cached = min(result.num_cached_tokens or 0, len(item.token_ids))
                    self._meter.prefilled(item.id, len(item.token_ids) - cached)
                    return Pooled(to_bytes(result.outputs.data), cached)
        raise EngineError("vLLM ended an input without a result")


def to_pooling_params(item: PoolItem, *, segments: bool) -> Any:
    """Make vLLM's `PoolingParams`. `segments`: the model tells the texts of a pair by token types, and no other takes these.

    Raises RequestInvalid for settings that vLLM has no place for."""
    from vllm import PoolingParams

    if item.extra:
        name = min(item.extra)
        raise RequestInvalid(f"vLLM knows no setting {name!r} for vectors", param=name)
    extra = {"compressed_token_type_ids": item.second} if segments and item.second is not None else {}
    return PoolingParams(task=item.task, dimensions=item.dimensions, use_activation=item.normalize, extra_kwargs=extra or None)


def to_bytes(tensor: Any) -> bytes:
    """Return a tensor of any float type as f32, little endian."""
    data: bytes = tensor.detach().float().cpu().contiguous().numpy().astype("<f4").tobytes()
    return data
