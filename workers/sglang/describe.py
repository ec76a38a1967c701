"""Describes a started SGLang: what it serves, how much of it, and what it can do. Runs in the child process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.workers.engine import Capabilities, EngineConfig, EngineInfo, several
from headrace.workers.kit import ADAPTER_OPERATIONS, GUIDED, end_tokens, node_part
from headrace.workers.lora import adapters_of
from headrace.workers.model_files import tokenizer_folder
from headrace.workers.sglang.disagg_rendezvous import (
    bootstrap_address,
    handover_word,
    hands_over,
    reachable_host,
    role_of,
    with_handovers,
)
from headrace.workers.sglang.settings import ranks

OPERATIONS = frozenset({"reset_prefix_cache"})
PAUSE_OPERATIONS = frozenset({"pause", "resume", "is_paused"})  # of an engine that generates


def describe(engine: Any, config: EngineConfig, version: str) -> EngineInfo:
    """Return the description of a started engine. Raises EngineStartFailed for a model that Headrace cannot serve."""
    args, manager = engine.server_args, engine.tokenizer_manager
    model = manager.model_config
    scheduler: Mapping[str, Any] = engine._scheduler_init_result.scheduler_infos[0]
    tokens = int(scheduler["max_total_num_tokens"])
    return EngineInfo(
        engine="sglang",
        version=version,
        tokenizer_dir=str(
            tokenizer_folder(str(args.tokenizer_path or args.model_path), args.revision, lambda: manager.tokenizer)
        ),
        # The longest prompt that the scheduler takes has a token less than this.
        context_length=min(model.context_len, int(scheduler["max_req_input_len"])),
        block_size=args.page_size,
        blocks=tokens // args.page_size * ranks(config),
        slots=_slots(engine),
        ranks=ranks(config),
        parallel=several(tensor=args.tp_size, pipeline=args.pp_size, expert=args.ep_size),
        vocab_size=model.vocab_size,
        eos_token_ids=end_tokens(
            getattr(manager.tokenizer, "eos_token_id", None), sorted(manager.model_config.hf_eos_token_id or ())
        ),
        kinds=("chat", "completion") if model.is_generation else ("embedding",),
        step_tokens=_step_tokens(args),
        adapters=tuple(adapters_of(config)),
        **_handovers(engine, version),
        default_sampling={} if not model.is_generation else _default_sampling(model),
        extra={"dtype": str(model.dtype).removeprefix("torch."), "kv_cache_tokens": tokens},
    )


def describe_follower(engine: Any, config: EngineConfig, version: str) -> EngineInfo:
    scheduler: Mapping[str, Any] = engine._scheduler_init_result.scheduler_infos[0]
    return node_part(
        "sglang",
        version,
        context_length=int(scheduler["max_req_input_len"]),
        block_size=engine.server_args.page_size,
        blocks=int(scheduler["max_total_num_tokens"]) // engine.server_args.page_size,
        node_rank=config.args["node_rank"],
    )


def capabilities(engine: Any) -> Capabilities:
    """Return what the engine can do as it was started; KV events are added by the worker's side."""
    args = engine.server_args
    priority = bool(args.enable_priority_scheduling)
    if not engine.tokenizer_manager.model_config.is_generation:
        return Capabilities(resume=False, seeds=False, priority=priority, operations=OPERATIONS)
    return Capabilities(
        seeds=honours_seeds(engine),
        resume_penalties=bool(args.disable_overlap_schedule),
        resume_repetition=bool(args.disable_overlap_schedule),
        logprobs=True,
        prompt_logprobs=True,
        guided=frozenset() if args.grammar_backend == "none" or args.skip_tokenizer_init else GUIDED,
        lora="dynamic" if args.enable_lora else "none",
        cache_salt=True,
        priority=priority,
        operations=OPERATIONS | PAUSE_OPERATIONS | (ADAPTER_OPERATIONS if args.enable_lora else frozenset()),
        **with_handovers(role_of(args.disaggregation_mode)),
    )


def _handovers(engine: Any, version: str) -> dict[str, Any]:
    args, model = engine.server_args, engine.tokenizer_manager.model_config
    role = role_of(args.disaggregation_mode)
    if not hands_over(role):
        return {}
    parts = (model.num_hidden_layers, model.get_total_num_kv_heads(), model.head_dim, str(args.kv_cache_dtype))
    return {
        "handover": handover_word(
            version,
            backend=args.disaggregation_transfer_backend,
            dtype=str(model.dtype).removeprefix("torch."),
            page_size=args.page_size,
            model=(Path(args.model_path).name, *parts),
        ),
        "address": bootstrap_address(role, reachable_host(args.host), args.disaggregation_bootstrap_port),
        "prefill_samples": True,
    }


def honours_seeds(engine: Any) -> bool:
    """Return whether a seed makes sampling repeatable: SGLang ignores it otherwise."""
    return bool(engine.server_args.enable_deterministic_inference)


def _slots(engine: Any) -> int:
    snapshots = engine.tokenizer_manager.load_snapshot_reader.read_all()
    most = sum(int(snapshot.max_running_requests) for snapshot in snapshots)
    return most or int(engine.server_args.max_running_requests or 1)


def _step_tokens(args: Any) -> int:
    chunk = args.chunked_prefill_size
    return int(chunk if chunk and chunk > 0 else args.max_prefill_tokens or 0)


def _default_sampling(model: Any) -> dict[str, Any]:
    known = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given: Mapping[str, Any] = model.get_default_sampling_params() or {}
    return {name: given[name] for name in known if given.get(name) is not None}
