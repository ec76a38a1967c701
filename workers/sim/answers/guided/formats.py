"""Strings of the formats that JSON schemas name. Other formats are annotations, as in the standard."""

from __future__ import annotations

from collections.abc import Callable

from headrace.workers.sim.answers.guided.draws import Draws

_HEX = "0123456789abcdef"


def _date(draws: Draws) -> str:
    return f"20{draws.below(100):02d}-{1 + draws.below(12):02d}-{1 + draws.below(28):02d}"


def _clock(draws: Draws) -> str:
    return f"{draws.below(24):02d}:{draws.below(60):02d}:{draws.below(60):02d}"


def _uuid(draws: Draws) -> str:
    digits = "".join(draws.pick(_HEX) for _ in range(30))
    return f"{digits[:8]}-{digits[8:12]}-4{digits[12:15]}-a{digits[15:18]}-{digits[18:30]}"


FORMATS: dict[str, Callable[[Draws], str]] = {
    "date": _date,
    "time": lambda draws: f"{_clock(draws)}Z",
    "date-time": lambda draws: f"{_date(draws)}T{_clock(draws)}Z",
    "duration": lambda draws: f"PT{1 + draws.below(59)}M",
    "email": lambda draws: f"{draws.word()}@{draws.word()}.example",
    "hostname": lambda draws: f"{draws.word()}.example",
    "uri": lambda draws: f"https://{draws.word()}.example/{draws.word()}",
    "uuid": _uuid,
    "ipv4": lambda draws: f"192.0.2.{draws.below(256)}",
    "ipv6": lambda draws: f"2001:db8::{1 + draws.below(0xFFFF):x}",
}


_RARE = ('"', "\\", "\n", "é", "漢字", "🙂")  # characters that an incremental JSON reader must handle


def words(draws: Draws, least: int, most: int) -> str:
    """Draw words, `least` to `most` characters in all; some contain a character that JSON escapes or that has several bytes."""
    wanted = 1 + draws.below(4)
    text = draws.word()
    while wanted > 1 or len(text) < least:
        text += f" {draws.pick(_RARE) if draws.one_in(16) else draws.word()}"
        wanted -= 1
    return text[:most]
