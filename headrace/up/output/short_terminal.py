"""Writes the terminal of `headrace up` for a person: a few lines and one live line; all log lines go to a file."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO, cast

from headrace.base.logs import LogStream, wants_colour
from headrace.config.settings import Settings
from headrace.up.output.log_file import LogFile
from headrace.up.output.short_view import ShortView, Style
from headrace.up.output.terminal import Terminal, as_json
from headrace.up.runfile import run_file_of


class ShortTerminal(Terminal):
    """Text stream that takes JSON log lines, puts them into the file, and shows what the view makes of them."""

    STATUS_EVERY_S = 0.1
    QUIET_START_S = 0.0

    def __init__(self, stream: TextIO, *, view: ShortView, log: LogFile) -> None:
        super().__init__(stream, json_lines=False, colour=False)
        self._view = view
        self._log = log
        self._told_of_loss = False

    def write(self, text: str) -> int:
        self.part_lines("up", text.splitlines())
        return len(text)

    def part_lines(self, part: str, lines: Sequence[str]) -> None:
        if not self._log.write(*(as_json(part, line) for line in lines)) and not self._told_of_loss:
            self._told_of_loss = True
            super().write(f"  the log {self._log.path} cannot be written: {self._log.error}\n")
        for line in lines:
            shown = self._view.line(part, line)
            if shown is not None:
                super().write(f"{shown}\n")

    def waiting(self, what: str, elapsed_s: float) -> None:
        self.status(self._view.waiting(what)[: shutil.get_terminal_size().columns - 1])

    def close(self) -> None:
        """Close the log file. The screen stays open."""
        self._log.close()

    async def settle(self, parts: Iterable[str], *, one_of: Iterable[str], timeout_s: float) -> None:
        """Wait for the lines of these parts and of one of the others, which would come after what is printed next."""
        wanted, any_of = set(parts), set(one_of)
        try:
            async with asyncio.timeout(timeout_s):
                while not (wanted <= self._view.ready and (not any_of or any_of & self._view.ready)):
                    await asyncio.sleep(self.STATUS_EVERY_S)
        except TimeoutError:
            pass


def open_short_terminal(settings: Settings, stream: TextIO) -> ShortTerminal:
    """Return the short terminal of `up` on `stream`, and write its first line: what is started, and where the whole log is."""
    folder = Path(settings["data_dir"])
    log = LogFile(run_file_of(folder.resolve()).with_name("up.log"))
    unicode = "utf" in (stream.encoding or "").lower()
    view = ShortView(style=Style(colour=wants_colour(stream), unicode=unicode))
    stream.write(f"Headrace starts; its log is {os.path.relpath(log.path)} (-v shows it here)\n\n")
    stream.flush()
    return ShortTerminal(cast("TextIO", LogStream(stream)), view=view, log=log)
