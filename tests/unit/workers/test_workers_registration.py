"""What a pool is told of the parsers of its workers, and that it is one engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import structlog

from headrace.broker.codec import encode
from headrace.broker.messages.members import WorkerMember
from headrace.broker.models.cards import ModelCard
from headrace.jetstream.errors import RevisionConflict
from headrace.jetstream.subjects import Subjects
from headrace.workers.engine import Capabilities, EngineInfo
from headrace.workers.errors import EngineStartFailed, RegistrationRefused
from headrace.workers.parsing.selection import ParserChoice
from headrace.workers.registration import build_card, build_member, refuse_mixed_engines, register_card, with_longest_context
from headrace.workers.settings import WorkerSettings

INFO = EngineInfo(
    engine="sim",
    version="0",
    tokenizer_dir="",
    context_length=100,
    block_size=32,
    blocks=9,
    slots=9,
    vocab_size=9,
    eos_token_ids=(2,),
)


class Shelf:
    """A bucket with one card, the leases of live workers, and an object store that has every file.

    `others`: cards that other workers store just before this one.
    """

    def __init__(self, card: ModelCard, *, live: bool = True, others: Sequence[ModelCard] = ()) -> None:
        self.card = card
        self.live = live
        self.others = list(others)

    def bucket(self, name: str) -> Shelf:
        return self

    def objects(self, name: str) -> Shelf:
        return self

    async def get(self, key: str) -> Any:
        return type("Entry", (), {"value": encode(self.card), "revision": 1})()

    async def entries(self, pattern: str) -> list[str]:
        return ["a lease"] if self.live else []

    async def update(self, key: str, value: bytes, *, revision: int) -> None:
        if self.others:
            self.card = self.others.pop()
            raise RevisionConflict(key)


def card(parsers: ParserChoice) -> ModelCard:
    return build_card(WorkerSettings(engine="sim", model="m"), "m", INFO, {}, parsers)


def test_the_lease_tells_how_long_the_start_took() -> None:
    settings = WorkerSettings(engine="sim", model="m")
    first = build_member(settings, "w", card(ParserChoice()), INFO, Capabilities())
    second = build_member(settings, "w", card(ParserChoice()), INFO, Capabilities())
    assert 0.0 < first.start_s <= second.start_s < 24 * 3600.0


async def test_a_worker_with_other_parsers_joins_and_says_so() -> None:
    with structlog.testing.capture_logs() as logs:
        wanted = card(ParserChoice("mistral", "qwen3"))
        in_force = await register_card(Shelf(card(ParserChoice("hermes"))), Subjects("x"), wanted, {})  # type: ignore[arg-type]
    assert (in_force.tool_parser, in_force.reasoning_parser) == ("mistral", "qwen3")
    assert [(log["event"], log["before"], log["now"]) for log in logs] == [
        ("card.parsers_changed", ("hermes", None), ("mistral", "qwen3"))
    ]


async def test_a_worker_with_the_same_parsers_says_nothing() -> None:
    with structlog.testing.capture_logs() as logs:
        await register_card(Shelf(card(ParserChoice("hermes"))), Subjects("x"), card(ParserChoice("hermes")), {})  # type: ignore[arg-type]
    assert logs == []


class Leases:
    """The bucket of leases, with one worker."""

    def __init__(self, engine: str, fleet: str = "", longest: int = 0) -> None:
        self.engine = engine
        self.fleet = fleet
        self.longest = longest

    def bucket(self, name: str) -> Leases:
        return self

    async def entries(self, pattern: str) -> list[Any]:
        assert pattern.startswith("worker.")
        named: dict[str, Any] = {"worker": "w-1", "pool": "p", "model": "m", "engine": self.engine, "epoch": 1}
        member = WorkerMember(**named, fleet=self.fleet, max_model_len=self.longest)
        return [type("Entry", (), {"value": encode(member)})()]


async def test_a_pool_that_another_engine_serves_is_refused_by_name() -> None:
    with pytest.raises(RegistrationRefused, match=r"pool p is served by vllm \(worker w-1\), and this worker runs sglang"):
        await refuse_mixed_engines(Leases("vllm"), Subjects("x"), pool="p", engine="sglang")  # type: ignore[arg-type]
    await refuse_mixed_engines(Leases("vllm"), Subjects("x"), pool="p", engine="vllm")  # type: ignore[arg-type]


async def test_engines_may_differ_between_fleets_that_both_have_a_name_and_not_within_one() -> None:
    for theirs, own in (("", "fast"), ("slow", ""), ("slow", "slow")):
        with pytest.raises(RegistrationRefused, match="a --fleet of their own"):
            await refuse_mixed_engines(
                Leases("vllm", theirs),  # type: ignore[arg-type]
                Subjects("x"),
                pool="p",
                engine="sglang",
                fleet=own,
            )
    await refuse_mixed_engines(Leases("vllm", "slow"), Subjects("x"), pool="p", engine="sglang", fleet="fast")  # type: ignore[arg-type]


async def test_the_card_has_the_context_of_the_fleet_with_the_longest_one() -> None:
    own = card(ParserChoice())
    leases: Any = Leases("vllm", "long", own.context_length + 1000)
    for fleet, expected in (("short", own.context_length + 1000), ("long", own.context_length), ("", own.context_length)):
        found = await with_longest_context(leases, Subjects("x"), own, fleet=fleet)
        assert found.context_length == expected


def test_a_zone_stands_in_the_lease_and_is_a_label() -> None:
    east = WorkerSettings(model="m", labels=("h100",), zone="east")
    member = build_member(east, "w", card(ParserChoice()), INFO, Capabilities())
    assert (member.zone, member.labels) == ("east", ["h100", "zone=east"])
    nowhere = build_member(WorkerSettings(model="m", labels=("h100",)), "w", card(ParserChoice()), INFO, Capabilities())
    assert (nowhere.zone, nowhere.labels) == ("", ["h100"])
    with pytest.raises(ValueError, match="zone"):
        WorkerSettings(model="m", zone="a,b")


@pytest.mark.parametrize(("engine_block", "fits"), [(0, False), (32, True), (64, True), (96, True), (48, False), (16, False)])
async def test_only_a_fleet_may_have_longer_blocks_and_only_a_multiple_of_the_pools(engine_block: int, fits: bool) -> None:
    stored = card(ParserChoice())
    wanted = msgspec.structs.replace(stored, block_size=engine_block or 64)
    messaging: Any = Shelf(stored)
    if fits:
        in_force = await register_card(messaging, Subjects(), wanted, {}, engine_block=engine_block)
        assert in_force.block_size == 32
        return
    with pytest.raises(RegistrationRefused, match=r"has block size 32, this worker's engine has .*`headrace worker drain"):
        await register_card(messaging, Subjects(), wanted, {}, engine_block=engine_block)


async def test_a_pool_without_a_worker_takes_any_block_size_and_of_two_at_once_the_first_ones() -> None:
    stored = card(ParserChoice())
    wanted = msgspec.structs.replace(stored, block_size=48)
    empty: Any = Shelf(stored, live=False)
    in_force = await register_card(empty, Subjects(), wanted, {})
    assert (in_force.block_size, in_force.created) == (48, stored.created)
    raced: Any = Shelf(stored, live=False, others=[msgspec.structs.replace(stored, block_size=64)])
    with pytest.raises(RegistrationRefused, match="has block size 64"):
        await register_card(raced, Subjects(), wanted, {})


def test_the_first_fleet_of_a_model_may_say_which_blocks_all_count_by() -> None:
    settings = WorkerSettings(engine="sim", model="m", fleet="long", pool_block=8)
    assert build_card(settings, "m", INFO, {}, ParserChoice()).block_size == 8
    assert build_member(settings, "w", card(ParserChoice()), INFO, Capabilities()).block_size == 32


@pytest.mark.parametrize(("fleet", "pool_block", "named"), [("long", 12, "must divide"), ("", 8, "give this worker a fleet")])
def test_blocks_that_do_not_fit_stop_the_start(fleet: str, pool_block: int, named: str) -> None:
    settings = WorkerSettings(engine="sim", model="m", fleet=fleet, pool_block=pool_block)
    with pytest.raises(EngineStartFailed, match=named):
        build_card(settings, "m", INFO, {}, ParserChoice())
