"""The account of a run under faults: what counts as right, what is allowed, and how long a stream stood still."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from headrace.tools.chaos.client import StreamChecker, check_answer, classify_late_error, refusal
from headrace.tools.chaos.deployment import Residue
from headrace.tools.chaos.ledger import (
    BROKEN,
    FINE,
    AnswerChecker,
    Injury,
    Ledger,
    LedgerEntry,
    Outcome,
    divergence,
    faulted,
    percentile,
)
from headrace.tools.chaos.questions import TOOL, ApiQuestion, Question, draw_questions
from headrace.tools.chaos.run import ChaosReport, render

QUESTION = Question(number=1, prompt=tuple(range(300, 340)), max_tokens=30, stream=True, choices=2, seed=5)


def answer(question: Question = QUESTION) -> dict[str, Any]:
    """What the simulator says."""
    choices = [
        {"index": i, "text": text, "finish_reason": finish}
        for i, (text, finish) in enumerate(zip(question.texts, question.finishes, strict=True))
    ]
    usage = {"prompt_tokens": len(question.prompt), "completion_tokens": question.completion_tokens}
    return {"choices": choices, "usage": usage}


# -- answers ----------------------------------------------------------------------------------------------------------------


def test_the_right_answer_is_answered() -> None:
    assert QUESTION.texts[0] != QUESTION.texts[1], "each choice has a seed of its own"
    assert check_answer(QUESTION, answer()).outcome is Outcome.ANSWERED


def test_a_token_too_few_or_too_many_and_a_foreign_one_are_told_apart() -> None:
    text = QUESTION.texts[0]
    half = len(text) // 2
    for got, outcome in (
        (text[:half], Outcome.MISSING),
        (text[:half] + text[half - 20 :], Outcome.DUPLICATED),
        (text[:half] + text[half + 20 :], Outcome.MISSING),
        (text[:half] + "#" + text[half:], Outcome.WRONG),
        (text + "#", Outcome.WRONG),
    ):
        wrong = answer()
        wrong["choices"][0]["text"] = got
        assert check_answer(QUESTION, wrong).outcome is outcome, got


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("choices", 1, "finish_reason"), "stop"),
        (("usage", "completion_tokens"), 59),
        (("usage", "prompt_tokens"), 41),
        (("choices", 1, "index"), 2),
    ],
)
def test_a_wrong_end_or_count_makes_an_answer_wrong(path: tuple[Any, ...], value: object) -> None:
    wrong: Any = answer()
    *above, last = path
    target = wrong
    for step in above:
        target = target[step]
    target[last] = value
    assert check_answer(QUESTION, wrong).outcome is Outcome.WRONG


def test_a_stop_string_ends_the_expected_answer() -> None:
    prompt = QUESTION.prompt
    words = Question(number=1, prompt=prompt, max_tokens=30, stream=False).texts[0].split(" ")
    question = Question(number=1, prompt=prompt, max_tokens=30, stream=False, stop=f" {words[4]} {words[5]}")
    assert question.finishes == ("stop",)
    assert question.texts[0] == " ".join(words[:4])


def events(question: Question = QUESTION) -> list[dict[str, Any]]:
    """A stream, some characters at a time, its choices taking turns."""
    found = []
    for at in range(0, max(map(len, question.texts)), 7):
        for index, text in enumerate(question.texts):
            found.append({"choices": [{"index": index, "text": text[at : at + 7], "finish_reason": None}]})
    for index, finish in enumerate(question.finishes):
        found.append({"choices": [{"index": index, "text": "", "finish_reason": finish}]})
    return [*found, {"choices": [], "usage": answer(question)["usage"]}]


def read(stream: list[dict[str, Any]]) -> Outcome:
    checker = StreamChecker(QUESTION)
    for event in stream:
        if (wrong := checker.feed(event)) is not None:
            return wrong.outcome
    return checker.ended().outcome


def test_a_stream_is_compared_as_it_comes() -> None:
    stream = events()
    assert read(stream) is Outcome.ANSWERED
    assert read([*stream[:6], *stream[2:]]) is Outcome.DUPLICATED
    assert read([*stream[:6], *stream[10:]]) is Outcome.MISSING
    assert read(stream[:-1]) is Outcome.WRONG, "usage was asked for"
    assert read([*stream[:-2], stream[-1]]) is Outcome.WRONG, "a choice without an end"
    late = {"choices": [{"index": 0, "text": "x", "finish_reason": None}]}
    assert read([*stream, late]) is Outcome.DUPLICATED, "text after the end of a choice"
    assert read([*stream[:4], {"error": {"code": "engine_error", "message": "m"}}]) is Outcome.FAILED


# -- errors -----------------------------------------------------------------------------------------------------------------


def error(code: str | None = "no_worker") -> bytes:
    return json.dumps({"error": {"message": "m", "type": "t", "param": None, "code": code}}).encode()


@pytest.mark.parametrize(
    ("status", "headers", "body", "outcome"),
    [
        (503, {}, error(), Outcome.REFUSED),
        (429, {}, error("queue_full"), Outcome.REFUSED),
        (503, {"x-should-retry": "false"}, error(), Outcome.FAILED),
        (502, {}, error("engine_error"), Outcome.FAILED),
        (404, {}, error("model_not_found"), Outcome.FAILED),
        (503, {}, b"Service Unavailable", Outcome.FAILED),
        (500, {}, error("poison"), Outcome.POISONED),
    ],
)
def test_only_a_typed_error_that_says_try_again_is_a_refusal(
    status: int, headers: dict[str, str], body: bytes, outcome: Outcome
) -> None:
    assert refusal(status, headers, body).outcome is outcome


def test_an_error_after_the_first_tokens_is_a_failure_unless_the_frontend_leaves() -> None:
    assert classify_late_error({"code": "engine_error"}).outcome is Outcome.FAILED
    assert classify_late_error({"code": "draining"}).outcome is Outcome.CUT


# -- what is allowed ----------------------------------------------------------------------------------------------------------


def entry(outcome: Outcome, *, began_s: float = 10.0, ended_s: float = 20.0, frontend: str = "f1") -> LedgerEntry:
    made = LedgerEntry(1, frontend, began_s)
    made.end(outcome, ended_s)
    return made


@pytest.mark.parametrize("outcome", list(Outcome))
def test_without_a_fault_only_right_answers_and_refusals_are_allowed(outcome: Outcome) -> None:
    ledger = Ledger()
    ledger.begin(entry(outcome))
    assert (ledger.broken() == []) == (outcome in FINE)


@pytest.mark.parametrize(
    ("victim", "at_s", "over_s", "allowed"),
    [
        ("f1", 15.0, 16.0, True),
        ("f1", 5.0, 11.0, True),
        ("f1", 5.0, 9.0, False),
        ("f1", 21.0, 25.0, False),
        ("f2", 15.0, 16.0, False),
    ],
)
def test_an_answer_may_be_cut_only_while_its_own_frontend_is_down(
    victim: str, at_s: float, over_s: float, allowed: bool
) -> None:
    ledger = Ledger()
    ledger.begin(entry(Outcome.CUT))
    ledger.injure(Injury("frontend kill", victim, at_s, over_s))
    assert (ledger.broken() == []) == allowed


def test_no_fault_excuses_a_lost_or_wrong_answer() -> None:
    ledger = Ledger()
    for outcome in BROKEN:
        ledger.begin(entry(outcome))
    ledger.injure(Injury("frontend kill", "f1", 0.0))
    assert [one.outcome for one in ledger.broken()] == list(BROKEN)


@pytest.mark.parametrize(("crashes", "allowed"), [(2, False), (3, True)])
def test_poison_needs_three_crashes_in_the_life_of_the_request(crashes: int, allowed: bool) -> None:
    ledger = Ledger()
    ledger.begin(entry(Outcome.POISONED))
    ledger.injure(Injury("worker kill", "w", 5.0, crash=True))
    ledger.injure(Injury("router kill", "r", 12.0))
    for n in range(crashes):
        ledger.injure(Injury("worker kill", "w", 12.0 + n, crash=True))
    assert (ledger.broken() == []) == allowed


# -- pauses -----------------------------------------------------------------------------------------------------------------


def test_a_pause_belongs_to_the_fault_it_began_under_and_to_those_who_were_held() -> None:
    ledger = Ledger()
    held, other, later = LedgerEntry(1, "f", 0.0, id="a"), LedgerEntry(2, "f", 0.0, id="b"), LedgerEntry(3, "f", 0.0, id="c")
    held.came = [9.0, 10.1, 11.0, 14.0, 21.0, 21.1]
    other.came = [9.0, 15.0, 22.0]
    later.came = [10.5, 11.5]
    for one in (held, other, later):
        ledger.begin(one)
    ledger.injure(Injury("worker kill", "w", 10.0, held=frozenset({"a", "c"})))
    ledger.injure(Injury("nats restart", "n", 16.0))
    assert ledger.pauses()["worker kill"] == [7.0], "14 to 21 began before the second fault; c came after the first"
    ledger.injuries[1].at_s = 14.1
    assert ledger.pauses() == {"worker kill": [3.0], "nats restart": [7.0, 7.0]}


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 2.0), (0.75, 3.0), (0.99, 4.0), (1.0, 4.0)])
def test_percentiles_are_values_that_were_measured(share: float, value: float) -> None:
    assert percentile([3.0, 1.0, 4.0, 2.0], share) == value
    assert percentile([], share) == 0.0


# -- what is asked ------------------------------------------------------------------------------------------------------------


def test_the_same_seed_asks_the_same_and_everything_there_is() -> None:
    one, two = draw_questions(3), draw_questions(3)
    every = [next(one) for _ in range(300)]
    assert every == [next(two) for _ in range(300)]
    assert every[0] != next(draw_questions(4))
    spoken = [question for question in every if isinstance(question, ApiQuestion)]
    assert {question.api for question in spoken} == {"chat", "responses", "messages", "completions"}
    assert {question.stream for question in spoken} == {True, False}
    for kind in ("reasoning", "calls", "logprobs", "pattern", "content"):
        assert any(getattr(question, kind) for question in spoken), kind
    drawn = [question for question in every if isinstance(question, Question)]
    assert {question.stream for question in drawn} == {True, False}
    for kind in ("stop", "seed", "cancel_after"):
        assert any(getattr(question, kind) is not None for question in drawn), kind
    assert any(question.choices > 1 for question in drawn)
    assert any("stop" in question.finishes for question in drawn)
    assert max(len(question.prompt) for question in drawn) > 500
    assert max(question.max_tokens for question in drawn) == 1000
    assert len({question.prompt for question in drawn}) == len(drawn)


def test_what_is_wrong_is_named_once_enough_has_come_to_tell() -> None:
    text = QUESTION.texts[0]
    wrong = [divergence(text[:40] + text[30 : 30 + n], text) for n in (5, 40)]
    assert [(one.outcome, one.sure) for one in wrong if one] == [(Outcome.DUPLICATED, False), (Outcome.DUPLICATED, True)]


# -- the report ---------------------------------------------------------------------------------------------------------------


def report(ledger: Ledger, **fields: Any) -> ChaosReport:
    kept: dict[str, Any] = {
        "seed": 1,
        "mode": "aggregated",
        "minutes": 1.0,
        "ledger": ledger,
        "residue": Residue({"queued": 0}, []),
        "dead_letters": 0,
        "troubles": [],
        "longest_stall_s": 0.1,
    }
    return ChaosReport(**{**kept, **fields})


def test_a_run_that_kept_every_promise_says_so() -> None:
    ledger = Ledger()
    ledger.begin(entry(Outcome.ANSWERED))
    ledger.injure(Injury("worker kill", "w", 12.0, 13.0))
    good = report(ledger)
    assert good.broken == []
    assert render(good).endswith("every promise was kept\n")
    assert (good.as_data()["sent"], good.as_data()["faults"]) == (1, {"worker kill": 1})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"residue": Residue({"blocks held": 3}, [])}, "3 blocks held left at the end"),
        ({"residue": Residue({}, ["W_w-1"])}, "W_w-1 is the consumer of a worker that is gone"),
        ({"dead_letters": 1}, "1 dead letters, but 0 clients were told of poison"),
        ({"troubles": ["worker-1 did not end"]}, "worker-1 did not end"),
    ],
)
def test_whatever_is_left_breaks_a_promise(fields: dict[str, Any], words: str) -> None:
    bad = report(Ledger(), **fields)
    assert bad.broken == [words]
    assert words in render(bad)


TEXT = "some words that are said once and in this order"
NAMES = ("a", "b")
ARGUMENTS = json.dumps({"names": list(NAMES)})
SAID = ApiQuestion(number=1, api="chat", stream=True, asked="?", content=TEXT, reasoning="thought")
CALLING = replace(SAID, content="", reasoning="", calls=(NAMES,))


def chat(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def called(name: str | None, arguments: str) -> dict[str, Any]:
    return chat({"tool_calls": [{"index": 0, "function": {"name": name, "arguments": arguments}}]})


TALK = [chat({"reasoning_content": "thought"}), chat({"content": TEXT[:9]}), chat({"content": TEXT[9:]}), chat({}, "stop")]
CALL = [called(TOOL, ARGUMENTS[:5]), called(None, ARGUMENTS[5:]), chat({}, "tool_calls")]
RESPONSE = [
    {"type": "response.output_text.delta", "delta": TEXT},
    {"type": "response.completed", "response": {"status": "completed"}},
]
RESPONSE_CALL = [
    {"type": "response.output_item.added", "output_index": 0, "item": {"type": "function_call", "name": TOOL}},
    {"type": "response.function_call_arguments.delta", "output_index": 0, "delta": ARGUMENTS},
    {"type": "response.completed", "response": {"status": "completed"}},
]
MESSAGE = [
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": TEXT}},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
    {"type": "message_stop"},
]
MESSAGE_CALL = [
    {"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use", "name": TOOL}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": ARGUMENTS}},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
    {"type": "message_stop"},
]
PLAIN = replace(SAID, reasoning="")
STREAMS: list[tuple[ApiQuestion, list[dict[str, Any]]]] = [
    (SAID, TALK),
    (CALLING, CALL),
    (replace(PLAIN, api="responses"), RESPONSE),
    (replace(CALLING, api="responses"), RESPONSE_CALL),
    (replace(PLAIN, api="messages"), MESSAGE),
    (replace(CALLING, api="messages"), MESSAGE_CALL),
]


def heard(question: ApiQuestion, stream: list[dict[str, Any]]) -> Outcome:
    checker = AnswerChecker(question)
    for event in stream:
        if (ended := checker.feed(event)) is not None:
            return ended.outcome
    return checker.ended().outcome


@pytest.mark.parametrize(("question", "stream"), STREAMS)
def test_a_stream_is_right_and_no_longer_when_anything_is_missing_or_comes_twice(
    question: ApiQuestion, stream: list[dict[str, Any]]
) -> None:
    assert heard(question, stream) is Outcome.ANSWERED
    for at, event in enumerate(stream):
        if event.get("type") in ("message_stop", "content_block_start") and "name" not in str(event):
            continue  # says nothing of its own
        assert heard(question, stream[:at] + stream[at + 1 :]) is not Outcome.ANSWERED, event
        if "delta" in str(event.get("type")) and "stop_reason" not in str(event):
            assert heard(question, [*stream[: at + 1], event, *stream[at + 1 :]]) is not Outcome.ANSWERED, event


WHOLE: list[tuple[ApiQuestion, dict[str, Any]]] = [
    (SAID, {"choices": [{"message": {"content": TEXT, "reasoning_content": "thought"}, "finish_reason": "stop"}]}),
    (
        replace(PLAIN, api="responses"),
        {"status": "completed", "output": [{"type": "message", "content": [{"type": "output_text", "text": TEXT}]}]},
    ),
    (
        replace(CALLING, api="responses"),
        {"status": "completed", "output": [{"type": "function_call", "name": TOOL, "arguments": ARGUMENTS}]},
    ),
    (replace(PLAIN, api="messages"), {"stop_reason": "end_turn", "content": [{"type": "text", "text": TEXT}]}),
    (
        replace(CALLING, api="messages"),
        {"stop_reason": "tool_use", "content": [{"type": "tool_use", "name": TOOL, "input": {"names": list(NAMES)}}]},
    ),
]


@pytest.mark.parametrize(("question", "answer"), WHOLE)
def test_a_whole_answer_is_compared_part_by_part(question: ApiQuestion, answer: dict[str, Any]) -> None:
    assert AnswerChecker(question).check_whole(answer).outcome is Outcome.ANSWERED
    other = replace(question, calls=(("c",),)) if question.calls else replace(question, content=TEXT + " more")
    assert AnswerChecker(other).check_whole(answer).outcome in (Outcome.MISSING, Outcome.WRONG)


def test_log_probabilities_must_spell_the_text() -> None:
    question = replace(PLAIN, logprobs=True)

    def answer(*tokens: str) -> dict[str, Any]:
        entries = [{"token": token} for token in tokens]
        return {"choices": [{"message": {"content": TEXT}, "finish_reason": "stop", "logprobs": {"content": entries}}]}

    assert AnswerChecker(question).check_whole(answer(TEXT[:4], TEXT[4:], "<end>")).outcome is Outcome.ANSWERED
    assert AnswerChecker(question).check_whole(answer(TEXT[:4])).outcome is Outcome.WRONG


def test_three_crashes_are_told_from_a_frontend_that_leaves() -> None:
    assert faulted({"message": "the request was running on 3 workers when each of them crashed"}).outcome is Outcome.POISONED
    assert faulted({"type": "overloaded_error", "message": "shutting down"}).outcome is Outcome.CUT
