"""Records the first `headrace up` of a folder in a terminal of its own, and draws the screen that stands at the end as an SVG.

    python docs/images/record_first_run.py docs/images/first-run.svg [FLAG …]

The flags go to `headrace up`. Every line and every time is as it was.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

LAST = "Ctrl-C stops everything."
COLUMNS, LINE, CHARACTER, FONT, MARGIN = 104, 19, 7.8, 13, 16  # the last four in pixels
COLOURS = {"": "#d4d9e0", "32": "#7ee787", "31": "#ff7b72", "2": "#8b949e"}
BACKGROUND = "#0d1117"
START_S, STOP_S = 600.0, 60.0

_SGR = re.compile(r"\x1b\[(\d*)m")


def record(command: Sequence[str], folder: Path) -> str:
    """Run a command until its last line is on the screen, then interrupt it. Returns what it had written."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    process = subprocess.Popen(command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    written = b""
    deadline = time.monotonic() + START_S
    while LAST.encode() not in written:
        if time.monotonic() > deadline or process.poll() is not None:
            raise SystemExit(f"it was not ready:\n{written.decode(errors='replace')[-2000:]}")
        if select.select([ours], [], [], 1.0)[0]:
            written += os.read(ours, 65536)
    process.send_signal(signal.SIGINT)
    while process.poll() is None and time.monotonic() < deadline + STOP_S:
        if select.select([ours], [], [], 0.1)[0]:
            with contextlib.suppress(OSError):  # so the end of a pseudo terminal shows
                os.read(ours, 65536)  # or it could not write its last lines
    os.close(ours)
    return written.decode()


def screen(written: str) -> list[str]:
    """Return the lines that stand at the end: a live line that was cleared is gone."""
    return [re.split(r"\r\x1b\[2K", line)[-1] for line in written.replace("\r\n", "\n").rstrip().split("\n")]


def svg(lines: Sequence[str], title: str) -> str:
    """Draw lines with ANSI colours."""
    width, height = round(COLUMNS * CHARACTER + 2 * MARGIN), len(lines) * LINE + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"',
        f'font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,monospace" font-size="{FONT}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="{BACKGROUND}"/>',
    ]
    for row, line in enumerate(lines):
        column, code = 0, ""
        for number, piece in enumerate(_SGR.split(line)):
            if number % 2:
                code = "" if piece in ("", "0") else piece
                continue
            text = piece.strip(" ")
            x = MARGIN + (column + len(piece) - len(piece.lstrip(" "))) * CHARACTER
            column += len(piece)
            if text:
                length = len(text) * CHARACTER
                parts.append(
                    f'<text x="{x:.1f}" y="{MARGIN + row * LINE + FONT}" fill="{COLOURS[code]}" xml:space="preserve" '
                    f'textLength="{length:.1f}" lengthAdjust="spacingAndGlyphs">{escape(text)}</text>'
                )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Record a start in a new folder and draw it."""
    target, *flags = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        written = record([sys.executable, "-P", "-m", "headrace", "up", *flags], Path(folder))
    picture = svg([f"\x1b[2m$\x1b[0m {' '.join(['headrace up', *flags])}", *screen(written)], "headrace up in a new folder")
    Path(target).write_text(picture)


if __name__ == "__main__":
    main()
