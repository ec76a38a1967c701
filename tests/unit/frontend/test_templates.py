"""Templates render as transformers renders them; tests/engines/test_chat_templates.py holds these same cases against it."""

from __future__ import annotations

from typing import Any

import pytest

from frontend.errors import BadRequest, ModelUnusable
from frontend.templates import ChatTemplate

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
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_refuses_or_misbehaves_is_a_bad_request(source: str) -> None:
    with pytest.raises(BadRequest) as caught:
        ChatTemplate(source, names={}).render(TALK)
    assert caught.value.code == "template_error"


def test_a_template_that_does_not_compile_makes_the_model_unusable() -> None:
    with pytest.raises(ModelUnusable):
        ChatTemplate("{% if %}", names={})


def test_what_the_renderer_itself_sets_cannot_be_overridden() -> None:
    with pytest.raises(BadRequest) as caught:
        ChatTemplate("x", names={}).render(TALK, extra={"messages": []})
    assert caught.value.param == "chat_template_kwargs.messages"


def test_continuing_needs_a_text_and_a_template_that_shows_it() -> None:
    for messages in ([{"role": "assistant", "content": None}], [{"role": "assistant"}]):
        with pytest.raises(BadRequest):
            ChatTemplate(CHATML, names={}).render(messages, continue_final_message=True)
    with pytest.raises(BadRequest):
        ChatTemplate("x", names={}).render(TALK, continue_final_message=True)
