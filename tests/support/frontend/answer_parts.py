"""Answers that were taken apart, for tests: scripts that say parts, and a strategy for any sequence of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import strategies as st

from headrace.broker.jobs import Job
from headrace.broker.messages.frames import Finish, Part, Row
from tests.support.frontend.fakes import Script, Step


def content(text: str) -> Part:
    return Part("content", text)


def thought(text: str) -> Part:
    return Part("reasoning", text)


def call(index: int, text: str = "", *, name: str | None = None) -> Part:
    """A piece of a call; with `name` its first one."""
    return Part("tool", text, index, f"call_{index}" if name is not None else None, name)


def parts_row(parts: Sequence[Part], *, fin: Finish | None = None, ids: int = 1) -> Row:
    return Row("job", 1, 7, 0, 0, [65] * ids, [*([""] * (ids - 1)), list(parts)] if ids else [], None, fin)


def say_parts(*rows: Sequence[Part], reason: str = "stop", **finish: Any) -> Script:
    def script(job: Job) -> Iterable[Step]:
        for parts in rows[:-1]:
            yield [parts_row(parts)]
        yield [parts_row(rows[-1], fin=Finish(reason=reason, **finish))]  # type: ignore[arg-type]

    return script


TEXTS = st.text(alphabet=st.sampled_from('ab é\n "\\😀{}'), max_size=6)


@st.composite
def said(draw: st.DrawFn) -> list[list[Part]]:
    """Rows of parts in any order of kinds; the pieces of a call follow each other, as parsers give them."""
    parts: list[Part] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["content", "reasoning", "tool"]), max_size=8)):
        pieces = draw(st.lists(TEXTS, min_size=1, max_size=4))
        if kind == "tool":
            parts.append(call(calls, pieces[0], name=f"f{calls}"))
            parts += [call(calls, piece) for piece in pieces[1:]]
            calls += 1
        else:
            parts += [Part(kind, piece) for piece in pieces]  # type: ignore[arg-type]
    rows: list[list[Part]] = []
    while parts:
        size = draw(st.integers(1, 4))
        rows.append(parts[:size])
        parts = parts[size:]
    return rows
