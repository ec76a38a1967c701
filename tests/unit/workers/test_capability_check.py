"""A sequence that needs more than its engine declares is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.broker.messages import Sampling
from headrace.workers.capability_check import refuse_undeclared
from headrace.workers.engine import Capabilities, DisaggStyle, Handover, Sequence
from headrace.workers.errors import UnsupportedByEngine
from headrace.workers.prompt_embeds import StoredTensor

ALL = Capabilities(
    disagg=DisaggStyle.PARAMS,
    logprobs=True,
    prompt_logprobs=True,
    guided=frozenset({"json", "regex"}),
    lora="static",
    media=frozenset({"image"}),
    prompt_embeds=True,
    cache_salt=True,
)
NEEDS: list[tuple[str, dict[str, Any]]] = [
    ("seed", {"sampling": Sampling(max_tokens=1, seed=1)}),
    ("logprobs", {"logprobs": 0}),
    ("prompt_logprobs", {"prompt_logprobs": 0}),
    ("json", {"guided": {"json": {}, "disable_any_whitespace": True}}),
    ("adapter", {"adapter": "fr"}),
    ("image", {"media": [{"kind": "image"}]}),
    ("prompt_embeds", {"prompt_embeds": StoredTensor("float32", (1, 1), memoryview(bytes(4)))}),
    ("cache_salt", {"cache_salt": "tenant"}),
    ("decode", {"handover": Handover(kind="decode")}),
]


def sequence(**options: Any) -> Sequence:
    return Sequence(id="a", token_ids=[1], prompt_tokens=1, **{"sampling": Sampling(max_tokens=1)} | options)


@pytest.mark.parametrize(("name", "options"), NEEDS)
def test_each_need_is_refused_by_name_and_passes_where_declared(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedByEngine, match=name) as refused:
        refuse_undeclared(Capabilities(seeds=False), sequence(**options))
    assert refused.value.param in (name, None)
    refuse_undeclared(ALL, sequence(**options))


def test_one_kind_of_several_is_not_enough() -> None:
    with pytest.raises(UnsupportedByEngine, match="grammar"):
        refuse_undeclared(ALL, sequence(guided={"grammar": "root ::= x"}))
    with pytest.raises(UnsupportedByEngine, match="video"):
        refuse_undeclared(ALL, sequence(media=[{"kind": "image"}, {"kind": "video"}]))


def test_a_priority_and_a_seed_at_temperature_zero_are_never_refused() -> None:
    sampling = Sampling(max_tokens=1, temperature=0.0, seed=1)
    refuse_undeclared(Capabilities(seeds=False), sequence(priority=5, session_id="s", sampling=sampling))
