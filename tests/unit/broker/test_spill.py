"""What is sealed is read with its key only, and not after a change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.errors import BrokerError
from headrace.broker.messages.requests import Spill
from headrace.broker.spill import seal, unseal


def of(key: bytes, size: int = 0) -> Spill:
    return Spill(object="i/r", size=size, digest="", key=key)


@pytest.mark.parametrize("size", [0, 1, 1 << 18, (1 << 18) + 1, 3_000_000])
async def test_what_was_sealed_is_read_with_its_key_and_with_no_other_one(size: int) -> None:
    data = b"secret" * (size // 6) + b"x" * (size % 6)
    key, sealed = await seal(data)
    assert b"secret" not in sealed
    assert await unseal(of(key), sealed) == data
    other, again = await seal(data)
    assert other != key
    assert again != sealed
    with pytest.raises(BrokerError, match="i/r is damaged"):
        await unseal(of(other), sealed)


async def test_what_has_no_key_is_read_as_it_is() -> None:
    assert await unseal(of(b""), b"plain") == b"plain"


@given(at=st.integers(0, 140), bit=st.integers(0, 7))
async def test_a_changed_object_is_refused(at: int, bit: int) -> None:
    key, sealed = await seal(b"p" * 100)
    changed = bytearray(sealed)
    changed[at % len(sealed)] ^= 1 << bit
    with pytest.raises(BrokerError, match="damaged"):
        await unseal(of(key), bytes(changed))


@pytest.mark.parametrize(("key", "data"), [(b"short", b"x" * 100), (b"k" * 32, b""), (b"k" * 32, b"short")])
async def test_what_is_no_sealed_object_or_no_key_is_refused(key: bytes, data: bytes) -> None:
    with pytest.raises(BrokerError, match="damaged"):
        await unseal(of(key), data)
