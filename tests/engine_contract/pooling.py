"""Contract of pooling engines: vectors of inputs, and nothing else."""

from __future__ import annotations

import asyncio
import struct

import pytest

from headrace.workers.engine import POOLING_KINDS, PoolItem
from headrace.workers.errors import RequestInvalid, UnsupportedByEngine
from tests.engine_contract.generating import DescriptionContract
from tests.engine_contract.operations import OperationsContract
from tests.engine_contract.subject import Subject


def task(subject: Subject) -> str:
    return "embed" if "embedding" in subject.info.kinds else "classify"


def item(subject: Subject, number: int, blocks: float = 1.5, **options: object) -> PoolItem:
    given = {"id": f"v{number}", "task": task(subject), "token_ids": subject.prompt(number, blocks)} | options
    return PoolItem(**given)  # type: ignore[arg-type]


def numbers(vector: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(vector) // 4}f", vector)


class PoolingContract(DescriptionContract, OperationsContract):
    """`pool`."""

    async def test_it_serves_kinds_of_vectors_only(self, subject: Subject) -> None:
        assert set(subject.info.kinds) <= POOLING_KINDS

    async def test_an_input_has_one_vector_and_others_have_others(self, subject: Subject) -> None:
        one, same, other = [numbers((await subject.engine.pool(item(subject, n))).vector) for n in (1, 1, 2)]
        assert one
        assert one == pytest.approx(same, abs=1e-5)
        assert one != pytest.approx(other, abs=1e-5)
        assert len(one) == len(other)
        if "classify" in subject.info.kinds and subject.info.labels:
            assert len(one) == len(subject.info.labels)

    async def test_many_at_once_are_all_computed(self, subject: Subject) -> None:
        made = await asyncio.gather(*(subject.engine.pool(item(subject, n, 0.5)) for n in range(20)))
        assert len({pooled.vector for pooled in made}) == 20

    async def test_a_cancelled_input_holds_nothing(self, subject: Subject) -> None:
        call = asyncio.create_task(subject.engine.pool(item(subject, 30)))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        assert len(numbers((await subject.engine.pool(item(subject, 31))).vector)) > 0
        await subject.until(lambda: subject.engine.load().running == 0)

    async def test_an_input_over_the_context_is_refused(self, subject: Subject) -> None:
        over = subject.prompt(32, 2 + subject.info.context_length / subject.info.block_size)
        with pytest.raises(RequestInvalid):
            await subject.engine.pool(item(subject, 32, token_ids=over))

    async def test_text_is_refused(self, subject: Subject) -> None:
        with pytest.raises(UnsupportedByEngine):
            await subject.submit(subject.prompt(33))
