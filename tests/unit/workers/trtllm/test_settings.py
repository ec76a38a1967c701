"""Our settings as TensorRT-LLM's, log levels, and what a model's files say."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from headrace.workers.errors import EngineStartFailed, RequestInvalid
from headrace.workers.trtllm.settings import LOG_LEVELS, prepare_environment
from headrace.workers.trtllm.start import local_folder, read_model
from tests.support import tensorrt_llm_stand_in as stand_in
from tests.unit.workers.trtllm.engine_bench import PROMPT, CacheView, follow, running, sequence, versions


@pytest.mark.parametrize(("ours", "theirs"), [("debug", "verbose"), ("INFO", "info"), ("warning", "warning"), ("odd", "info")])
def test_the_log_level_is_handed_on_in_its_own_words(ours: str, theirs: str) -> None:
    environ = {"HEADRACE_LOG_LEVEL": ours}
    prepare_environment(environ)
    assert environ["TLLM_LOG_LEVEL"] == theirs
    kept = {"TLLM_LOG_LEVEL": "trace"}
    prepare_environment(kept)
    assert kept["TLLM_LOG_LEVEL"] == "trace"


def test_every_log_level_of_ours_has_one_of_theirs() -> None:
    assert {name.upper() for name in LOG_LEVELS} <= logging.getLevelNamesMapping().keys()


def test_a_model_says_its_length_its_vocabulary_and_its_end_tokens(tmp_path: Path) -> None:
    folder = stand_in.model_folder(tmp_path / "m", context_length=1000)
    files = read_model(local_folder(str(folder)))
    assert (files.context_length, files.vocab_size, files.eos_token_ids, files.chat) == (1000, 49152, (2,), True)
    generation = {"eos_token_id": [2, 7], "temperature": 0.6, "top_p": "no"}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    files = read_model(folder)
    assert (files.eos_token_ids, files.default_sampling) == ((2, 7), {"temperature": 0.6})
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 5, "max_position_embeddings": 6}}))
    (folder / "generation_config.json").unlink()
    files = read_model(folder)
    assert (files.vocab_size, files.context_length, files.eos_token_ids) == (5, 6, (2,))  # the tokenizer's own end token


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("config.json", "{", "is not JSON"),
        ("config.json", "[]", "is not an object"),
        ("config.json", "{}", "has no vocab_size"),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("config.json", None, "cannot read"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path: Path, name: str, content: str | None, told: str) -> None:
    folder = stand_in.model_folder(tmp_path / "m")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(EngineStartFailed, match=told):
        read_model(folder)


@versions
async def test_requests_go_to_the_attention_rank_they_name_and_its_blocks_are_told(version: str) -> None:
    args = {"tensor_parallel_size": 2, "enable_attention_dp": True}
    async with running(version=version, **args) as bench:
        assert (bench.info.ranks, bench.info.blocks, bench.info.slots) == (2, 1024, 32)
        await bench.run(sequence("r0", max_tokens=1, rank=0))
        await bench.run(sequence("other", list(range(900, 940)), max_tokens=1, rank=1))
        await bench.run(sequence("r1", max_tokens=1, rank=0, extra={"attention_dp_rank": 1}))  # what the client says counts
        await bench.run(sequence("again", max_tokens=1, rank=1))
        assert [bench.outputs(name)[0].cached_tokens for name in ("r0", "r1", "again")] == [0, 0, 64]
        for rank, held in ((0, 2), (1, 3)):
            view = CacheView()
            await follow(bench, view, lambda view, held=held: len(view.held) == held, rank=rank)
            assert tuple(PROMPT[:32]) in view.tier("device")
            assert (tuple(range(900, 932)) in view.tier("device")) == (rank == 1)
        with pytest.raises(RequestInvalid, match="ranks 0 to 1"):
            await bench.engine.submit(sequence("x", extra={"attention_dp_rank": 2}))
