"""A model's template takes neither the frontend's memory nor its time: not when it is compiled, not when it is rendered."""

from __future__ import annotations

import tracemalloc

import pytest

from headrace.frontend.errors import BadRequest, ModelUnusable
from headrace.frontend.prompts.templates import MAX_TEMPLATE_CHARS, ChatTemplate

BOMBS = [
    "{{ '%800000000d' % 1 }}",
    "{{ '%*d' % (800000000, 1) }}",
    "{{ '%(a)800000000d' % {'a': 1} }}",
    "{{ '%.800000000f' % 1.0 }}",
    "{{ '%800000000d' | format(1) }}",
    "{{ '{:800000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 800000000) }}",
    "{{ 'a'.center(800000000) }}",
    "{{ 'a'.ljust(800000000) }}",
    "{{ 'a'.rjust(800000000) }}",
    "{{ 'a'.zfill(800000000) }}",
    "{{ 'a\\t'.expandtabs(800000000) }}",
    "{{ 'a' | center(800000000) }}",
    "{{ 'a\\nb' | indent(800000000) }}",
    "{{ [1, [2]] | tojson(indent=300000000) }}",
    "{{ [1] | slice(30000000) | list }}",
    "{{ [1] | batch(30000000, 1) | list }}",
    "{{ 'a' * 800000000 }}",
    "{{ ('a' * 10000).replace('a', 'b' * 10000) }}",
    "{{ ('a' * 10000) | replace('a', 'b' * 10000) }}",
    "{{ ('b' * 10000).join('a' * 10000) }}",
    "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
    "{{ lipsum(n=100000) }}",
]


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_template_that_would_take_the_memory_is_stopped(bomb: str) -> None:
    tracemalloc.start()
    try:
        template = ChatTemplate(bomb, names={})
        with pytest.raises(BadRequest):
            template.render([{"role": "user", "content": "a"}])
        assert tracemalloc.get_traced_memory()[1] < 400 * 1024 * 1024
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("bomb", [bomb for bomb in BOMBS if bomb.startswith("{{")])
def test_nothing_of_a_template_is_computed_while_it_is_compiled(bomb: str) -> None:
    source = "{% if false %}" + bomb + "{% endif %}{% set x = " + bomb[2:-2] + " if false %}fine"
    tracemalloc.start()
    try:
        assert ChatTemplate(source, names={}).render([{"role": "user", "content": "a"}]).endswith("fine")
        assert tracemalloc.get_traced_memory()[1] < 100 * 1024 * 1024
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "[" * 3000 + "]" * 3000 + " }}",
        "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
        "{{ " + "9" * 5000 + " }}",
        "{% autoescape 'a' | center(800000000) %}x{% endautoescape %}",
        "x" * (MAX_TEMPLATE_CHARS + 1),
    ],
)
def test_a_template_that_cannot_be_compiled_makes_its_model_unusable(source: str) -> None:
    with pytest.raises(ModelUnusable):
        ChatTemplate(source, names={})


def test_what_templates_really_do_is_left_alone() -> None:
    source = (
        "{{ '%s: %-5d|%.2f' % ('a', 3, 1.5) }} {{ 'x'.center(5) }} {{ {'a': [1]} | tojson(indent=2) | replace(' ', '') }} "
        "{{ 'a' ~ 1 ~ none }} {{ 'a' + 'b' }} {{ [1] + [2] }} {{ '{:>4}'.format(7) }} {{ 'a-b'.replace('-', '+') }} {{ 1 + 2 }}"
    )
    assert (
        ChatTemplate(source, names={}).render([{"role": "user", "content": "a"}])
        == 'a: 3    |1.50   x   {\n"a":[\n1\n]\n} a1None ab [1, 2]    7 a+b 3'
    )
