"""vLLM's own parsers behind our seam: every family, streamed token by token and as a whole, and beside the built-in ones.

No engine is started; the tokenizers are made up, with the special tokens that each family needs.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.broker.messages.frames import Part
from headrace.broker.messages.requests import Generation, Parsing
from headrace.workers.errors import EngineStartFailed, RequestInvalid
from headrace.workers.parsing.builtin import BuiltinParsers
from headrace.workers.parsing.interface import reconcile
from headrace.workers.parsing.selection import REASONING as REASONING_RULES
from headrace.workers.parsing.selection import TOOLS as TOOL_RULES
from headrace.workers.parsing.selection import ParserChoice, choose
from headrace.workers.vllm.parsing import LATE, LEADING, VllmParserFamily, VllmParsers, _late_reasoning
from tests.engines.support.alphabet import pieces_of, tokenizer_with, words_with
from tests.engines.support.samples import REASONING, TOOLS
from tests.support.parsing_pieces import CLOCK, WEATHER, said
from tests.support.runtime_bench import TABLE

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("default"),  # vLLM and torch warn about themselves
]

NAMED = {"type": "function", "function": {"name": "get_weather"}}
THINKING = {"thinking": True, "enable_thinking": True, "reasoning_effort": "high"}
ALPHABETS = {"bytes": tokenizer_with, "words": words_with}

# Parsers that cannot be tried here, and why.
NOT_HERE = {
    "openai": "only together with openai_gptoss, on harmony's own vocabulary: tested apart",
    "openai_gptoss": "only together with openai, on harmony's own vocabulary: tested apart",
    "hf": "reads what the tokenizer's own response template says: tested apart",
}
NEEDS_WORDS = {"olmo3"}  # looks for its marks in whole tokens


@cache
def known() -> Any:
    return VllmParserFamily().known("sample")


@cache
def parsers(kind: str, name: str, alphabet: str) -> VllmParsers:
    sample = (TOOLS if kind == "tool" else REASONING)[name]
    tokenizer = ALPHABETS[alphabet](sample.marks)
    tool, reasoning = (name, None) if kind == "tool" else (None, name)
    return VllmParsers(tokenizer, None, tool=tool, reasoning=reasoning)


def take_apart(of: Any, tokenizer: Any, text: str, parsing: Parsing) -> tuple[list[Part], Any]:
    """All parts of an answer, as the text pipeline would feed the parser."""
    plan = of.plan(parsing, Generation(token_ids=b""), [72])
    parser = plan.parser("request", 0)
    parts: list[Part] = []
    fed = pieces_of(tokenizer, text, skip_special_tokens=plan.requirements.skip_special_tokens)
    for token, piece in fed[:-1]:
        parts += parser.push(token, piece)
    return parts + parser.finish(*fed[-1]), parser


def asking(kind: str, *, whole: bool) -> Parsing:
    if kind == "tool":
        return Parsing(tools=[WEATHER, CLOCK], whole=whole)
    return Parsing(choice="none", whole=whole, template_kwargs=THINKING)


CASES = [
    pytest.param(
        kind,
        name,
        marks=[pytest.mark.skip(reason=NOT_HERE[name])] if name in NOT_HERE else [],
        id=f"{kind}-{name}",
    )
    for kind, table in (("tool", TOOLS), ("reasoning", REASONING))
    for name in sorted(table)
]


def test_there_is_a_sample_of_every_parser() -> None:
    assert set(known().tools) - set(TOOLS) == set(known().reasoning) - set(REASONING) == {"hf"}


def test_every_rule_of_auto_names_a_parser_that_vllm_has() -> None:
    assert {rule.parser for rule in TOOL_RULES} <= set(known().tools)
    assert {rule.parser for rule in REASONING_RULES} <= set(known().reasoning)


@pytest.mark.parametrize("alphabet", sorted(ALPHABETS))
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_streamed_answer_is_the_whole_one(kind: str, name: str, alphabet: str) -> None:
    if alphabet == "bytes" and kind == "reasoning" and name in NEEDS_WORDS:
        pytest.skip("it cannot be used with this tokenizer")
    of = parsers(kind, name, alphabet)
    sample = (TOOLS if kind == "tool" else REASONING)[name]
    whole = said(take_apart(of, of.tokenizer, sample.text, asking(kind, whole=True))[0])
    streamed = said(take_apart(of, of.tokenizer, sample.text, asking(kind, whole=False))[0])
    assert reconcile(streamed, whole) == ("same", [])


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_what_a_family_writes_is_understood(kind: str, name: str) -> None:
    of = parsers(kind, name, "words" if name in NEEDS_WORDS else "bytes")
    sample = (TOOLS if kind == "tool" else REASONING)[name]
    parts, parser = take_apart(of, of.tokenizer, sample.text, asking(kind, whole=True))
    whole = said(parts)
    assert [call.name for call in whole.calls] == ["get_weather"] * sample.calls
    assert all("Köln" in call.arguments or "Bonn" in call.arguments for call in whole.calls)
    assert whole.reasoning.strip() == sample.reasoning
    if name != "minicpm5":  # drops what stands before a call
        assert whole.content.strip() == sample.content.strip()
    assert parser.called == bool(sample.calls)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_the_same_tokens_give_the_same_parts_with_the_same_ids_every_time(kind: str, name: str) -> None:
    """So that a resumed answer, whose tokens are replayed, goes on where it stood."""
    of = parsers(kind, name, "words" if name in NEEDS_WORDS else "bytes")
    sample = (TOOLS if kind == "tool" else REASONING)[name]
    one, other = (take_apart(of, of.tokenizer, sample.text, asking(kind, whole=False))[0] for _ in range(2))
    assert one == other
    calls = said(one).calls
    assert len({call.id for call in calls}) == len(calls)
    assert all(call.id for call in calls)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "kimi_k2", "deepseek_v31", "mistral", "llama3_json", "glm45"])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_beginning_of_an_answer_streams_to_what_its_whole_is_or_says_so(name: str, data: st.DataObject) -> None:
    """Answers that break off: what is handed out is never more than counted as different."""
    of = parsers("tool", name, "bytes")
    text = TOOLS[name].text
    text = text[: data.draw(st.integers(min_value=1, max_value=len(text)))]
    streamed = said(take_apart(of, of.tokenizer, text, asking("tool", whole=False))[0])
    again = said(take_apart(of, of.tokenizer, text, asking("tool", whole=False))[0])
    assert streamed == again
    whole = said(take_apart(of, of.tokenizer, text, asking("tool", whole=True))[0])
    assert reconcile(streamed, whole)[0] in ("same", "differs")  # whatever could be completed has been


def test_ids_that_mean_something_stay_as_the_family_makes_them() -> None:
    tokenizer = tokenizer_with(TOOLS["kimi_k2"].marks)
    config = SimpleNamespace(hf_config=SimpleNamespace(model_type="kimi_k2"), hf_text_config=None, hf_overrides=None)
    of = VllmParsers(tokenizer, config, tool="kimi_k2", reasoning=None)
    text = TOOLS["kimi_k2"].text
    for whole in (False, True):
        parsing = Parsing(tools=[WEATHER], whole=whole, calls_before=2)
        assert [call.id for call in said(take_apart(of, tokenizer, text, parsing)[0]).calls] == ["functions.get_weather:0"]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("tool", [None, "llama3_json"])
def test_calls_that_must_be_made_work_with_and_without_a_parser(tool: str | None, whole: bool) -> None:
    tokenizer = tokenizer_with(["<|python_tag|>", "<think>", "</think>"])
    of = VllmParsers(tokenizer, None, tool=tool, reasoning="qwen3" if tool is None else None)
    before = "<think>hm</think>" if tool is None else ""
    named = Parsing(tools=[WEATHER], choice=NAMED, whole=whole)
    assert of.plan(named, Generation(token_ids=b""), [1]).requirements.guided is not None
    if tool is None:
        made = said(take_apart(of, tokenizer, before + '{"city": "Bonn"}', named)[0])
        assert [(call.name, call.arguments) for call in made.calls] == [("get_weather", '{"city": "Bonn"}')]
        assert made.reasoning == "hm"
        required = Parsing(tools=[WEATHER, CLOCK], choice="required", whole=whole)
        text = before + '[{"name": "clock", "parameters": {}}, {"name": "get_weather", "parameters": {"city": "Bonn"}}]'
        assert [call.name for call in said(take_apart(of, tokenizer, text, required)[0]).calls] == ["clock", "get_weather"]


def test_reasoning_is_told_to_the_engine() -> None:
    of = VllmParsers(tokenizer_with(["<think>", "</think>"]), None, tool=None, reasoning="qwen3")
    opened = of.plan(
        Parsing(choice="none", template_kwargs=THINKING), Generation(token_ids=b""), of.tokenizer.encode("a<think>")
    )
    closed = of.plan(Parsing(choice="none"), Generation(token_ids=b""), of.tokenizer.encode("a<think></think>"))
    assert (opened.requirements.reasoning_ended, closed.requirements.reasoning_ended) == (False, True)
    assert opened.requirements.reasoning_kwargs == {"chat_template_kwargs": THINKING}


def test_structured_output_of_the_request_stays_where_no_tool_is_forced() -> None:
    of = VllmParsers(tokenizer_with(["<think>", "</think>"]), None, tool=None, reasoning="qwen3")
    guided = {"json": {"type": "object"}}
    assert of.plan(Parsing(choice="none"), Generation(token_ids=b"", guided=guided), [1]).requirements.guided == guided


def test_hidden_reasoning_does_not_come_out() -> None:
    of = parsers("reasoning", "qwen3", "bytes")
    for whole in (False, True):
        parsing = Parsing(choice="none", reasoning=False, whole=whole, template_kwargs=THINKING)
        answer = said(take_apart(of, of.tokenizer, REASONING["qwen3"].text, parsing)[0])
        assert (answer.reasoning, answer.content) == ("", "Well.")


def test_tokens_of_reasoning_are_counted() -> None:
    of = parsers("reasoning", "qwen3", "bytes")
    for whole in (False, True):
        parser = take_apart(of, of.tokenizer, "<think>abc</think>Well.", asking("reasoning", whole=whole))[1]
        assert parser.reasoning_tokens() == 3


def test_gpt_oss_is_read_with_harmonys_own_vocabulary() -> None:
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding

    encoding = get_encoding()
    config = SimpleNamespace(hf_config=SimpleNamespace(model_type="gpt_oss"), hf_text_config=None, hf_overrides=None)
    tokenizer = tokenizer_with(TOOLS["openai"].marks)
    of = VllmParsers(tokenizer, config, tool="openai", reasoning="openai_gptoss")
    tokens = encoding.encode(TOOLS["openai"].text, allowed_special="all")
    answers = []
    for whole in (False, True):
        parser = of.plan(Parsing(tools=[WEATHER], whole=whole), Generation(token_ids=b""), [1]).parser("request", 0)
        parts = [part for token in tokens for part in parser.push(token, "")]
        answers.append(said(parts + parser.finish(None, "")))
        assert parser.called
    streamed, whole_answer = answers
    assert reconcile(streamed, whole_answer) == ("same", [])
    assert streamed.reasoning == "Hm."
    assert [(call.name, call.arguments) for call in streamed.calls] == [("get_weather", '{"city": "Köln"}')]


RESPONSE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{content.name}", "arguments": "{content.arguments}"}},
        },
        "content": {},
    },
}


def test_a_model_may_bring_its_own_description_of_what_it_writes() -> None:
    tokenizer = words_with(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    with pytest.raises(EngineStartFailed, match="response_template"):
        VllmParsers(tokenizer, None, tool="hf", reasoning="hf")
    tokenizer.response_template = RESPONSE_TEMPLATE
    of = VllmParsers(tokenizer, None, tool="hf", reasoning="hf")
    text = "<think>Let me see.</think>Hm." + TOOLS["hermes"].text.removeprefix("Hm.")
    prompt = tokenizer.encode("<|im_start|>user\nHow is it?<|im_end|>\n<|im_start|>assistant\n")
    answers = []
    for whole in (False, True):
        plan = of.plan(Parsing(tools=[WEATHER, CLOCK], whole=whole), Generation(token_ids=b""), prompt)
        parser = plan.parser("request", 0)
        fed = pieces_of(tokenizer, text, skip_special_tokens=plan.requirements.skip_special_tokens)
        parts = [part for token, piece in fed[:-1] for part in parser.push(token, piece)]
        answers.append(said(parts + parser.finish(*fed[-1])))
        assert parser.called
    streamed, all_at_once = answers
    assert reconcile(streamed, all_at_once) == ("same", [])
    assert (streamed.reasoning.strip(), streamed.content.strip()) == ("Let me see.", "Hm.")
    assert [call.name for call in streamed.calls] == ["get_weather"] * TOOLS["hermes"].calls


# -- beside the built-in parsers ---------------------------------------------------------------------------------


HERMES = st.lists(
    st.sampled_from(
        [
            "Hm. ",
            "<",
            "\n",
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "K\\"öln"}}\n</tool_call>',
            '<tool_call>{"name": "clock", "arguments": {}}</tool_call>',
        ]
    ),
    max_size=5,
).map("".join)


@settings(max_examples=60, deadline=None)
@given(text=HERMES)
def test_the_built_in_hermes_says_what_vllms_does(text: str) -> None:
    if not text:
        return
    tokenizer = words_with(["<tool_call>", "</tool_call>"])
    for whole in (False, True):
        parsing = Parsing(tools=[WEATHER, CLOCK], whole=whole)
        theirs = said(take_apart(parsers("tool", "hermes", "words"), tokenizer, text, parsing)[0])
        ours = said(take_apart(BuiltinParsers(TABLE, tool="hermes"), tokenizer, text, parsing)[0])
        assert reconcile(ours, theirs) == ("same", [])
        assert [call.id for call in ours.calls] == [call.id for call in theirs.calls]


@pytest.mark.parametrize("text", ["<think>a</think>b", "<think>\na\n</think>\n\nb", "<think>a", "<think></think>b"])
def test_the_built_in_reasoning_says_what_vllms_does(text: str) -> None:
    of = parsers("reasoning", "qwen3", "words")
    for whole in (False, True):
        parsing = asking("reasoning", whole=whole)
        theirs = said(take_apart(of, of.tokenizer, text, parsing)[0])
        ours = said(take_apart(BuiltinParsers(TABLE, reasoning="think"), of.tokenizer, text, parsing)[0])
        assert reconcile(ours, theirs) == ("same", [])


# -- before a model is loaded ------------------------------------------------------------------------------------


def test_a_wrong_name_is_refused_with_all_that_vllm_has() -> None:
    with pytest.raises(EngineStartFailed) as refused:
        choose(VllmParserFamily(), tool="hermse", reasoning="none", model="nowhere", args={})
    assert all(name in str(refused.value) for name in known().tools)


def test_a_named_parser_that_does_not_fit_the_tokenizer_stops_the_start_and_a_guessed_one_is_left_out(model_dir: Any) -> None:
    brand = VllmParserFamily()
    with pytest.raises(EngineStartFailed, match="mistral"):
        brand.check(ParserChoice(tool="mistral"), str(model_dir), {})
    guessed = ParserChoice(tool="mistral", reasoning="deepseek_r1", guessed=frozenset({"tool", "reasoning"}))
    assert brand.check(guessed, str(model_dir), {}) == ParserChoice(guessed=guessed.guessed)


def test_tools_that_vllm_cannot_use_are_an_error_of_the_request() -> None:
    of = parsers("tool", "hermes", "bytes")
    with pytest.raises(RequestInvalid):
        of.plan(Parsing(tools=[{"type": "function", "function": {}}]), Generation(token_ids=b""), [1])


@pytest.mark.parametrize(
    ("tool", "reasoning", "late"), [(None, "hunyuan_a13b", True), (None, "inkling", True), ("inkling", "inkling", False)]
)
def test_reasoning_comes_at_the_end_where_its_parser_cannot_be_streamed(tool: str | None, reasoning: str, late: bool) -> None:
    sample = REASONING[reasoning]
    tokenizer = tokenizer_with(sample.marks)
    of = VllmParsers(tokenizer, None, tool=tool, reasoning=reasoning)
    parsing = Parsing(choice="none", template_kwargs=THINKING)
    plan = of.plan(parsing, Generation(token_ids=b""), [72])
    parser = plan.parser("request", 0)
    fed = pieces_of(tokenizer, sample.text, skip_special_tokens=plan.requirements.skip_special_tokens)
    before = [part for token, piece in fed[:-1] for part in parser.push(token, piece)]
    assert bool(before) != late
    assert said(before + parser.finish(*fed[-1])).reasoning == sample.reasoning


def test_hunyuan_is_streamed_in_the_vocabulary_that_its_parser_is_made_for() -> None:
    class Own:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [14023, 771, 397]

    assert not _late_reasoning(Own(), tool=None, reasoning="hunyuan_a13b")


JAMBA = st.lists(
    st.sampled_from([" ", "Hm. ", "<", "<tool", "\n", TOOLS["jamba"].text, "<tool_calls>[", "</tool_calls>"]), max_size=4
).map("".join)


@settings(max_examples=60, deadline=None)
@given(text=JAMBA)
def test_content_that_is_certain_is_not_held_back_to_the_end(text: str) -> None:
    if not text:
        return
    of = parsers("tool", "jamba", "words")
    streamed = take_apart(of, of.tokenizer, text, asking("tool", whole=False))[0]
    whole = said(take_apart(of, of.tokenizer, text, asking("tool", whole=True))[0])
    assert reconcile(said(streamed), whole) == ("same", [])
    if "Hm. Hm. " in text.partition("<tool_calls>")[0]:
        assert sum(part.kind == "content" for part in streamed) > 1


def test_late_parsers_are_among_the_known() -> None:
    assert set(known().tools) >= LATE >= set(LEADING)
