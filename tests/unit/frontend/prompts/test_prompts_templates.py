"""Templates render as transformers renders them; tests/engines/test_chat_templates.py holds these same cases against it."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.frontend.errors import BadRequest, ModelUnusable
from headrace.frontend.prompts.templates import ChatTemplate

USER = {"role": "user", "content": "Hi <b>"}
TALK = [USER, {"role": "assistant", "content": "Yo "}, {"role": "user", "content": "Bye"}]

CASES: list[tuple[str, str, dict[str, Any], str]] = [
    ("blocks are trimmed", "  {% if true %}\n  x\n  {% endif %}\ny", {}, "  x\ny"),
    ("tojson leaves html and unicode alone", "{{ {'a': '<é>', 'b': 1} | tojson }}", {}, '{"a": "<é>", "b": 1}'),
    ("tojson indents", "{{ [1] | tojson(indent=2) }}", {}, "[\n  1\n]"),
    ("loops can break", "{% for m in messages %}{{ loop.index }}{% break %}{% endfor %}", {}, "1"),
    (
        "loops can continue",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ loop.index }}{% endfor %}",
        {},
        "23",
    ),
    ("the generation tag shows its body", "a{% generation %}b{{ messages | length }}{% endgeneration %}c", {}, "ab3c"),
    ("special tokens are names", "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}", {}, "<s>|</s>|"),
    ("extra names arrive", "{{ enable_thinking }}", {"extra": {"enable_thinking": False}}, "False"),
    ("dates can be asked for", "{{ strftime_now('%Y') | length }}", {}, "4"),
    (
        "attributes and items both work",
        "{{ messages[0].role }}{{ messages[0]['role'] }}{{ messages[0].get('x') }}",
        {},
        "useruserNone",
    ),
]


@pytest.mark.parametrize(("source", "options", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_environment_is_what_templates_expect(source: str, options: dict[str, Any], expected: str) -> None:
    template = ChatTemplate(source, names={"bos_token": "<s>", "eos_token": "</s>"})
    assert template.render(TALK, **options) == expected


CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
TRIMMING = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>\n{% endfor %}"


@pytest.mark.parametrize(("source", "tail"), [(CHATML, "Yo "), (TRIMMING, "Yo")])
def test_a_continued_message_stays_open_and_keeps_what_the_template_keeps(source: str, tail: str) -> None:
    text = ChatTemplate(source, names={}).render(TALK[:2], add_generation_prompt=False, continue_final_message=True)
    assert text == f"<|user|>Hi <b><|end|>\n<|assistant|>{tail}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[0].nothing.more }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for m in messages %}{{ loop.__class__.__mro__ }}{% endfor %}",
        "{% for m in messages %}{{ loop._iterator.gi_frame }}{% endfor %}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ 'ab' * 10**9 }}",
        "{{ 10**9 * 'ab' }}",
        "{{ [1] * 10**9 }}",
        "{{ 9 ** 99999 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_template_that_refuses_or_misbehaves_is_a_bad_request(source: str) -> None:
    with pytest.raises(BadRequest) as caught:
        ChatTemplate(source, names={}).render(TALK)
    assert caught.value.code == "template_error"


LOOPS = {
    "in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = 1 %}{% endfor %}{% endfor %}",
    "in macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "in recursive loops": "{% for a in [1] * 9 recursive %}{% if loop.depth < 9 %}{{ loop([1] * 9) }}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("source", LOOPS.values(), ids=LOOPS)
def test_a_rendering_ends_when_its_time_is_over(source: str) -> None:
    with pytest.raises(BadRequest, match=r"took longer than 0\.05 s") as caught:
        ChatTemplate(source, names={}, deadline_s=0.05).render(TALK)
    assert caught.value.code == "template_error"
    assert ChatTemplate("{% for m in messages %}x{% endfor %}", names={}).render(TALK) == "xxx"


def test_a_prompt_beyond_any_body_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.frontend.prompts.templates.MAX_CHARS", 1000)
    with pytest.raises(BadRequest, match="longer than 1000 characters"):
        ChatTemplate("{% for i in range(101) %}0123456789{% endfor %}", names={}).render(TALK)


def test_products_that_a_prompt_may_need_are_made() -> None:
    source = "{{ '-' * 3 }}{{ 2 * '=' }}{{ [1] * 2 }}{{ 6 * 7 }}{{ 2 ** 10 }}{{ 1.5 * 2 }}"
    assert ChatTemplate(source, names={}).render(TALK) == "---==[1, 1]4210243.0"


TWO = {"default": "plain {{ tools }}", "tool_use": "tools {{ tools | length }}", "rag": "documents"}


def test_templates_without_a_default_one_make_the_model_unusable() -> None:
    with pytest.raises(ModelUnusable, match="rag, tool_use"):
        ChatTemplate({name: TWO[name] for name in ("tool_use", "rag")}, names={})
    with pytest.raises(ModelUnusable, match="'rag' does not compile"):
        ChatTemplate({**TWO, "rag": "{% if %}"}, names={})


@pytest.mark.parametrize("extra", [{"range": 3}, {"strftime_now": "x"}, {"raise_exception": None}, {"count": 10**12}])
def test_names_from_clients_are_plain_values(extra: dict[str, Any]) -> None:
    source = "{{ strftime_now('%Y') }}{% for i in range(count or 3) %}{{ i }}{% endfor %}{{ raise_exception('no') }}"
    with pytest.raises(BadRequest):
        ChatTemplate(source, names={"count": 3}).render(TALK, extra=extra)
    assert ChatTemplate("{{ told }}", names={}).render(TALK, extra={"told": "{{ messages }}"}) == "{{ messages }}"


def test_the_last_text_of_a_message_in_parts_is_continued() -> None:
    parts = [
        {"type": "text", "text": "One"},
        {"type": "text", "text": "two "},
        {"type": "image_url", "image_url": {"url": "x"}},
    ]
    source = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}</s>{% endfor %}"
    text = ChatTemplate(source, names={}).render([{"role": "assistant", "content": parts}], continue_final_message=True)
    assert text == "[One][two "
    assert parts[1]["text"] == "two "


def test_continuing_needs_a_text_and_a_template_that_shows_it() -> None:
    for messages in ([{"role": "assistant", "content": None}], [{"role": "assistant"}]):
        with pytest.raises(BadRequest):
            ChatTemplate(CHATML, names={}).render(messages, continue_final_message=True)
    with pytest.raises(BadRequest):
        ChatTemplate("x", names={}).render(TALK, continue_final_message=True)
