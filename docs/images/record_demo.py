"""Records `headrace demo` in a terminal of its own and writes it as an animated SVG, text and times as they were.

    python docs/images/record_demo.py docs/images/demo.svg

Waits of more than `LONGEST_S` are shortened to that. Where animations are not shown, the picture is the last frame.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

COLUMNS, LINE, CHARACTER, FONT, MARGIN = 82, 20, 8.4, 14, 16  # the last four in pixels
LONGEST_S = 2.5
REST_S = 6.0  # the last frame stands, then all begins again
TOGETHER_S = 0.03  # pieces closer than this appear together
COLOURS = {"": "#d4d9e0", "1": "#ffffff", "2": "#8b949e", "31": "#ff7b72", "32": "#7ee787", "33": "#f2cc60", "36": "#79c0ff"}
NO_BREAK = "\u00a0"  # several spaces in a row are drawn as one
BACKGROUND = "#0d1117"

_TOKEN = re.compile(r"\x1b\[(\d*)m|(\r?\n)|([^\x1b\r\n]+)")


class Span(NamedTuple):
    """A piece of a line: when it appeared, where it stands, and its ANSI colour code."""

    at_s: float
    row: int
    column: int
    text: str
    code: str


def record(command: Sequence[str]) -> list[tuple[float, str]]:
    """Run a command in a pseudo terminal. Returns what it wrote, with the seconds since its start."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    began = time.monotonic()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True)
    os.close(theirs)
    written: list[tuple[float, str]] = []
    rest = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        if not data:
            break
        whole, rest = _split(rest + data)
        written.append((time.monotonic() - began, whole.decode()))
    if process.wait() != 0:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return written


def _split(data: bytes) -> tuple[bytes, bytes]:
    """Cut off a character or an escape sequence that is not complete yet."""
    for cut in range(len(data), max(len(data) - 8, -1), -1):
        try:
            text = data[:cut].decode()
        except UnicodeDecodeError:
            continue
        if not re.search(r"\x1b(\[\d*)?\Z", text):
            return data[:cut], data[cut:]
    return b"", data


def spans(written: Iterable[tuple[float, str]]) -> list[Span]:
    """Lay the output of a program that only appends out in rows and columns, with long waits shortened."""
    found: list[Span] = []
    row = column = 0
    code = ""
    last_s = now_s = 0.0
    for at_s, text in written:
        now_s += min(at_s - last_s, LONGEST_S)
        last_s = at_s
        for sgr, newline, words in _TOKEN.findall(text):
            if newline:
                row, column = row + 1, 0
            elif words:
                found.append(Span(now_s, row, column, words, code))
                column += len(words)
            else:
                code = "" if sgr in ("", "0") else sgr
    return _merged(found)


def _merged(found: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for span in found:
        before = merged[-1] if merged else None
        if (
            before is not None
            and (before.row, before.code) == (span.row, span.code)
            and before.column + len(before.text) == span.column
            and span.at_s - before.at_s < TOGETHER_S
        ):
            merged[-1] = before._replace(text=before.text + span.text)
        elif span.text.strip():
            merged.append(span)
    return merged


def svg(found: Sequence[Span], title: str) -> str:
    """Draw the spans: each is hidden until its time, again and again."""
    rows = max(span.row for span in found) + 2
    width, height = round(COLUMNS * CHARACTER + 2 * MARGIN), rows * LINE + 2 * MARGIN
    whole_s = found[-1].at_s + REST_S
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    font = f'font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,monospace" font-size="{FONT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {font}>',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}">',
        f'<animate id="a" attributeName="opacity" from="1" to="1" begin="0s;b.end" dur="{whole_s:.2f}s"/>',
        '<animate id="b" attributeName="opacity" from="1" to="1" begin="a.end" dur="0.01s"/></rect>',
    ]
    for span in found:
        x, y = MARGIN + span.column * CHARACTER, MARGIN + (span.row + 1) * LINE
        weight = ' font-weight="bold"' if span.code == "1" else ""
        hidden = f'<set attributeName="visibility" to="hidden" begin="a.begin" dur="{span.at_s:.2f}s"/>' if span.at_s else ""
        lead = len(span.text) - len(span.text.lstrip(" "))
        text = span.text.strip(" ").replace(" ", NO_BREAK)
        parts.append(
            f'<text x="{x + lead * CHARACTER:.1f}" y="{y}" fill="{COLOURS[span.code]}"{weight} '
            f'textLength="{len(text) * CHARACTER:.1f}" lengthAdjust="spacingAndGlyphs">{escape(text)}{hidden}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Record the demo and write the picture."""
    (target,) = sys.argv[1:]
    written = record([sys.executable, "-P", "-m", "headrace", "demo"])
    picture = svg(spans(written), "headrace demo: an answer streams, its worker is killed, another one goes on")
    Path(target).write_text(picture)


if __name__ == "__main__":
    main()
