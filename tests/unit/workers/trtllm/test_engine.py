"""The adapter for TensorRT-LLM, end to end, on the stand-in for the package."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.broker.blocks import block_chain
from headrace.broker.messages import Sampling
from headrace.workers.engine import DisaggStyle, EngineConfig, Handover, KvBatch, KvEvent, Role
from headrace.workers.errors import EngineDead, EngineError, EngineStartFailed, RequestInvalid, UnsupportedByEngine
from headrace.workers.kv.translator import Translator
from headrace.workers.text.tokens import token_table
from headrace.workers.trtllm.encoder import MediaEncoder
from headrace.workers.trtllm.engine import TrtllmEngine
from tests.support import tensorrt_llm_stand_in as stand_in
from tests.unit.workers.trtllm.engine_bench import PROMPT, CacheView, EngineBench, running, sequence

versions = pytest.mark.parametrize("version", stand_in.VERSIONS)
HANDS_OVER: dict[str, Any] = {
    "cache_transceiver_config": {"backend": "UCX", "kv_transfer_timeout_ms": 5000},
    "disable_overlap_scheduler": True,
}


class Thumb:
    """A logits processor that leaves one token."""

    def __call__(self, req_id: int, logits: Any, token_ids: Any, stream_ptr: Any, client_id: Any) -> None:
        logits[:] = -100.0
        logits[..., 77] = 100.0


# -- answers ---------------------------------------------------------------------------------------------------


@versions
async def test_answers_come_token_by_token_and_end_with_the_length(tmp_path: Path, version: str) -> None:
    async with running(tmp_path, version=version) as bench:
        assert (bench.info.engine, bench.info.version, bench.info.block_size) == ("trtllm", version, 32)
        assert (bench.info.blocks, bench.info.slots, bench.info.context_length) == (512, 16, 4096)
        await bench.run(sequence("a"), sequence("b", [7, 8, 9], max_tokens=4))
        assert [len(output.ids) for output in bench.outputs("a")] == [1] * 10
        assert (bench.last("a").finish, bench.last("b").finish) == ("length", "length")
        assert len(bench.ids("b")) == 4
        assert [output.cached_tokens for output in bench.outputs("a")] == [0] + [None] * 9


async def test_what_the_sequences_get_in_one_turn_of_the_loop_leaves_in_one_call(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        sequences = [sequence(f"s{n}", [n + 1, 5, 6], max_tokens=8) for n in range(12)]
        await bench.run(*sequences)
        assert sum(len(call) for call in bench.calls) == 96
        assert len(bench.calls) <= 48


@versions
async def test_a_resumed_answer_goes_on_exactly(tmp_path: Path, version: str) -> None:
    async with running(tmp_path, version=version) as bench:
        await bench.run(sequence("whole", max_tokens=12))
        whole = bench.ids("whole")
        await bench.run(sequence("rest", PROMPT + whole[:5], prompt_tokens=len(PROMPT), max_tokens=7))
        assert bench.ids("rest") == whole[5:]


@versions
@pytest.mark.parametrize("leaves_end_out", [False, True])
async def test_an_answer_that_ends_by_itself_ends_with_the_end_token(
    tmp_path: Path, version: str, leaves_end_out: bool
) -> None:
    options = {"mean_output_tokens": 4, "leaves_end_out": leaves_end_out}
    async with running(tmp_path, version=version, options=options) as bench:
        await bench.run(sequence("a", max_tokens=500, logprobs=0))
        assert (bench.last("a").finish, bench.last("a").stop, bench.ids("a")[-1]) == ("stop", None, 2)
        assert bench.ids("a").count(2) == 1
        assert len(bench.last("a").logprobs or ()) == len(bench.last("a").ids)


@versions
async def test_a_stop_token_ends_the_answer_and_is_its_last(tmp_path: Path, version: str) -> None:
    async with running(tmp_path, version=version) as bench:
        await bench.run(sequence("free"))
        stop = bench.ids("free")[3]
        await bench.run(sequence("a", sampling=Sampling(max_tokens=10, temperature=0.0, stop_token_ids=[stop])))
        assert bench.ids("a") == bench.ids("free")[: bench.ids("free").index(stop) + 1]
        assert (bench.last("a").finish, bench.last("a").stop) == ("stop", stop)


async def test_the_end_token_is_passed_over_where_the_request_says_so(tmp_path: Path) -> None:
    async with running(tmp_path, options={"mean_output_tokens": 2}) as bench:
        await bench.run(sequence("a", sampling=Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)))
        assert (bench.last("a").finish, len(bench.ids("a"))) == ("length", 40)


async def test_an_aborted_sequence_gets_nothing_more_and_its_blocks_are_free(tmp_path: Path) -> None:
    async with running(tmp_path, options={"timing": "cpu-small"}) as bench:
        await bench.engine.submit(sequence("a", max_tokens=4000))
        await bench.until(lambda: len(bench.ids("a")) >= 2)
        await bench.engine.abort(["a", "unknown"])
        had = len(bench.ids("a"))
        assert bench.engine.load().running == 0
        await bench.run(sequence("b", [9, 9], max_tokens=2))
        assert len(bench.ids("a")) == had
        executor = bench.llm._executor
        await bench.until(lambda: not executor._running)
        assert executor._ranks[0].used == 0


@versions
async def test_sampling_depends_on_the_seed_and_greedy_answers_do_not(tmp_path: Path, version: str) -> None:
    async with running(tmp_path, version=version) as bench:
        for name, temperature, seed in (("g1", 0.0, 1), ("g2", 0.0, 2), ("s1", 0.8, 1), ("s2", 0.8, 2), ("s3", 0.8, 1)):
            sampling = Sampling(max_tokens=8, temperature=temperature, seed=seed, top_p=0.9, min_p=0.1, frequency_penalty=0.5)
            await bench.run(sequence(name, sampling=sampling))
        assert bench.ids("g1") == bench.ids("g2")
        assert bench.ids("s1") == bench.ids("s3") != bench.ids("s2")


async def test_log_probabilities_come_with_their_tokens(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        await bench.run(sequence("a", logprobs=3, max_tokens=4), sequence("b", logprobs=0, max_tokens=2))
        for output in bench.outputs("a"):
            assert output.logprobs is not None
            (entry,) = output.logprobs
            assert (entry.id, entry.logprob, len(entry.top)) == (output.ids[0], -0.25, 3)
            assert entry.top[0][0] == entry.id
        assert [len(entry.top) for output in bench.outputs("b") for entry in output.logprobs or ()] == [0, 0]


@versions
@pytest.mark.parametrize(
    ("guided", "fits"),
    [
        ({"choice": ["yes", 'no "really"']}, lambda text: text in ("yes", 'no "really"')),
        ({"regex": "[0-9]{3}"}, lambda text: len(text) == 3 and text.isdigit()),
        ({"json": {"type": "integer"}}, lambda text: isinstance(int(text), int)),
        ({"json_object": True}, lambda text: text.startswith("{")),
        ({"grammar": 'root ::= "left" | "right"'}, lambda text: text in ("left", "right")),
    ],
)
async def test_structured_output_of_every_kind_fits(tmp_path: Path, version: str, guided: dict[str, Any], fits: Any) -> None:
    async with running(tmp_path, version=version) as bench:
        await bench.run(sequence("a", max_tokens=200, guided=guided))
        table = token_table(bench.info.tokenizer_dir)
        text = b"".join(table.token_bytes(token) for token in bench.ids("a") if token != 2).decode()
        assert bench.last("a").finish == "stop"
        assert fits(text)


async def test_biases_and_named_logits_processors_change_the_tokens(tmp_path: Path) -> None:
    processors = {"thumb": f"{__name__}:Thumb"}
    async with running(tmp_path, logits_processors=processors) as bench:
        allowed = Sampling(max_tokens=5, temperature=0.0, allowed_token_ids=[500, 501])
        biased = Sampling(max_tokens=3, temperature=0.0, logit_bias={1234: 50.0})
        await bench.run(
            sequence("allowed", sampling=allowed),
            sequence("biased", sampling=biased),
            sequence("thumb", max_tokens=3, extra={"logits_processors": ["thumb"]}),
        )
        assert set(bench.ids("allowed")) <= {500, 501}
        assert bench.ids("biased") == [1234] * 3
        assert bench.ids("thumb") == [77] * 3
        with pytest.raises(RequestInvalid, match="no logits processor 'other'; it has: thumb"):
            await bench.engine.submit(sequence("x", extra={"logits_processors": ["other"]}))


async def test_the_logits_of_an_answer_come_with_its_end_when_they_are_asked_for(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        await bench.run(sequence("a", max_tokens=2, extra={"return_generation_logits": True}))
        logits = np.asarray((bench.last("a").extra or {})["generation_logits"])
        assert [int(one.argmax()) for one in logits] == bench.ids("a")


@versions
async def test_requests_that_cannot_work_are_refused_by_name(tmp_path: Path, version: str) -> None:
    async with running(tmp_path, version=version) as bench:
        for one, error, told in (
            (sequence("x", [1] * 4096), RequestInvalid, "4096 tokens leave no room"),
            (sequence("x", adapter="fr"), RequestInvalid, "no adapter 'fr'; it has: none"),
            (sequence("x", prompt_logprobs=1), UnsupportedByEngine, "a prompt's own tokens"),
            (sequence("x", media=[{"kind": "image"}]), UnsupportedByEngine, "token ids only"),
            (sequence("x", guided={"lark": "x"}), RequestInvalid, "unknown kind of structured output 'lark'"),
            (sequence("x", sampling=Sampling(max_tokens=1, logit_bias={60000: 1.0})), RequestInvalid, "token 60000"),
            (sequence("x", sampling=Sampling(max_tokens=1, temperature=-1.0)), RequestInvalid, "temperature is -1.0"),
            (sequence("x", handover=Handover(kind="prefill")), UnsupportedByEngine, "without cache_transceiver_config"),
            (sequence("x", extra={"attention_dp_rank": 1}), UnsupportedByEngine, "without enable_attention_dp"),
        ):
            with pytest.raises(error, match=told):
                await bench.engine.submit(one)
        await bench.run(sequence("y", max_tokens=1))  # and it goes on


async def test_a_chosen_id_of_bad_words_leaves_the_end_token_to_the_engine(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        await bench.run(sequence("a", sampling=Sampling(max_tokens=3, temperature=0.0, bad_words=["no"])))
        assert len(bench.ids("a")) == 3


# -- failures --------------------------------------------------------------------------------------------------


@versions
async def test_a_request_that_fails_is_given_up_alone(tmp_path: Path, version: str) -> None:
    async with running(tmp_path, version=version, options={"faults": {"fail_at_token": 3}}) as bench:
        await bench.run(sequence("a"), sequence("short", max_tokens=2))
        fault = bench.last("a").fault
        assert fault is not None
        assert (fault.code, fault.retriable, len(bench.ids("a"))) == ("engine_error", True, 3)
        assert bench.last("short").finish == "length"
        await bench.engine.healthy()


@versions
async def test_an_engine_that_dies_says_so_and_its_sequences_get_nothing(tmp_path: Path, version: str) -> None:
    async with running(tmp_path, version=version, options={"timing": "cpu-small"}) as bench:
        await bench.engine.submit(sequence("a", max_tokens=4000))
        await bench.until(lambda: bool(bench.ids("a")))
        bench.llm._executor.die("an MPI process is gone")
        reason = await asyncio.wait_for(bench.engine.died(), 5)
        assert "has shut down" in reason
        had = len(bench.outputs("a"))
        with pytest.raises(EngineDead):
            await bench.engine.submit(sequence("b"))
        with pytest.raises(EngineDead):
            await bench.engine.healthy()
        await asyncio.sleep(0.05)
        assert len(bench.outputs("a")) == had
        assert bench.last("a").fault is None
        assert bench.engine.blamed() == frozenset()


async def test_an_idle_engine_that_dies_is_noticed(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        bench.llm._executor.die("gone")
        assert await asyncio.wait_for(bench.engine.died(), 5)


async def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    for args, told in (
        ({"kv_cache_confg": {}}, "no setting 'kv_cache_confg'; close to it: kv_cache_config"),
        ({"model": "x"}, "give 'model' as --model"),
        ({"kv_cache_config": {"tokens_per_block": 33}}, "refuses its settings: tokens_per_block is 33"),
        ({"kv_cache_config": {"block_size": 32}}, "block_size: Extra inputs are not permitted"),
        ({"kv_cache_config": {"kv_events_config": {}}}, "give event_buffer_max_size"),
        ({"kv_cache_config": 5}, "kv_cache_config must be a map"),
        ({"cache_transceiver_config": {"backend": "PIGEON"}}, "backend is 'PIGEON'"),
        ({"guided_decoding_backend": "none"}, "could not start .*guided_decoding_backend is 'none'"),
        ({"tensor_parallel_size": 2, "enable_attention_dp": 1, "adapters": {"a": "/nowhere"}}, "'a' is no adapter"),
        ({"logits_processors": {"a": "no.such:Thing"}}, "'a' cannot be made of 'no.such:Thing'"),
    ):
        with pytest.raises(EngineStartFailed, match=told):
            async with running(tmp_path, **args):
                pass
    with pytest.raises(EngineStartFailed, match="out of memory"):
        async with running(tmp_path, options={"fails_to_start": "CUDA out of memory"}):
            pass


async def test_a_model_without_its_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with stand_in.installed(), pytest.raises(EngineStartFailed, match=r"cannot read .*config.json"):
        await TrtllmEngine().start(EngineConfig(model=str(tmp_path / "empty"), served_name="m"), lambda _: None)


async def test_where_the_package_is_not_installed_the_start_names_what_is_missing() -> None:
    with pytest.raises(EngineStartFailed) as caught:
        await TrtllmEngine().start(EngineConfig(model="m", served_name="m"), lambda _: None)
    assert "The Python package tensorrt_llm is not installed." in str(caught.value)
    assert "NVIDIA's package index" in str(caught.value)


# -- the cache -------------------------------------------------------------------------------------------------


def inventory(bench: EngineBench) -> list[KvEvent]:
    started = bench.engine._started
    return started.feeds[0].inventory() if started is not None and started.feeds is not None else []


async def _view(bench: EngineBench, view: CacheView, met: Any, *, rank: int = 0) -> None:
    """Read the engine's KV events until what they say is as expected."""
    async with asyncio.timeout(10):
        async for batch in bench.engine.kv_events(rank):
            view.apply(batch)
            view.numbers.append(batch.number)
            view.partial = batch.partial
            if met(view):
                return


@versions
async def test_cached_blocks_are_told_and_found_again(tmp_path: Path, version: str) -> None:
    async with running(tmp_path, version=version) as bench:
        await bench.run(sequence("a", max_tokens=4))
        view = CacheView()
        await _view(bench, view, lambda view: len(view.held) >= 2)
        assert sorted(view.tier("device")) == [tuple(PROMPT[:32]), tuple(PROMPT[32:64])]  # the partial block is not told
        await bench.run(sequence("b", max_tokens=2))
        assert bench.outputs("b")[0].cached_tokens == 64
        assert await bench.engine.replay_kv(0)


@versions
async def test_a_cache_salt_keeps_blocks_apart(tmp_path: Path, version: str) -> None:
    async with running(tmp_path, version=version) as bench:
        await bench.run(sequence("a", max_tokens=1, cache_salt="one"))
        await bench.run(sequence("b", max_tokens=1, cache_salt="two"))
        await bench.run(sequence("c", max_tokens=1, cache_salt="one"))
        assert [bench.outputs(name)[0].cached_tokens for name in "abc"] == [0, 0, 64]
        if version == stand_in.V1_3:  # 1.2 does not tell salts
            await bench.until(lambda: {event.salt for event in inventory(bench)} == {"one", "two"})


@versions
async def test_salted_blocks_are_never_found_by_others_and_seem_so_to_readers_in_1_2_alone(
    tmp_path: Path, version: str
) -> None:
    """1.2 tells no salts, so readers take salted blocks for those of plain prompts: a guess that is wrong, not an answer."""
    async with running(tmp_path, version=version) as bench:
        await bench.run(sequence("salted", max_tokens=4, cache_salt="one"))
        translator = Translator(32)
        view = CacheView()

        def apply(view: CacheView) -> bool:
            return len(view.held) >= 2

        await _view(bench, view, apply)
        translator.apply(KvBatch([KvEvent(kind="cleared"), *inventory(bench)], 0))
        plain, salted = block_chain(PROMPT, 32), block_chain(PROMPT, 32, salt="one")
        assert [value in translator.device for value in salted] == [version == stand_in.V1_3] * 2
        assert [value in translator.device for value in plain] == [version == stand_in.V1_2] * 2
        await bench.run(sequence("plain", max_tokens=4))
        assert bench.outputs("plain")[0].cached_tokens == 0, "the engine itself keeps them apart"
        await bench.run(sequence("again", max_tokens=4, cache_salt="one"))
        assert bench.outputs("again")[0].cached_tokens == 64


@versions
async def test_blocks_in_the_host_cache_are_told_as_such_and_come_back(tmp_path: Path, version: str) -> None:
    cache = {"max_tokens": 8 * 32, "host_cache_size": 64 << 20}
    async with running(tmp_path, version=version, kv_cache_config=cache) as bench:
        assert (bench.info.blocks, bench.info.extra["host_cache_bytes"]) == (8, 64 << 20)
        for n in range(4):
            await bench.run(sequence(f"s{n}", list(range(n * 1000, n * 1000 + 100)), max_tokens=2))
        view = CacheView()
        await _view(bench, view, lambda view: len(view.held) >= 12)
        assert len(view.tier("device")) <= 8
        assert len(view.tier("host")) >= 4
        await bench.run(sequence("again", list(range(100)), max_tokens=2))
        assert bench.outputs("again")[0].cached_tokens == 96


@versions
async def test_lost_events_are_noticed_and_nothing_wrong_is_told(tmp_path: Path, version: str) -> None:
    async with running(tmp_path, version=version) as bench:
        await bench.run(sequence("a", max_tokens=1))
        await bench.until(lambda: len(inventory(bench)) == 2)
        bench.llm._executor.lose_events(3)
        await bench.run(sequence("b", list(range(500, 540)), max_tokens=1))
        view = CacheView()
        await _view(bench, view, lambda view: view.tier("device") == [tuple(range(500, 532))])
        assert view.partial


async def test_without_a_prefix_cache_there_are_no_events(tmp_path: Path) -> None:
    async with running(tmp_path, kv_cache_config={"enable_block_reuse": False, "max_tokens": 3200}) as bench:
        assert not bench.engine.capabilities.kv_events
        assert bench.info.blocks == 100
        with pytest.raises(UnsupportedByEngine):
            bench.engine.kv_events()


@versions
async def test_the_load_is_what_the_statistics_say(tmp_path: Path, version: str) -> None:
    async with running(tmp_path, version=version, options={"timing": "cpu-small"}, max_batch_size=2) as bench:
        for n in range(5):
            await bench.engine.submit(sequence(f"s{n}", [n + 1] * 40, max_tokens=400))
        await bench.until(lambda: bench.engine.load().running == 2)
        load = bench.engine.load()
        assert (load.waiting, load.blocks_total) == (3, 512)
        assert load.queued_prefill_tokens == 3 * 40
        await bench.until(lambda: bench.engine.load().step_decodes == 2)
        assert bench.engine.load().step_s > 0.0
        assert bench.engine.load().blocks_used >= 2
        await bench.engine.abort([f"s{n}" for n in range(5)])
        assert (bench.engine.load().running, bench.engine.load().queued_prefill_tokens) == (0, 0)


# -- ranks, adapters, priorities -------------------------------------------------------------------------------


@versions
async def test_requests_go_to_the_attention_rank_they_name_and_its_blocks_are_told(tmp_path: Path, version: str) -> None:
    args = {"tensor_parallel_size": 2, "enable_attention_dp": True}
    async with running(tmp_path, version=version, **args) as bench:
        assert (bench.info.ranks, bench.info.blocks, bench.info.slots) == (2, 1024, 32)
        await bench.run(sequence("r0", max_tokens=1, rank=0))
        await bench.run(sequence("other", list(range(900, 940)), max_tokens=1, rank=1))
        await bench.run(sequence("r1", max_tokens=1, rank=0, extra={"attention_dp_rank": 1}))  # what the client says counts
        await bench.run(sequence("again", max_tokens=1, rank=1))
        assert [bench.outputs(name)[0].cached_tokens for name in ("r0", "r1", "again")] == [0, 0, 64]
        for rank, held in ((0, 2), (1, 3)):
            view = CacheView()
            await _view(bench, view, lambda view, held=held: len(view.held) == held, rank=rank)
            assert tuple(PROMPT[:32]) in view.tier("device")
            assert (tuple(range(900, 932)) in view.tier("device")) == (rank == 1)
        with pytest.raises(RequestInvalid, match="ranks 0 to 1"):
            await bench.engine.submit(sequence("x", extra={"attention_dp_rank": 2}))


@versions
async def test_adapters_are_chosen_per_request_and_can_be_added_and_removed(tmp_path: Path, version: str) -> None:
    folder = str(stand_in.adapter_folder(tmp_path / "fr"))
    async with running(tmp_path, version=version, adapters={"fr": folder}) as bench:
        assert (bench.info.adapters, bench.engine.capabilities.lora) == (("fr",), "dynamic")
        await bench.run(sequence("base"), sequence("fr", adapter="fr"))
        assert bench.ids("base") != bench.ids("fr")
        source = str(stand_in.adapter_folder(tmp_path / "de"))
        await bench.engine.control("load_adapter", {"name": "de", "source": source})
        await bench.engine.control("load_adapter", {"name": "de", "source": source})  # nothing more
        await bench.run(sequence("de", adapter="de"))
        assert bench.ids("de") not in (bench.ids("base"), bench.ids("fr"))
        with pytest.raises(EngineError, match="unload it first"):
            await bench.engine.control("load_adapter", {"name": "de", "source": folder})
        large = str(stand_in.adapter_folder(tmp_path / "large", rank=64))
        with pytest.raises(EngineError, match="max_lora_rank=8"):
            await bench.engine.control("load_adapter", {"name": "large", "source": large})
        await bench.engine.control("unload_adapter", {"name": "de"})
        with pytest.raises(RequestInvalid, match="no adapter 'de'; it has: fr"):
            await bench.engine.submit(sequence("x", adapter="de"))
    async with running(tmp_path, version=version) as bench:
        with pytest.raises(UnsupportedByEngine):
            await bench.engine.control("load_adapter", {"name": "de", "source": source})


async def test_a_lower_priority_number_is_served_sooner_where_the_release_knows_priorities(tmp_path: Path) -> None:
    async with running(tmp_path, options={"timing": "cpu-small"}, max_batch_size=1) as bench:
        assert bench.engine.capabilities.priority
        await bench.engine.submit(sequence("running", max_tokens=3))
        await bench.until(lambda: bool(bench.ids("running")))
        for name, priority in (("late", 5), ("soon", -5)):
            await bench.engine.submit(sequence(name, max_tokens=1, priority=priority))
        await bench.until(lambda: bench.ended("late") and bench.ended("soon"))
        order = [output.id for call in bench.calls for output in call]
        assert order.index("soon") < order.index("late")
    async with running(tmp_path, version=stand_in.V1_2) as bench:
        assert not bench.engine.capabilities.priority


# -- hand-overs ------------------------------------------------------------------------------------------------


async def _prefilled(prefill: EngineBench, name: str, **options: Any) -> dict[str, Any]:
    await prefill.run(sequence(name, handover=Handover(kind="prefill"), max_tokens=1, **options))
    last = prefill.last(name)
    assert last.finish == "length", last
    assert last.handover is not None
    return dict(last.handover)


@versions
async def test_a_prompt_computed_on_one_engine_is_answered_by_another_with_the_same_text(tmp_path: Path, version: str) -> None:
    async with (
        running(tmp_path / "p", version=version, role=Role.PREFILL) as prefill,
        running(tmp_path / "d", version=version, **HANDS_OVER) as decode,
    ):
        assert prefill.engine.capabilities.disagg is DisaggStyle.PARAMS
        assert prefill.engine.capabilities.roles == decode.engine.capabilities.roles
        assert prefill.info.lease_s == 60.0
        assert decode.info.lease_s == 5.0
        await decode.run(sequence("alone", list(range(900, 980)), max_tokens=6))
        params = await _prefilled(prefill, "j1", tokens=list(range(900, 980)))
        assert isinstance(params["opaque_state"], str)
        await decode.run(sequence("j1", list(range(900, 980)), max_tokens=6, handover=Handover(kind="decode", params=params)))
        assert decode.ids("j1") == decode.ids("alone")
        assert decode.last("j1").finish == "length"
        # the blocks were fetched: nobody can fetch them again
        await decode.run(sequence("j2", list(range(900, 980)), handover=Handover(kind="decode", params=params)))
        fault = decode.last("j2").fault
        assert fault is not None
        assert fault.code == "transfer_failed"


@versions
async def test_released_blocks_cannot_be_fetched(tmp_path: Path, version: str) -> None:
    async with running(tmp_path, version=version, **HANDS_OVER) as bench:
        params = await _prefilled(bench, "j")
        await bench.engine.release("j", None)
        await bench.engine.release("j", None)  # nothing more
        await bench.run(sequence("d", handover=Handover(kind="decode", params=params)))
        fault = bench.last("d").fault
        assert fault is not None
        assert fault.code == "transfer_failed"


@pytest.mark.parametrize("broken", [None, {}, {"engine": "vllm"}, {"opaque_state": "?"}, {"first_gen_tokens": []}])
async def test_parameters_that_cannot_be_used_fail_as_a_transfer(tmp_path: Path, broken: dict[str, Any] | None) -> None:
    async with running(tmp_path, **HANDS_OVER) as bench:
        params = await _prefilled(bench, "j")
        given = params | broken if broken else broken
        await bench.run(sequence("d", handover=Handover(kind="decode", params=given)))
        fault = bench.last("d").fault
        assert fault is not None
        assert (fault.code, fault.retriable) == ("transfer_failed", True)


@pytest.mark.parametrize(
    "options",
    [
        {"guided": {"regex": "[0-9]{4}"}, "max_tokens": 10},
        {"logprobs": 1, "max_tokens": 3},  # the context side was not asked for them
        {"sampling": Sampling(max_tokens=3, temperature=0.7, seed=4)},
        {"sampling": Sampling(max_tokens=3, temperature=0.0, min_tokens=2)},
    ],
)
async def test_a_request_whose_first_token_the_context_side_cannot_choose_is_computed_here(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    async with running(tmp_path, **HANDS_OVER) as bench:
        await bench.run(sequence("alone", **options))
        params = await _prefilled(bench, "j")
        await bench.run(sequence("d", handover=Handover(kind="decode", params=params), **options))
        assert bench.ids("d") == bench.ids("alone")
        assert bench.last("d").finish == bench.last("alone").finish


@versions
async def test_the_log_probability_of_the_first_token_comes_from_where_it_was_sampled(tmp_path: Path, version: str) -> None:
    async with running(tmp_path, version=version, **HANDS_OVER) as bench:
        assert bench.info.prefill_samples
        params = await _prefilled(bench, "j", logprobs=2)
        params["first_logprobs"][0][1] = -0.75
        await bench.run(sequence("d", logprobs=2, max_tokens=3, handover=Handover(kind="decode", params=params)))
        entries = [entry for output in bench.outputs("d") for entry in output.logprobs or ()]
        assert [entry.logprob for entry in entries] == [-0.75, -0.25, -0.25]
        assert [entry.id for entry in entries] == bench.ids("d")
        assert [len(entry.top) for entry in entries] == [2, 2, 2]


async def test_an_answer_that_is_over_with_the_first_token_needs_no_second_engine(tmp_path: Path) -> None:
    async with running(tmp_path, **HANDS_OVER) as bench:
        params = await _prefilled(bench, "j")
        (token,) = params["first_gen_tokens"]
        stopping = Sampling(max_tokens=9, temperature=0.0, stop_token_ids=[token])
        handover = Handover(kind="decode", params=params)
        await bench.run(
            sequence("one", max_tokens=1, handover=handover), sequence("stop", sampling=stopping, handover=handover)
        )
        assert (bench.ids("one"), bench.last("one").finish) == ([token], "length")
        assert (bench.ids("stop"), bench.last("stop").finish, bench.last("stop").stop) == ([token], "stop", token)


async def test_roles_follow_from_the_settings(tmp_path: Path) -> None:
    async with running(tmp_path, cache_transceiver_config={"backend": "NIXL"}) as bench:
        assert bench.engine.capabilities.roles == {Role.AGGREGATED, Role.DECODE}
        await bench.engine.set_role(Role.DECODE)
        with pytest.raises(UnsupportedByEngine, match="aggregated, decode, not prefill"):
            await bench.engine.set_role(Role.PREFILL)
        assert bench.info.handover == "trtllm/nixl/1.3/32"
    with pytest.raises(EngineStartFailed, match="can be aggregated, decode, not prefill"):
        async with running(tmp_path, role=Role.PREFILL, disable_overlap_scheduler=False):
            pass
    async with running(tmp_path) as bench:
        assert bench.engine.capabilities.disagg is DisaggStyle.NONE


@versions
async def test_what_an_encoder_has_made_is_used_by_a_context_only_request(tmp_path: Path, version: str) -> None:
    async with running(tmp_path, version=version, **HANDS_OVER) as bench:
        assert bench.engine._started is not None
        encoder = MediaEncoder(bench.engine._started.installed.api)
        await encoder.start(bench.info.tokenizer_dir, {})
        encoded = await encoder.encode("a <image>", {"image": ["pixels", "more pixels"]})
        with pytest.raises(RequestInvalid, match="multi_modal_data"):
            await encoder.encode("nothing", {})
        await encoder.stop()
        await bench.run(sequence("p", max_tokens=1, handover=Handover(kind="prefill", params=encoded)))
        assert bench.last("p").handover is not None
        await bench.run(sequence("q", max_tokens=1, handover=Handover(kind="prefill", params={"engine": "vllm"})))
        fault = bench.last("q").fault
        assert fault is not None
        assert "in the parameters of the encoder" in fault.message
        if version == stand_in.V1_3:
            await bench.until(lambda: any(event.media for event in inventory(bench)))
