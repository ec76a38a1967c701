"""The audit log: every refusal and every change of a key, without secrets, and bounded."""

from __future__ import annotations

import msgspec
import pytest
from structlog.testing import capture_logs

from headrace.broker.codec import encode
from headrace.broker.keys.records import KeyHash, KeyRecord
from headrace.broker.messages import OperatorAct
from headrace.frontend.auth.audit import MOST_PER_S, AuditLog, key_changed, operator_acted
from headrace.jetstream.ports import Message
from tests.support.frontend.fakes import chat
from tests.support.frontend.keyed import Keyed

OLD = KeyRecord(id="abcdefgh", name="ci", tenant="acme", hashes=[KeyHash(sha256=b"1")], scopes=["generate"], created=1.0)


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
        (None, OLD, "audit.key_created"),
        (OLD, msgspec.structs.replace(OLD, revoked=2.0), "audit.key_revoked"),
        (OLD, msgspec.structs.replace(OLD, hashes=[KeyHash(sha256=b"2")]), "audit.key_rotated"),
        (OLD, msgspec.structs.replace(OLD, scopes=["admin"]), "audit.key_changed"),
        (OLD, None, "audit.key_deleted"),
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
