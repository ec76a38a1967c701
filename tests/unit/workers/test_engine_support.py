"""What engines can do is told in words, each ability in one of its own."""

from __future__ import annotations

import pytest

from headrace.workers.engine import Capabilities, DisaggStyle, Role
from headrace.workers.engine_registry import supports
from headrace.workers.engine_support import EngineSupport, words


def test_each_ability_is_a_word() -> None:
    able = Capabilities(
        roles=frozenset({Role.DECODE}),
        disagg=DisaggStyle.RENDEZVOUS,
        resume=False,
        seeds=False,
        logprobs=True,
        guided=frozenset({"json"}),
        lora="static",
        media=frozenset({"audio"}),
        sleep_levels=(2,),
        operations=frozenset({"stats"}),
    )
    expected = {"role decode", "handover rendezvous", "logprobs", "guided json", "lora static", "media audio"}
    assert words(able, ("chat",)) == expected | {"sleep level 2", "operation stats", "kind chat"}


def test_every_field_of_capabilities_is_told() -> None:
    plain = words(Capabilities(resume=False, seeds=False, roles=frozenset()))
    assert plain == frozenset()
    for name, kind in Capabilities.__annotations__.items():
        some = {"bool": True, "tuple[int, ...]": (1,), "DisaggStyle": DisaggStyle.PARAMS}.get(kind, frozenset({Role.DECODE}))
        given = {"resume": False, "seeds": False, "roles": frozenset(), name: "dynamic" if name == "lora" else some}
        assert words(Capabilities(**given)), name  # type: ignore[arg-type]


def test_conditions_and_reasons_are_for_words_that_the_engine_has() -> None:
    for wrong in ({"conditions": {"fly": "wings"}}, {"untried": {"fly": "no air"}}):
        with pytest.raises(ValueError, match="fly"):
            EngineSupport(name="x", title="x", words=frozenset({"resume"}), **wrong)


def test_engines_have_names_of_their_own() -> None:
    names = [engine.name for engine in supports()]
    assert len(set(names)) == len(names)
