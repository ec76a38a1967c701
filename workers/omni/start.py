"""Starts vLLM-Omni: its stages from the operator's settings, and the description of the stage that writes text."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from headrace.workers.engine import EngineConfig, EngineInfo
from headrace.workers.errors import EngineStartFailed

TEXT = "text"
_OURS = {"model": "--model", "served_model_name": "--served-name", "seed": "--seed", "output_modalities": "this adapter"}


@dataclass(frozen=True, slots=True)
class StartedStages:
    """A running AsyncOmni, and the description of its first stage."""

    omni: Any
    info: EngineInfo


def start_stages(config: EngineConfig) -> StartedStages:
    """Import vLLM-Omni and wait until all stages are ready. Blocks for minutes. Raises EngineStartFailed."""
    try:
        package = import_module("vllm_omni")
    except ImportError as error:
        raise EngineStartFailed(f"vLLM-Omni is not installed or broken ({error}): pip install vllm-omni") from error
    for name in _OURS.keys() & config.args.keys():
        raise EngineStartFailed(f"{name!r} is not an engine setting here: it belongs to {_OURS[name]}")
    try:
        omni = package.AsyncOmni(model=config.model, seed=config.seed, **config.args)
    except Exception as error:
        raise EngineStartFailed(f"vLLM-Omni could not start {config.model}: {error}") from error
    try:
        return StartedStages(omni, _describe(omni, str(package.__version__)))
    except BaseException:
        omni.shutdown()
        raise


def _describe(omni: Any, version: str) -> EngineInfo:
    """Describe the first stage. Raises EngineStartFailed unless that is the one that writes text."""
    vllm_config = omni.vllm_config
    if vllm_config is None or not omni.output_modalities or omni.output_modalities[0] != TEXT:
        made = ", ".join(str(kind) for kind in omni.output_modalities) or "nothing"
        raise EngineStartFailed(f"the first stage of {omni.model} writes no text; its stages give: {made}")
    model, cache = vllm_config.model_config, vllm_config.cache_config
    folder = Path(model.tokenizer)
    if not (folder / "tokenizer.json").is_file():
        raise EngineStartFailed(f"{model.tokenizer} is no folder with a tokenizer.json; give the model as a folder")
    return EngineInfo(
        engine="omni",
        version=version,
        tokenizer_dir=str(folder),
        context_length=model.max_model_len,
        block_size=cache.block_size,
        blocks=cache.num_gpu_blocks or 0,
        slots=vllm_config.scheduler_config.max_num_seqs,
        vocab_size=model.get_vocab_size(),
        eos_token_ids=_eos_ids(omni),
        default_sampling=model.get_diff_sampling_param(),
        extra={"stages": list(omni.output_modalities)},
    )


def _eos_ids(omni: Any) -> tuple[int, ...]:
    configured = omni.model_config.try_get_generation_config().get("eos_token_id") or ()
    ids = [omni.renderer.get_eos_token_id(), *([configured] if isinstance(configured, int) else configured)]
    return tuple(dict.fromkeys(token for token in ids if token is not None))
