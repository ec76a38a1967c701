"""What an operator sets for a model reaches its card, and nothing that could not work."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.base.errors import SettingsError
from headrace.broker.models.cards import ModelCard
from headrace.config.build_settings import worker_settings
from headrace.config.settings import load
from headrace.workers.engine import EngineInfo
from headrace.workers.registration import build_card

INFO = EngineInfo(
    engine="sim",
    version="1",
    tokenizer_dir="",
    context_length=512,
    block_size=16,
    blocks=8,
    slots=4,
    vocab_size=300,
    eos_token_ids=(2,),
    default_sampling={"temperature": 0.6, "top_k": 40},
)


def card(**flags: Any) -> ModelCard:
    given = {"worker.engine": "sim", "worker.model": "m", **{f"worker.{k}": v for k, v in flags.items()}}
    return build_card(worker_settings(load("worker", flags=given)), "m", INFO, {})


def test_without_settings_the_models_own_defaults_are_the_cards() -> None:
    plain = card()
    assert plain.default_sampling == {"temperature": 0.6, "top_k": 40}
    assert (plain.aliases, plain.default_max_tokens, plain.template_kwargs) == ([], None, {})


def test_settings_of_the_operator_go_over_them() -> None:
    made = card(
        aliases="small,gpt-4o-mini",
        default_sampling=["temperature=0", "min_p=0.1"],
        default_max_tokens="256",
        template_kwargs=["enable_thinking=false", "style=calm"],
    )
    assert made.aliases == ["small", "gpt-4o-mini"]
    assert made.default_sampling == {"temperature": 0, "top_k": 40, "min_p": 0.1}
    assert made.default_max_tokens == 256
    assert made.template_kwargs == {"enable_thinking": False, "style": "calm"}


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("default_sampling", ["temprature=1"], "temprature"),
        ("default_sampling", ["temperature=hot"], "temperature"),
        ("default_sampling", ["temperature=true"], "temperature"),
        ("default_max_tokens", "0", "default"),
    ],
)
def test_what_could_not_work_is_refused_at_the_start(name: str, value: Any, told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        card(**{name: value})
