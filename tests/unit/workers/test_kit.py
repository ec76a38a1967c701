"""What engines can do is told in words, each ability in one of its own."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from typing import Any

import pytest

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import Capabilities, DisaggStyle, Handover, Load, Role, Sequence, StoredTensor
from headrace.workers.engine_registry import supports
from headrace.workers.errors import EngineDead, EngineOverloaded, EngineStartFailed, UnsupportedByEngine
from headrace.workers.kit import EngineBase, EngineSupport, refuse_undeclared, reserve_port, starting, summed, words


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


async def test_a_server_can_listen_on_a_reserved_port() -> None:
    with ExitStack() as stack:
        port = reserve_port(stack, "127.0.0.1", 0)
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", port)
        server.close()
        await server.wait_closed()


def test_a_port_on_which_another_listens_cannot_be_reserved() -> None:
    with ExitStack() as stack:
        taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        with pytest.raises(OSError, match="in use"):
            reserve_port(stack, "127.0.0.1", taken.getsockname()[1])


class Lamp(EngineBase):
    """An engine that is looked at."""

    NAME = "lamp"
    LOOK_EVERY_S = 0.001
    broken = False

    def look(self) -> None:
        if self.broken:
            self.declare_dead("it went out")


async def test_an_engine_that_is_looked_at_dies_once_for_the_first_reason() -> None:
    lamp = Lamp()
    dying = asyncio.create_task(lamp.died())
    await asyncio.sleep(0.01)
    await lamp.healthy()
    lamp.broken = True
    assert await asyncio.wait_for(dying, 5) == "it went out"
    lamp.declare_dead("it fell")
    for work in (lamp.healthy(), lamp.replay_kv(0), lamp.set_role(Role.AGGREGATED), lamp.release("a", None)):
        with pytest.raises(EngineDead, match="it went out"):
            await work
    assert lamp.blamed() == frozenset()


async def test_everything_optional_is_refused_by_name() -> None:
    lamp = Lamp()
    await lamp.set_role(Role.AGGREGATED)
    with pytest.raises(UnsupportedByEngine, match="this lamp was started so that it can be aggregated, not decode"):
        await lamp.set_role(Role.DECODE)
    with pytest.raises(UnsupportedByEngine, match="without KV events"):
        lamp.kv_events()
    with pytest.raises(UnsupportedByEngine, match="no operation 'dim'; it has: none"):
        await lamp.control("dim", {})


def test_what_a_constructor_raises_is_a_start_that_failed_and_our_own_errors_stay() -> None:
    with pytest.raises(EngineStartFailed, match="lamp could not start m: no bulb"), starting("lamp", "m"):
        raise RuntimeError("no bulb")
    with pytest.raises(EngineOverloaded), starting("lamp", "m"):
        raise EngineOverloaded("full")


def test_the_load_of_ranks_is_that_of_their_engine_and_of_no_more_sequences_than_it_has() -> None:
    ranks = [Load(running=3, waiting=1, blocks_used=8, step_s=0.1, step_decodes=3), Load(running=2, blocks_used=4, step_s=0.2)]
    load = summed(ranks, mine=4, blocks=10, queued=7)
    assert (load.running, load.waiting, load.blocks_used, load.blocks_total) == (4, 1, 10, 10)
    assert (load.step_s, load.step_decodes, load.queued_prefill_tokens, load.ranks) == (0.2, 3, 7, tuple(ranks))
    assert summed(ranks[:1], mine=9, blocks=10, queued=0).waiting == 6
    assert summed(ranks[:1], mine=9, blocks=10, queued=0).ranks == ()
