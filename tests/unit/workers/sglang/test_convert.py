from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import Output, Sequence
from headrace.workers.errors import RequestInvalid, UnsupportedByEngine
from headrace.workers.sglang.convert import (
    EMITTED,
    GUIDED,
    HOOKS,
    StopTokens,
    counted,
    emitted_of,
    request_id,
    to_grammar,
    to_output,
    to_request,
    to_sampling,
)

EOS = frozenset({2})


def sequence(**options: Any) -> Sequence:
    sampling = options.pop("sampling", Sampling(max_tokens=8))
    return Sequence(id="r-1-0", token_ids=[5, 6, 7], prompt_tokens=3, sampling=sampling, **options)


def token_bytes(token: int) -> bytes:
    return b"<%d>" % token


def chunk(ids: list[int], **about: Any) -> dict[str, Any]:
    return {"output_ids": ids, "meta_info": {"finish_reason": None, "cached_tokens": 0, **about}}


def output(result: dict[str, Any], *, of: Sequence | None = None, first: bool = False) -> Any:
    return to_output(of or sequence(), result, first=first, eos=EOS, token_bytes=token_bytes)


def test_a_request_has_ids_and_no_text_to_encode_again() -> None:
    fields = to_request(sequence(cache_salt="t", session_id="s", priority=3, adapter="fr"), seeds=False)
    assert fields["input_ids"] == [5, 6, 7]
    assert "text" not in fields
    assert (fields["rid"], fields["stream"], fields["priority"]) == ("r-1-0.", True, 3)
    assert (fields["cache_salt"], fields["session_id"], fields["lora_path"]) == ("t", "s", "fr")
    assert "return_logprob" not in fields


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_penalties_of_a_resumed_answer_are_told_which_tokens_were_emitted_before(penalty: str) -> None:
    penalized = sequence(sampling=Sampling(max_tokens=8, **{penalty: 1.5}), extra={"custom_params": {"mine": 1}})
    resumed = msgspec.structs.replace(penalized, prompt_tokens=1)
    assert to_sampling(resumed, seeds=False)["custom_params"] == {"mine": 1, EMITTED: 2}
    assert to_sampling(penalized, seeds=False)["custom_params"] == {"mine": 1}
    assert "custom_params" not in to_sampling(msgspec.structs.replace(sequence(), prompt_tokens=1), seeds=False)
    assert to_sampling(sequence(extra={"custom_params": {EMITTED: 9}}), seeds=False)["custom_params"] == {}, "ours to say"


def test_every_sampling_parameter_is_passed() -> None:
    sampling = Sampling(
        temperature=0.5,
        top_p=0.8,
        top_k=7,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        max_tokens=9,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[4],
        logit_bias={3: -1.0},
        seed=11,
    )
    assert to_sampling(sequence(sampling=sampling), seeds=True) == {
        "temperature": 0.5,
        "top_p": 0.8,
        "top_k": 7,
        "min_p": 0.0,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [4],
        "logit_bias": {"3": -1.0},
        "sampling_seed": 11,
        "skip_special_tokens": False,
    }


def test_a_least_probability_is_refused_where_it_would_end_sglang_and_passed_elsewhere() -> None:
    """SGLang's sampler asserts that no request of a batch has one when seeds are honoured, and ends with its scheduler."""
    drawn = sequence(sampling=Sampling(max_tokens=1, min_p=0.1, temperature=0.7))
    assert to_sampling(drawn, seeds=False)["min_p"] == 0.1
    with pytest.raises(UnsupportedByEngine) as told:
        to_sampling(drawn, seeds=True)
    assert told.value.param == "min_p"
    greedy = sequence(sampling=Sampling(max_tokens=1, min_p=0.1, temperature=0.0))
    assert to_sampling(greedy, seeds=True)["min_p"] == 0.0, "it changes nothing there, but a batch is sampled together"


def test_no_limit_on_candidates_is_sglangs_minus_one() -> None:
    assert to_sampling(sequence(), seeds=False)["top_k"] == -1


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (Sampling(max_tokens=1, allowed_token_ids=[1]), "allowed_token_ids"),
        (Sampling(max_tokens=1, bad_words=["x"]), "bad_words"),
        (Sampling(max_tokens=1, seed=1), "seed"),
    ],
)
def test_what_sglang_has_not_is_refused_by_name(sampling: Sampling, param: str) -> None:
    with pytest.raises(UnsupportedByEngine) as told:
        to_sampling(sequence(sampling=sampling), seeds=False)
    assert told.value.param == param


def test_a_seed_of_a_greedy_request_changes_nothing_and_is_accepted() -> None:
    assert "sampling_seed" not in to_sampling(sequence(sampling=Sampling(temperature=0.0, max_tokens=1, seed=1)), seeds=False)


def test_a_repetition_penalty_out_of_sglangs_range_is_refused_with_its_value() -> None:
    with pytest.raises(RequestInvalid, match="3"):
        to_sampling(sequence(sampling=Sampling(max_tokens=1, repetition_penalty=3.0)), seeds=False)


def test_an_unknown_option_of_a_request_is_refused_by_name() -> None:
    with pytest.raises(RequestInvalid, match="'bootstrap_host'") as told:
        to_request(sequence(extra={"bootstrap_host": "elsewhere"}), seeds=False)
    assert told.value.param == "bootstrap_host"


def test_a_data_parallel_rank_is_passed_on() -> None:
    assert to_request(sequence(extra={"routed_dp_rank": 1}), seeds=False)["routed_dp_rank"] == 1
    assert to_request(sequence(rank=0), seeds=False)["routed_dp_rank"] == 0
    assert to_request(sequence(rank=0, extra={"routed_dp_rank": 1}), seeds=False)["routed_dp_rank"] == 1
    assert "routed_dp_rank" not in to_request(sequence(), seeds=False)


@pytest.mark.parametrize(
    ("guided", "expected"),
    [
        ({"json": {"type": "object"}}, {"json_schema": '{"type": "object"}'}),
        ({"json_object": True}, {"json_schema": '{"type": "object"}'}),
        ({"regex": "[a-z]+"}, {"regex": "[a-z]+"}),
        ({"grammar": "root ::= 'a'"}, {"ebnf": "root ::= 'a'"}),
        ({"choice": ['a"b', "c"]}, {"ebnf": 'root ::= "a\\"b" | "c"'}),
        ({"structural_tag": {"format": {}}}, {"structural_tag": json.dumps({"format": {}})}),
        (None, {}),
    ],
)
def test_each_kind_of_structured_output_has_a_parameter(guided: Any, expected: dict[str, str]) -> None:
    assert to_grammar(guided) == expected
    assert guided is None or guided.keys() <= GUIDED


@pytest.mark.parametrize("guided", [{"whitespace_pattern": " "}, {"regex": "a", "json": {}}])
def test_other_kinds_and_two_at_once_are_refused(guided: dict[str, Any]) -> None:
    with pytest.raises(RequestInvalid):
        to_grammar(guided)


def test_structured_output_waits_for_the_end_of_the_reasoning_only_where_there_is_some() -> None:
    def waits(**options: Any) -> bool:
        return bool(to_request(sequence(**options), seeds=False)["require_reasoning"])

    assert waits(guided={"regex": "a"}, reasoning_ended=False)
    assert not waits(guided={"regex": "a"})
    assert not waits(reasoning_ended=False)


def test_no_id_is_the_beginning_of_another() -> None:
    one, ten = request_id("r-1-1"), request_id("r-1-10")
    assert not ten.startswith(one)
    assert to_request(sequence(), seeds=False)["rid"] == request_id(sequence().id)


def test_prompt_and_output_logprobs_share_sglangs_number_and_are_cut_apart() -> None:
    wanted = sequence(logprobs=1, prompt_logprobs=2)
    fields = to_request(wanted, seeds=False)
    assert (fields["return_logprob"], fields["top_logprobs_num"], fields["logprob_start_len"]) == (True, 2, 0)
    result = chunk(
        [9],
        output_token_logprobs=[(-0.1, 8, None), (-0.5, 9, None)],
        output_top_logprobs=[[], [(-0.5, 9, None), (-0.6, 8, None)]],
        input_token_logprobs=[(None, 5, None), (-1.0, 6, None), (-9.0, 7, None)],
        input_top_logprobs=[None, [(-1.0, 6, None), (-2.0, 1, None)], [(-0.2, 1, None), (-0.3, 2, None)]],
    )
    made = output(result, of=wanted, first=True)
    assert [(row.id, row.logprob, len(row.top)) for row in made.logprobs] == [(9, -0.5, 1)]
    assert made.prompt_logprobs[0] is None
    assert [(row.id, row.rank, len(row.top)) for row in made.prompt_logprobs[1:]] == [(6, 1, 2), (7, 0, 2)]


def test_cached_tokens_are_told_with_the_first_output_only() -> None:
    assert output(chunk([1], cached_tokens=32), first=True).cached_tokens == 32
    assert output(chunk([1], cached_tokens=32)).cached_tokens is None


@pytest.mark.parametrize(
    ("reason", "finish", "stop"),
    [
        ({"type": "length", "length": 8}, "length", None),
        ({"type": "stop", "matched": 2}, "stop", None),
        ({"type": "stop", "matched": 77}, "stop", 77),
        ({"type": "abort", "message": "Aborted"}, "abort", None),
    ],
)
def test_ends(reason: dict[str, Any], finish: str, stop: int | None) -> None:
    made = output(chunk([2], finish_reason=reason))
    assert (made.finish, made.stop, made.fault) == (finish, stop, None)


def test_an_end_token_that_was_asked_for_is_named() -> None:
    asked = sequence(sampling=Sampling(max_tokens=8, stop_token_ids=[2]))
    assert output(chunk([2], finish_reason={"type": "stop", "matched": 2}), of=asked).stop == 2


@pytest.mark.parametrize(("status", "code", "retriable"), [(400, "invalid_request", False), (503, "engine_error", True)])
def test_a_request_that_sglang_gives_up_is_a_fault(status: int, code: str, retriable: bool) -> None:
    made = output(chunk([3], finish_reason={"type": "abort", "status_code": status, "message": "no grammar"}))
    assert made.finish is None
    assert made.ids == []
    assert (made.fault.code, made.fault.retriable) == (code, retriable)
    assert "no grammar" in made.fault.message


def request(tokens: list[int], emitted: int | None) -> Any:
    custom = None if emitted is None else {EMITTED: emitted}
    return SimpleNamespace(origin_input_ids=tokens, sampling_params=SimpleNamespace(custom_params=custom))


BATCH = [request([7, 8, 9], None), request([7, 3, 3, 5], 3), request([1], 0)]


def test_the_tokens_behind_the_prompt_of_a_resumed_request_are_those_emitted_before() -> None:
    assert list(emitted_of(BATCH)) == [(1, [3, 3, 5])]


@pytest.mark.parametrize(
    ("kind", "start", "expected"),
    [
        ("presence", 0.0, [0, 0, 0, 0.5, 0, 0.5, 0, 0, 0, 0]),
        ("frequency", 0.0, [0, 0, 0, 1.0, 0, 0.5, 0, 0, 0, 0]),
        ("repetition", 1.0, [1, 1, 1, 0.5, 1, 0.5, 1, 1, 1, 1]),
    ],
)
def test_they_count_as_if_this_engine_had_generated_them(kind: str, start: float, expected: list[float]) -> None:
    torch = pytest.importorskip("torch")  # comes with the engines
    cumulated = torch.full((3, 10), start)
    penalties = {f"{kind}_penalties": torch.full((3, 1), 0.5), f"cumulated_{kind}_penalties": cumulated}
    counted(kind)(None, SimpleNamespace(**penalties, orchestrator=SimpleNamespace(reqs=lambda: BATCH)))
    assert cumulated[1].tolist() == expected
    assert cumulated[0].tolist() == cumulated[2].tolist() == [start] * 10


def test_the_hooks_follow_the_making_of_each_penalizer() -> None:
    assert {hook.kind for hook in HOOKS} == {"after"}
    assert [hook.target.rpartition(".penaltylib.")[2] for hook in HOOKS] == [
        "presence_penalty.BatchedPresencePenalizer._prepare",
        "frequency_penalty.BatchedFrequencyPenalizer._prepare",
        "repetition_penalty.BatchedRepetitionPenalizer._prepare",
    ]


def ended(chunks: list[list[int]], **sampling: object) -> list[Output]:
    """The outputs up to the one that ends."""
    stop_tokens, outputs = StopTokens(Sampling(**sampling)), []  # type: ignore[arg-type]
    for ids in chunks:
        outputs.append(Output("s", list(ids)))
        if stop_tokens.end(outputs[-1]):
            break
    return outputs


def test_the_stop_token_is_the_last_one() -> None:
    outputs = ended([[5], [6, 9, 7], [8]], ignore_eos=True, stop_token_ids=[9])
    assert [(output.ids, output.finish, output.stop) for output in outputs] == [([5], None, None), ([6, 9], "stop", 9)]


@pytest.mark.parametrize(("least", "ends"), [(0, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_none_ends_a_sequence_before_its_least_number_of_tokens(least: int, ends: int) -> None:
    outputs = ended([[5, 9], [6, 9], [9], [1]], ignore_eos=True, stop_token_ids=[9], min_tokens=least)
    assert len(outputs) == ends


def test_logprobs_end_with_the_tokens() -> None:
    output = Output("s", [5, 9, 7], logprobs=["a", "b", "c"])  # type: ignore[list-item]
    assert StopTokens(Sampling(ignore_eos=True, stop_token_ids=[9])).end(output)
    assert output.logprobs == ["a", "b"]


def test_what_sglang_heeds_itself_is_left_to_it() -> None:
    assert [output.finish for output in ended([[5], [9], [7]], stop_token_ids=[9])] == [None, None, None]
