"""The vLLM adapter against the real vLLM."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import DisaggStyle, EngineConfig, Handover, Role, StoredTensor
from headrace.workers.errors import EngineStartFailed, RequestInvalid, UnsupportedByEngine
from headrace.workers.tokens import TokenTable
from tests.engines.conftest import ARGS, DIRECT_TOKENS, Bench

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("default"),  # vLLM and torch warn about themselves
]

GREEDY = Sampling(temperature=0.0, max_tokens=DIRECT_TOKENS)


async def test_it_says_what_it_is(bench: Bench, model_dir: Path) -> None:
    info = bench.info
    assert info is not None
    assert info.engine == "vllm"
    assert info.tokenizer_dir == str(model_dir)
    assert (info.context_length, info.block_size, info.slots, info.vocab_size) == (1024, 32, ARGS["max_num_seqs"], 49152)
    assert info.blocks * 32 > 1024
    assert info.eos_token_ids == (2,)
    assert (info.handover, info.lease_s) == ("", 0.0)


async def test_greedy_tokens_equal_those_of_vllm_itself(
    bench: Bench, prompts: list[list[int]], direct: list[list[int]]
) -> None:
    for prompt, expected in zip(prompts, direct, strict=True):
        assert await bench.ids(prompt, GREEDY) == expected


async def test_the_answer_makes_sense_and_ends_with_the_end_token(
    bench: Bench, prompts: list[list[int]], tokenizer: Any
) -> None:
    outputs = await bench.end(await bench.submit(prompts[0], GREEDY))
    ids = [token for output in outputs for token in output.ids]
    assert "Paris" in tokenizer.decode(ids)
    assert ids[-1] == 2
    assert (outputs[-1].finish, outputs[-1].stop) == ("stop", None)


async def test_a_repeated_prompt_is_found_in_the_cache(bench: Bench, prompts: list[list[int]]) -> None:
    await bench.engine.control("reset_prefix_cache", {})
    first = (await bench.end(await bench.submit(prompts[0])))[0]
    again = (await bench.end(await bench.submit(prompts[0])))[0]
    salted = (await bench.end(await bench.submit(prompts[0], cache_salt="tenant")))[0]
    assert (first.cached_tokens, again.cached_tokens, salted.cached_tokens) == (0, 32, 0)


async def test_a_step_of_several_sequences_is_one_call(bench: Bench, prompts: list[list[int]]) -> None:
    bench.calls.clear()
    sampling = Sampling(temperature=0.0, max_tokens=24, ignore_eos=True)
    names = [await bench.submit(prompt, sampling) for prompt in prompts * 2]
    outputs = [output for name in names for output in await bench.end(name)]
    tokens = sum(len(output.ids) for output in outputs)
    assert tokens == 24 * len(names)
    assert len(bench.calls) < tokens / 3
    assert max(len(call) for call in bench.calls) == len(names)
    assert all(output.finish in (None, "length") for output in outputs)


async def test_aborted_sequences_are_silent_and_free_their_places(bench: Bench, prompts: list[list[int]]) -> None:
    slots = ARGS["max_num_seqs"]
    names = [await bench.submit(prompts[0], Sampling(temperature=0.0, max_tokens=900, ignore_eos=True)) for _ in range(slots)]
    while bench.engine.load().running < slots:
        await asyncio.sleep(0.01)
    await bench.engine.abort([*names, "unknown"])
    bench.calls.clear()
    # with the places still taken this one would wait for thousands of tokens
    other = await bench.submit(prompts[1], Sampling(temperature=0.0, max_tokens=4, ignore_eos=True))
    await bench.end(other)
    assert {output.id for call in bench.calls for output in call} == {other}
    idle = bench.engine.load()
    assert (idle.running, idle.waiting, idle.blocks_used) == (0, 0, 0)


async def test_a_seed_makes_sampling_repeatable(bench: Bench, prompts: list[list[int]]) -> None:
    def seeded(seed: int) -> Sampling:
        return Sampling(temperature=1.0, seed=seed, max_tokens=16, ignore_eos=True)

    first = await bench.ids(prompts[2], seeded(1))
    assert await bench.ids(prompts[2], seeded(1)) == first
    assert await bench.ids(prompts[2], seeded(2)) != first


async def test_logprobs_come_with_bytes_best_first(bench: Bench, prompts: list[list[int]], tokenizer: Any) -> None:
    outputs = await bench.end(await bench.submit(prompts[0], GREEDY, logprobs=3))
    for output in outputs:
        assert output.logprobs is not None
        for token, row in zip(output.ids, output.logprobs, strict=True):
            assert row.id == token
            assert row.top[0][:2] == (token, row.token)  # greedy: the chosen token is the best one
            assert [entry[2] for entry in row.top] == sorted((entry[2] for entry in row.top), reverse=True)
            assert len(row.top) == 3
    text = b"".join(row.token for output in outputs for row in output.logprobs or ()).decode()
    assert text.startswith(tokenizer.decode([token for output in outputs for token in output.ids]))


async def test_prompts_are_scored_with_the_rank_of_every_token(bench: Bench, prompts: list[list[int]], model_dir: Path) -> None:
    """Also where the prompt is computed in parts, and although it is in the cache."""
    token_bytes = TokenTable.load(model_dir).token_bytes
    long = prompts[0] * 8
    assert len(long) > 200
    for _ in range(2):
        outputs = await bench.end(await bench.submit(long, Sampling(temperature=0.0, max_tokens=2), prompt_logprobs=3))
        scores = outputs[0].prompt_logprobs
        assert scores is not None
        assert scores[0] is None
        assert [score.id for score in scores[1:] if score] == long[1:]
        assert all(output.prompt_logprobs is None for output in outputs[1:])
        for score in scores[1:]:
            assert score is not None
            assert len(score.top) == 3
            assert [logprob for *_, logprob in score.top] == sorted((logprob for *_, logprob in score.top), reverse=True)
            assert (score.rank <= 3) == (score.id in [token for token, *_ in score.top])
            assert score.token == token_bytes(score.id)


async def test_a_schema_is_obeyed(bench: Bench, prompts: list[list[int]], tokenizer: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    ids = await bench.ids(prompts[0], GREEDY, guided={"json": schema})
    assert json.loads(tokenizer.decode(ids))["city"] in {"Paris", "Rome"}


async def test_a_stop_token_ends_the_sequence_and_is_named(
    bench: Bench, prompts: list[list[int]], direct: list[list[int]]
) -> None:
    stop = direct[0][2]
    outputs = await bench.end(await bench.submit(prompts[0], Sampling(temperature=0.0, max_tokens=16, stop_token_ids=[stop])))
    assert [token for output in outputs for token in output.ids] == direct[0][:3]
    assert (outputs[-1].finish, outputs[-1].stop) == ("stop", stop)


@pytest.mark.parametrize("cut", [1, 7, 20])
async def test_a_resumed_sequence_goes_on_as_if_undisturbed(
    bench: Bench, prompts: list[list[int]], direct: list[list[int]], cut: int
) -> None:
    emitted = direct[2][:cut]
    rest = Sampling(temperature=0.0, max_tokens=DIRECT_TOKENS - cut)
    assert await bench.ids(prompts[2] + emitted, rest, prompt_tokens=len(prompts[2])) == direct[2][cut:]


@pytest.mark.parametrize(
    ("sampling", "options", "word"),
    [
        (Sampling(temperature=-1.0, max_tokens=4), {}, "temperature"),
        (Sampling(top_p=3.0, max_tokens=4), {}, "top_p"),
        (Sampling(max_tokens=4, logit_bias={10**6: 1.0}), {}, "token"),
        (Sampling(max_tokens=4), {"guided": {"regex": "(["}}, "(?i)grammar|regex"),
        (Sampling(max_tokens=4), {"guided": {"jsn": {}}}, "jsn"),
        (Sampling(max_tokens=4), {"extra": {"kv_transfer_params": {"remote_host": "x"}}}, "kv_transfer_params"),
    ],
)
async def test_a_wrong_request_is_refused_with_a_reason(
    bench: Bench, prompts: list[list[int]], sampling: Sampling, options: dict[str, Any], word: str
) -> None:
    with pytest.raises(RequestInvalid, match=word):
        await bench.submit(prompts[0], sampling, **options)
    assert bench.engine.load().running == 0


async def test_a_prompt_over_the_context_is_refused(bench: Bench) -> None:
    with pytest.raises(RequestInvalid, match="1024"):
        await bench.submit([5] * 1025)


async def test_what_this_adapter_cannot_do_is_refused_by_name(bench: Bench, prompts: list[list[int]]) -> None:
    for options in (
        {"media": [{"kind": "image"}]},
        {"prompt_embeds": StoredTensor("float32", (1, 1), memoryview(b""))},
    ):
        with pytest.raises(UnsupportedByEngine, match=next(iter(options))):
            await bench.submit(prompts[0], **options)
    with pytest.raises(RequestInvalid, match="no adapter 'x'; it has: none"):
        await bench.submit(prompts[0], adapter="x")
    for kind in ("prefill", "decode"):  # it was started without a connector
        with pytest.raises(UnsupportedByEngine, match=kind):
            await bench.submit(prompts[0], handover=Handover(kind=kind, params={}))
    assert (bench.engine.capabilities.roles, bench.engine.capabilities.disagg) == (
        frozenset({Role.AGGREGATED}),
        DisaggStyle.NONE,
    )
    with pytest.raises(UnsupportedByEngine, match="prefill"):
        await bench.engine.set_role(Role.PREFILL)
    with pytest.raises(UnsupportedByEngine, match="reset_prefix_cache"):
        await bench.engine.control("fly", {})
    assert bench.engine.capabilities.lora == "none"


async def test_a_misspelt_setting_stops_the_start(model_dir: Path) -> None:
    wrong = EngineConfig(model=str(model_dir), served_name="m", args={"max_model_length": 512})
    with pytest.raises(EngineStartFailed, match="max_model_len"):
        await Bench().engine.start(wrong, lambda outputs: None)


async def test_a_missing_model_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(EngineStartFailed, match=str(tmp_path)):
        await Bench().engine.start(EngineConfig(model=str(tmp_path), served_name="m"), lambda outputs: None)


async def test_a_build_for_gpus_without_one_says_what_to_do(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.platforms as platforms
    from vllm.platforms.interface import UnspecifiedPlatform

    monkeypatch.setattr(platforms, "current_platform", UnspecifiedPlatform(), raising=False)
    with pytest.raises(EngineStartFailed, match=r"built for GPUs, and none can be used.*CPU build"):
        await Bench().engine.start(EngineConfig(model=str(model_dir), served_name="m", args=ARGS), lambda _: None)


async def test_it_is_healthy_and_still_alive(bench: Bench) -> None:
    await bench.engine.healthy()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await bench.engine.died()
