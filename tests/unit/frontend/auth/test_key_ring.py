"""The keys of a frontend, and what a change of the store makes of them."""

from __future__ import annotations

import math

from headrace.broker.codec import encode
from headrace.broker.keys.key_texts import digest_of, new_key_text
from headrace.broker.keys.records import KeyHash, KeyRecord
from headrace.frontend.auth.key_ring import KeyRing
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.ports import Change

NOW = 1_800_000_000.0
OLD, NEW = (new_key_text("abcdefgh") for _ in range(2))


class Clock:
    at = NOW

    def __call__(self) -> float:
        return self.at


def stored(*texts: tuple[str, float], expires: float = 0.0, revoked: float = 0.0) -> Change:
    hashes = [KeyHash(sha256=digest_of(text.encode()), until=until) for text, until in texts]
    record = KeyRecord(
        id="abcdefgh",
        name="n",
        tenant="acme",
        hashes=hashes,
        scopes=["generate"],
        created=1.0,
        expires=expires,
        revoked=revoked,
    )
    return Change(record.id, encode(record), 1)


def test_keys_are_in_force_with_the_first_and_after_the_last() -> None:
    ring = KeyRing(FrontendSettings())
    assert not ring.in_force
    ring.apply(stored((NEW, 0.0)))
    assert ring.in_force
    ring.apply(stored((NEW, 0.0), revoked=NOW))
    assert ring.find(NEW.encode()) is None
    assert ring.in_force
    ring.apply(Change("abcdefgh", None, 2, "delete"))
    assert ring.in_force


def test_a_key_that_was_given_may_do_everything() -> None:
    ring = KeyRing(FrontendSettings(api_key=("one", "two")))
    assert ring.in_force
    caller = ring.find(b"two")
    assert caller is not None
    assert {"admin", "act_as", "generate"} <= caller.scopes
    assert ring.find(b"three") is None
    assert ring.find(b"") is None


def test_an_expired_key_and_an_old_secret_end_in_time() -> None:
    clock = Clock()
    ring = KeyRing(FrontendSettings(), wall=clock)
    ring.apply(stored((NEW, 0.0), (OLD, NOW + 10), expires=NOW + 20))
    for text in (NEW, OLD):
        assert ring.find(text.encode()) is not None
    clock.at = NOW + 10
    assert ring.find(OLD.encode()) is None
    assert ring.find(NEW.encode()) is not None
    clock.at = NOW + 20
    assert ring.find(NEW.encode()) is None


def test_a_record_that_cannot_be_read_is_no_key_and_hurts_no_other() -> None:
    ring = KeyRing(FrontendSettings())
    ring.apply(stored((NEW, 0.0)))
    ring.apply(Change("zzzzzzzz", b"\xc1", 2))
    caller = ring.find(NEW.encode())
    assert caller is not None
    assert (caller.tenant, caller.until) == ("acme", math.inf)
