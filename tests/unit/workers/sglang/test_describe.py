"""What a started SGLang serves, how much of it and what it can do, read from a stand-in for its objects."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.workers.engine import EngineConfig
from headrace.workers.errors import EngineStartFailed
from headrace.workers.sglang.describe import capabilities, describe, describe_follower, honours_seeds


def engine(folder: Path, *, generates: bool = True, snapshots: tuple[int, ...] = (8,), **args: Any) -> Any:
    given: dict[str, Any] = {
        "tokenizer_path": str(folder),
        "model_path": str(folder),
        "revision": None,
        "page_size": 32,
        "chunked_prefill_size": 2048,
        "max_prefill_tokens": 4096,
        "max_running_requests": 3,
        "enable_lora": False,
        "enable_priority_scheduling": False,
        "enable_deterministic_inference": False,
        "is_embedding": not generates,
        "grammar_backend": "xgrammar",
        "skip_tokenizer_init": False,
        "disaggregation_mode": "null",
        "disable_overlap_schedule": False,
        "tp_size": 1,
        "pp_size": 1,
        "ep_size": 1,
        **args,
    }
    model = SimpleNamespace(
        context_len=1000,
        vocab_size=77,
        is_generation=generates,
        dtype="torch.float32",
        hf_eos_token_id={5, 2},
        get_default_sampling_params=lambda: {"temperature": 0.6, "top_p": None, "unknown": 1},
    )
    reader = SimpleNamespace(read_all=lambda: [SimpleNamespace(max_running_requests=most) for most in snapshots])
    manager = SimpleNamespace(model_config=model, tokenizer=SimpleNamespace(eos_token_id=2), load_snapshot_reader=reader)
    infos = [{"max_total_num_tokens": 6400, "max_req_input_len": 994}]
    return SimpleNamespace(
        server_args=SimpleNamespace(**given),
        tokenizer_manager=manager,
        _scheduler_init_result=SimpleNamespace(scheduler_infos=infos),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def config(folder: Path, **args: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), served_name="s", args=args)


def test_the_sizes_are_those_of_the_scheduler(folder: Path) -> None:
    info = describe(engine(folder), config(folder), "0.5.23")
    assert (info.engine, info.version, info.context_length, info.block_size) == ("sglang", "0.5.23", 994, 32)
    assert (info.blocks, info.slots, info.step_tokens, info.ranks) == (200, 8, 2048, 1)
    assert (info.vocab_size, info.eos_token_ids, info.kinds) == (77, (2, 5), ("chat", "completion"))
    assert info.default_sampling == {"temperature": 0.6}
    assert (info.extra["dtype"], info.handover, info.parallel) == ("float32", "", {})


def test_the_sizes_of_several_ranks_are_those_of_all(folder: Path) -> None:
    info = describe(engine(folder, snapshots=(8, 8)), config(folder, dp_size=2), "0")
    assert (info.ranks, info.blocks, info.slots) == (2, 400, 16)


def test_the_ranks_that_share_the_model_are_told_by_kind(folder: Path) -> None:
    info = describe(engine(folder, tp_size=4, ep_size=2), config(folder), "0")
    assert info.parallel == {"tensor": 4, "expert": 2}


def test_a_part_of_an_engine_on_a_later_node_has_neither_requests_nor_a_tokenizer() -> None:
    scheduler = {"max_req_input_len": 50, "max_total_num_tokens": 640}
    part = SimpleNamespace(
        tokenizer_manager=None,
        server_args=SimpleNamespace(page_size=32),
        _scheduler_init_result=SimpleNamespace(scheduler_infos=[scheduler]),
    )
    info = describe_follower(part, EngineConfig(model="m", served_name="s", args={"node_rank": 1}), "0")
    assert (info.follows, info.kinds, info.slots, info.blocks) == (True, (), 0, 20)


def test_without_a_snapshot_the_slots_are_the_setting(folder: Path) -> None:
    assert describe(engine(folder, snapshots=()), config(folder), "0").slots == 3


@pytest.mark.parametrize("chunk", [None, -1, 0])
def test_a_step_without_chunks_has_the_most_tokens_of_a_prefill(folder: Path, chunk: int | None) -> None:
    assert describe(engine(folder, chunked_prefill_size=chunk), config(folder), "0").step_tokens == 4096


@pytest.mark.parametrize("is_embedding", [True, False], ids=["by its setting", "by its files alone"])
def test_a_model_of_vectors_serves_nothing_else(folder: Path, is_embedding: bool) -> None:
    made = engine(folder, generates=False, is_embedding=is_embedding)
    info = describe(made, config(folder), "0")
    assert (info.kinds, info.default_sampling) == (("embedding",), {})
    able = capabilities(made)
    assert (able.resume, able.logprobs, able.guided, able.seeds) == (False, False, frozenset(), False)
    assert "pause" not in able.operations


def test_a_model_without_a_tokenizer_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineStartFailed, match=r"has no tokenizer\.json") as told:
        describe(engine(tmp_path), config(tmp_path), "0")
    assert "SimpleNamespace" in str(told.value), "it names the tokenizer that cannot be written as one"


def test_abilities_follow_from_the_settings(folder: Path) -> None:
    plain = capabilities(engine(folder))
    assert (plain.lora, plain.priority, plain.seeds, bool(plain.guided)) == ("none", False, False, True)
    assert "load_adapter" not in plain.operations
    assert {"pause", "resume", "is_paused"} <= plain.operations
    given = {"enable_lora": True, "enable_priority_scheduling": True, "enable_deterministic_inference": True}
    able = capabilities(engine(folder, grammar_backend="none", **given))
    assert (able.lora, able.priority, able.seeds, able.guided) == ("dynamic", True, True, frozenset())
    assert "load_adapter" in able.operations
    assert not capabilities(engine(folder, skip_tokenizer_init=True)).guided, "its grammars are made for a tokenizer's words"
    assert honours_seeds(engine(folder, **given))
    assert not plain.resume_penalties, "with the overlap schedule tokens are counted a step late"
    assert not plain.resume_repetition
    exact = capabilities(engine(folder, disable_overlap_schedule=True))
    assert exact.resume_penalties
    assert exact.resume_repetition
