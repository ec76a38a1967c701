"""Contract of generating engines: tokens, limits, ends, seeds, resumes, aborts, overload, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import Role
from headrace.workers.errors import EngineOverloaded, RequestInvalid
from tests.engine_contract.subject import Subject, emitted, greedy

KINDS = {"chat", "completion", "embedding", "score", "classify", "image", "video"}


class DescriptionContract:
    """What a started engine says of itself."""

    async def test_it_describes_itself(self, subject: Subject) -> None:
        info = subject.info
        assert info.engine
        assert info.version
        assert info.context_length > 0
        assert info.slots > 0
        assert all(0 <= token < info.vocab_size for token in info.eos_token_ids)
        assert (Path(info.tokenizer_dir) / "tokenizer.json").is_file()
        assert info.kinds
        assert set(info.kinds) <= KINDS
        if not subject.pools:
            assert info.block_size > 0
            assert info.blocks * info.block_size >= info.context_length

    async def test_it_declares_nothing_that_its_support_leaves_out(self, subject: Subject) -> None:
        assert subject.declared <= subject.support.words

    async def test_what_it_declares_agrees_with_its_description(self, subject: Subject) -> None:
        able, info = subject.engine.capabilities, subject.info
        assert able.media == frozenset(info.media)
        assert able.prompt_embeds == info.prompt_embeds
        assert bool(info.handover) == (able.disagg.value != "none") == (len(able.roles) > 1)
        assert Role.AGGREGATED in able.roles
        assert info.adapters == () or able.lora != "none"
        assert ({"load_adapter", "unload_adapter"} <= able.operations) == (able.lora == "dynamic")
        assert ({"sleep", "wake"} <= able.operations) == bool(able.sleep_levels)


class GeneratingContract(DescriptionContract):
    """Token ids in, token ids out."""

    async def test_tokens_come_in_order_and_only_the_last_output_has_a_finish(self, subject: Subject) -> None:
        outputs = await subject.run(subject.prompt(1), greedy(12))
        assert len(emitted(outputs)) == 12
        assert [output.finish for output in outputs] == [None] * (len(outputs) - 1) + ["length"]
        assert outputs[0].cached_tokens is not None
        assert all(output.cached_tokens is None for output in outputs[1:])
        assert all(0 <= token < subject.info.vocab_size for token in emitted(outputs))

    async def test_one_token_is_one_token(self, subject: Subject) -> None:
        outputs = await subject.run(subject.prompt(2), greedy(1))
        assert (len(emitted(outputs)), outputs[-1].finish) == (1, "length")

    async def test_the_tokens_of_several_sequences_share_calls(self, subject: Subject) -> None:
        subject.calls.clear()
        names = [await subject.submit(subject.prompt(10 + n), greedy(12)) for n in range(4)]
        for name in names:
            await subject.end(name)
        assert max(len(call) for call in subject.calls) > 1, "an engine step is one call"
        assert all(len({output.id for output in call}) == len(call) for call in subject.calls)

    async def test_temperature_zero_gives_the_same_tokens_again(self, subject: Subject) -> None:
        first = await subject.ids(subject.prompt(3), greedy(12))
        assert await subject.ids(subject.prompt(3), greedy(12)) == first

    async def test_a_seed_gives_the_same_tokens_again(self, subject: Subject) -> None:
        sampling = Sampling(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
        if "seeds" not in subject.declared:
            await subject.refuses("seed", subject.prompt(4), sampling)
            return
        first = await subject.ids(subject.prompt(4), sampling)
        assert await subject.ids(subject.prompt(4), sampling) == first

    async def test_a_stop_token_ends_the_answer_and_is_its_last_token(self, subject: Subject) -> None:
        free = await subject.ids(subject.prompt(5), greedy(12))
        stop = free[3]
        outputs = await subject.run(subject.prompt(5), greedy(12, stop_token_ids=[stop]))
        assert emitted(outputs) == free[: free.index(stop) + 1]
        assert (outputs[-1].finish, outputs[-1].stop) == ("stop", stop)

    async def test_a_stop_token_does_not_end_an_answer_before_the_least_number_of_tokens(self, subject: Subject) -> None:
        free = await subject.ids(subject.prompt(6), greedy(4))
        outputs = await subject.run(subject.prompt(6), greedy(12, stop_token_ids=[free[0]], min_tokens=6))
        assert len(emitted(outputs)) >= 6

    @pytest.mark.parametrize("cut", [1, 5, 11])
    async def test_a_resumed_answer_goes_on_as_if_undisturbed(self, subject: Subject, cut: int) -> None:
        if "resume" not in subject.declared:
            pytest.skip("the engine does not declare it; the runtime ends such jobs")
        prompt = subject.prompt(7)
        whole = await subject.ids(prompt, greedy(12))
        outputs = await subject.run(prompt + whole[:cut], greedy(12 - cut), prompt_tokens=len(prompt))
        assert emitted(outputs) == whole[cut:]
        assert outputs[-1].finish == "length"

    async def test_aborted_sequences_are_silent_and_hold_nothing(self, subject: Subject) -> None:
        room = subject.info.context_length - 3 * subject.info.block_size
        names = [await subject.submit(subject.prompt(20 + n), greedy(room)) for n in range(3)]
        await subject.begins(names[0])
        await subject.engine.abort([*names, "unknown"])
        seen = {name: len(subject.outputs[name]) for name in names}
        await subject.ids(subject.prompt(30), greedy(4))
        assert {name: len(subject.outputs[name]) for name in names} == seen
        assert not any(output.finish or output.fault for name in names for output in subject.outputs[name])
        await subject.idle()

    async def test_an_abort_of_what_has_ended_does_nothing(self, subject: Subject) -> None:
        name = await subject.submit(subject.prompt(31), greedy(2))
        await subject.end(name)
        seen = len(subject.outputs[name])
        await subject.engine.abort([name, name])
        await subject.ids(subject.prompt(32), greedy(2))
        assert len(subject.outputs[name]) == seen

    async def test_more_sequences_than_slots_are_served_or_refused_as_too_many(self, subject: Subject) -> None:
        names = []
        for n in range(subject.info.slots * 2 + 1):
            try:
                names.append(await subject.submit(subject.prompt(40 + n, 0.5), greedy(3)))
            except EngineOverloaded:
                continue
        assert len(names) >= subject.info.slots
        for name in names:
            outputs = await subject.end(name)
            assert (len(emitted(outputs)), outputs[-1].finish) == (3, "length")
        await subject.idle()

    async def test_the_load_shows_what_is_inside(self, subject: Subject) -> None:
        await subject.idle()
        room = subject.info.context_length - 3 * subject.info.block_size
        names = [await subject.submit(subject.prompt(120 + n), greedy(room)) for n in range(2)]
        for name in names:
            await subject.begins(name)
        await subject.until(lambda: subject.engine.load().running + subject.engine.load().waiting == 2)
        await subject.until(lambda: subject.engine.load().blocks_used >= 2)
        load = subject.engine.load()
        assert load.blocks_used <= load.blocks_total
        assert load.queued_prefill_tokens == 0
        await subject.engine.abort(names)
        await subject.idle()

    async def test_a_prompt_over_the_context_is_refused(self, subject: Subject) -> None:
        over = subject.prompt(50, blocks=1 + subject.info.context_length / subject.info.block_size)
        with pytest.raises(RequestInvalid, match=str(subject.info.context_length)):
            await subject.submit(over, greedy(1))
        await subject.idle()
