"""The keys of a frontend, and what a change of the store makes of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from headrace.broker.codec import encode
from headrace.broker.keys import KeyHash, KeyRecord, digest_of, new_key_text
from headrace.broker.messages.operator import OperatorAct
from headrace.frontend.auth.key_ring import MOST_PER_S, AuditLog, KeyRing, key_changed, operator_acted
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.ports import Change, Message
from tests.support.frontend.fakes import chat
from tests.support.frontend.keyed import Keyed

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


class Unseen(bytes):
    """The text of a key that may be hashed by its bytes, and be neither compared nor looked up."""

    def _seen(self, *_args: Any) -> Any:
        raise AssertionError("the text of a key was compared, or looked up as it is")

    __eq__ = __ne__ = __lt__ = __gt__ = __contains__ = __getitem__ = startswith = _seen
    __hash__ = _seen  # type: ignore[assignment]


def steps_of(work: Callable[[], object]) -> list[str]:
    """Return the name of each function that is called, in Python or below it."""
    steps: list[str] = []

    def note(frame: Any, event: str, function: Any) -> None:
        if event in ("call", "c_call"):
            steps.append(frame.f_code.co_name if event == "call" else function.__name__)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return steps[1:-1]  # without the call of `work` and of `setprofile`


@pytest.mark.parametrize("given", [("operators-key",), ()])
def test_a_look_up_takes_the_same_steps_for_each_text_and_never_compares_it(given: tuple[str, ...]) -> None:
    """So its time tells neither how much of a key is right, nor whether its id is known, expired or revoked."""
    secret = NEW[:-1] + ("A" if NEW[-1] != "A" else "B")
    refused = [b"hr_sk_zzzzzzzz_" + NEW[15:].encode(), secret.encode(), NEW[:20].encode(), b"x", b"operators-kez", b""]
    rings = [KeyRing(FrontendSettings(api_key=given), wall=Clock()) for _ in range(4)]
    for ring, kept in zip(rings, ({}, {"expires": NOW - 1}, {"revoked": NOW - 1}, {"expires": NOW + 1}), strict=True):
        for _ in range(3):
            ring.apply(stored((OLD, 0.0), (NEW, 0.0), **kept))
    found = {tuple(steps_of(lambda ring=ring, text=text: ring.find(text))) for ring in rings for text in refused}  # type: ignore[misc]
    whole = NEW.encode()
    found |= {tuple(steps_of(lambda ring=ring: ring.find(whole))) for ring in rings[1:3]}  # type: ignore[misc]
    assert len(found) == 1, found
    assert sum("sha256" in step for step in found.pop()) == 1
    assert [ring.find(Unseen(NEW.encode())) is not None for ring in rings] == [True, False, False, True]
    assert rings[0].find(Unseen(secret.encode())) is None
    assert (rings[0].find(Unseen(b"operators-key")) is not None) == bool(given)


AUDIT_OLD = KeyRecord(id="abcdefgh", name="ci", tenant="acme", hashes=[KeyHash(sha256=b"1")], scopes=["generate"], created=1.0)


async def test_a_refused_key_is_named_by_its_id_and_its_senders_address() -> None:
    bed = Keyed()
    key = bed.key("acme", scopes=["models"])
    wrong = key[:-1] + ("A" if key[-1] != "A" else "B")
    with capture_logs() as logs:
        await bed.ask(wrong)
        await bed.ask(key)
        await bed.ask(None)
        await bed.ask(key, "/v1/models", method="GET")
    found = [(line["code"], line["key"], line["peer"]) for line in logs if line["event"] == "audit.refused"]
    public = key.split("_")[2]
    assert found == [
        ("invalid_api_key", public, "test"),
        ("permission_denied", public, "test"),
        ("missing_api_key", "none", "test"),
    ]
    assert key.split("_", 3)[3][:20] not in str(logs)


async def test_refusals_behind_the_gate_are_audited_too() -> None:
    bed = Keyed()
    key = bed.key("acme", models=["other"], scopes=["generate", "models"])
    with capture_logs() as logs:
        await bed.ask(key, body=chat())
        await bed.ask(key, "/v1/models/org/tiny", method="GET")
    assert [line["code"] for line in logs if line["event"] == "audit.refused"] == ["model_not_allowed"] * 2


def test_a_flood_of_refusals_is_counted_and_not_written() -> None:
    now = [0.0]
    audit = AuditLog(clock=lambda: now[0])
    with capture_logs() as logs:
        for _ in range(3 * MOST_PER_S):
            audit.refused({}, "invalid_api_key")
        now[0] = 1.0
        audit.refused({}, "invalid_api_key")
    assert sum(line["event"] == "audit.refused" for line in logs) == MOST_PER_S + 1
    assert [line["refusals"] for line in logs if line["event"] == "audit.left_out"] == [2 * MOST_PER_S]


@pytest.mark.parametrize(
    ("old", "new", "event"),
    [
        (None, AUDIT_OLD, "audit.key_created"),
        (AUDIT_OLD, msgspec.structs.replace(AUDIT_OLD, revoked=2.0), "audit.key_revoked"),
        (AUDIT_OLD, msgspec.structs.replace(AUDIT_OLD, hashes=[KeyHash(sha256=b"2")]), "audit.key_rotated"),
        (AUDIT_OLD, msgspec.structs.replace(AUDIT_OLD, scopes=["admin"]), "audit.key_changed"),
        (AUDIT_OLD, None, "audit.key_deleted"),
    ],
)
def test_every_change_of_a_key_is_an_event(old: KeyRecord | None, new: KeyRecord | None, event: str) -> None:
    with capture_logs() as logs:
        key_changed(old, new)
        key_changed(new, new)
    assert [(line["event"], line["key"]) for line in logs] == [(event, "abcdefgh")]
    assert "sha256" not in str(logs)


def test_a_command_of_an_operator_is_in_the_log_and_rubbish_is_named_as_such() -> None:
    act = OperatorAct(command="tenant delete", by="ann", details={"tenant": "acme"})
    with capture_logs() as logs:
        operator_acted(Message("hr.audit", encode(act), ""))
        operator_acted(Message("hr.audit", b"\xc1", ""))
    assert [line["event"] for line in logs] == ["audit.operator_command", "audit.unreadable"]
    assert (logs[0]["command"], logs[0]["by"], logs[0]["details"]) == ("tenant delete", "ann", {"tenant": "acme"})
