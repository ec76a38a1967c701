"""A record in one line says who asked what, what it cost and how it ended, and no word of it."""

from __future__ import annotations

from headrace.broker.messages.operator import AuditRecord
from headrace.commands.audit import line

RECORD = AuditRecord(at=0.0, id="r1", frontend="i", route="/v1/completions", tenant="acme", status=200, took_s=1.5)


def test_a_line_has_the_figures_and_no_words() -> None:
    said = AuditRecord(
        **{name: getattr(RECORD, name) for name in ("at", "id", "frontend", "route", "tenant", "status", "took_s")},
        key="k1",
        model="m",
        ttft_s=0.25,
        prompt_tokens=10,
        cached_tokens=8,
        completion_tokens=4,
        workers=["w-1", "w-2"],
        finish_reason="stop",
        request="a secret",
        answer="another one",
    )
    assert line(said) == (
        "1970-01-01 00:00:00  200 /v1/completions  tenant acme  key k1  m  10 (8 cached) -> 4 tokens  1.500 s first 0.250 s "
        "by w-1, w-2  stop  r1"
    )


def test_what_is_not_known_is_a_dash() -> None:
    assert line(RECORD) == "1970-01-01 00:00:00  200 /v1/completions  tenant acme  key -  -  0 -> 0 tokens  1.500 s  r1"
