"""Contract of hand-overs: two engines give the answer of one, what is let go is free, and bad parameters fail one sequence."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from headrace.workers.engine import DisaggStyle, Handover, Output, Role
from headrace.workers.errors import EngineError, UnsupportedByEngine
from tests.engine_contract.subject import Subject, emitted, greedy


@dataclass(kw_only=True)
class Pair:
    """A prefill side and a decode side, started in these roles."""

    prefill: Subject
    decode: Subject
    _rooms: itertools.count[int] = field(default_factory=lambda: itertools.count(1000))

    @property
    def style(self) -> DisaggStyle:
        return self.decode.engine.capabilities.disagg

    async def whole(self, tokens: list[int], number: int) -> tuple[list[Output], list[Output]]:
        """Hand one sequence over: the outputs of both sides."""
        if self.style is DisaggStyle.PARAMS:
            prefilled = await self.offer(tokens, number)
            return prefilled, await self.take(tokens, number, prefilled[-1].handover)
        room = next(self._rooms)
        sequence = self.decode.sequence(tokens, greedy(number))
        left = await self._give(self.prefill, sequence, Handover(kind="prefill", room=room))
        right = await self._give(self.decode, sequence, Handover(kind="decode", room=room, peer=self.prefill.info.address))
        outputs = await self.decode.end(right)
        return await self.prefill.end(left), outputs

    async def offer(self, tokens: list[int], number: int) -> list[Output]:
        sequence = self.prefill.sequence(tokens, greedy(number), handover=Handover(kind="prefill"))
        outputs = await self.prefill.end(await self.prefill.give(sequence))
        self.last = sequence
        return outputs

    async def take(self, tokens: list[int], number: int, params: Mapping[str, Any] | None) -> list[Output]:
        return await self.decode.end(await self._give(self.decode, self.last, Handover(kind="decode", params=params)))

    async def idle(self) -> None:
        await self.prefill.idle()
        await self.decode.idle()

    @staticmethod
    async def _give(subject: Subject, sequence: Any, handover: Handover) -> str:
        given = {name: getattr(sequence, name) for name in sequence.__struct_fields__} | {"handover": handover}
        return await subject.give(type(sequence)(**given))


class HandoverContract:
    """Prefill on one engine and decode on another; the fixture `pair` has both."""

    async def test_both_sides_can_work_together(self, pair: Pair) -> None:
        assert pair.style is pair.prefill.engine.capabilities.disagg is not DisaggStyle.NONE
        assert pair.prefill.info.handover == pair.decode.info.handover != ""
        for side in (pair.prefill, pair.decode):
            assert {"role prefill", "role decode", f"handover {pair.style.value}"} <= side.declared <= side.support.words

    async def test_the_answer_is_that_of_one_engine(self, pair: Pair) -> None:
        for n in range(3):
            prompt = pair.decode.prompt(800 + n, 3.5)
            prefilled, outputs = await pair.whole(prompt, 8)
            assert prefilled[-1].finish == "length"
            assert outputs[-1].fault is None, outputs[-1].fault
            assert outputs[0].cached_tokens == 0, "what another engine computed is not this one's cache"
            assert emitted(outputs) == await pair.prefill.ids(prompt, greedy(8))
        await pair.idle()

    async def test_what_is_let_go_is_free_on_either_side(self, pair: Pair) -> None:
        if pair.style is not DisaggStyle.PARAMS:
            return
        for n, side in enumerate((pair.prefill, pair.decode)):
            params = (await pair.offer(pair.prefill.prompt(810 + n, 3.5), 4))[-1].handover
            assert params is not None
            if pair.prefill.means.offers_are_counted:
                await pair.prefill.until(lambda: pair.prefill.engine.load().blocks_used > 0)
            await side.engine.release(pair.last.id, None if side is pair.prefill else params)
            await pair.idle()
            await side.engine.release(pair.last.id, None if side is pair.prefill else params)  # a second time is fine

    async def test_unreadable_parameters_end_one_sequence_only(self, pair: Pair) -> None:
        if pair.style is not DisaggStyle.PARAMS:
            return
        prompt = pair.prefill.prompt(820, 3.5)
        params = (await pair.offer(prompt, 4))[-1].handover
        try:
            outputs = await pair.take(prompt, 4, {"no": "such parameters"})
        except EngineError:
            pass
        else:
            assert outputs[-1].fault is not None
        await pair.prefill.engine.release(pair.last.id, None)
        assert params is not None
        await pair.idle()
        assert len(await pair.decode.ids(prompt, greedy(4))) == 4

    async def test_a_prefill_side_that_does_not_come_is_a_retriable_fault(self, pair: Pair) -> None:
        if pair.style is not DisaggStyle.RENDEZVOUS:
            return
        sequence = pair.decode.sequence(pair.decode.prompt(830, 2.5), greedy(4))
        handover = Handover(kind="decode", room=next(pair._rooms), peer=pair.prefill.info.address)
        outputs = await pair.decode.end(await Pair._give(pair.decode, sequence, handover))
        assert outputs[-1].fault is not None
        assert (outputs[-1].fault.code, outputs[-1].fault.retriable) == ("transfer_failed", True)
        await pair.idle()

    async def test_both_sides_change_places(self, pair: Pair) -> None:
        await pair.idle()
        await pair.prefill.engine.set_role(Role.DECODE)
        await pair.decode.engine.set_role(Role.PREFILL)
        turned = Pair(prefill=pair.decode, decode=pair.prefill)
        prompt = pair.decode.prompt(840, 3.5)
        _, outputs = await turned.whole(prompt, 6)
        assert emitted(outputs) == await pair.prefill.ids(prompt, greedy(6))
        await turned.idle()
        await pair.prefill.engine.set_role(Role.PREFILL)
        await pair.decode.engine.set_role(Role.DECODE)
        with pytest.raises(UnsupportedByEngine):
            await pair.decode.engine.set_role(Role.EMBEDDING)
