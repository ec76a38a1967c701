"""Writes the terminal of `headrace up`: log lines of all parts with a short prefix, and one live status line under them.

The supervisor's own log writes to it, too, so that a log line never lands in the middle of the status line.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TextIO, cast

from headrace.base.logs import LogStream, LogThread, wants_colour
from headrace.config.settings import Settings
from headrace.up.runfile import run_file_of

_COLOURS = (36, 35, 32, 33, 34, 96, 95, 92)  # ANSI, one per part in the order of first appearance
_CLEAR = "\r\x1b[2K"
_MOST_PARTS = 4  # in a live line


class Terminal(io.TextIOBase):
    """Text stream that writes to `stream`. In JSON format lines of parts pass unchanged, and what is no JSON is wrapped."""

    STATUS_EVERY_S: ClassVar[float] = 1.0
    QUIET_START_S: ClassVar[float] = 2.0  # starts faster than this show no progress

    def __init__(self, stream: TextIO, *, json_lines: bool, colour: bool) -> None:
        super().__init__()
        self._stream = stream
        self._json = json_lines
        self._colour = colour
        self._live = stream.isatty() and not json_lines
        self._status = ""
        self._prefixes: dict[str, str] = {}

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def write(self, text: str) -> int:
        if self._status:
            self._stream.write(_CLEAR)
        self._stream.write(text)
        if self._status and text.endswith("\n"):
            self._stream.write(self._status)
        self._stream.flush()
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        """Write what waits: what the command prints next comes after it."""
        super().close()
        if isinstance(self._stream, LogThread):
            self._stream.close()

    def part_lines(self, part: str, lines: Sequence[str]) -> None:
        """Write lines of a part's output together."""
        if self._json:
            texts = [as_json(part, line) for line in lines]
        else:
            prefix = self._prefix(part)
            texts = [prefix + line for line in lines]
        self.write("\n".join(texts) + "\n")

    def status(self, text: str) -> None:
        """Replace the live line; empty removes it. Does nothing where there is no terminal."""
        if self._live and (text or self._status):
            self._stream.write(_CLEAR + text)
            self._stream.flush()
            self._status = text

    def waiting(self, what: str, elapsed_s: float) -> None:
        """Show what a start waits for, as the live line."""
        self.status(f"  … {what}, {elapsed_s:.0f} s")

    def finishing(self, parts: Sequence[str], elapsed_s: float) -> None:
        """Show which parts have not ended yet, as the live line."""
        self.status(stopping_text(parts, elapsed_s))

    async def settle(self, parts: Iterable[str], *, one_of: Iterable[str], timeout_s: float) -> None:
        """Wait for nothing: where all log lines are shown, those of parts that become ready may come at any time."""

    def _prefix(self, part: str) -> str:
        prefix = self._prefixes.get(part)
        if prefix is None:
            prefix = f"{part:<9}│ "
            if self._colour:
                prefix = f"\x1b[{_COLOURS[len(self._prefixes) % len(_COLOURS)]}m{prefix}\x1b[0m"
            self._prefixes[part] = prefix
        return prefix


def stopping_text(parts: Sequence[str], elapsed_s: float) -> str:
    """Return the live line while parts finish their work, empty when all have ended."""
    if not parts:
        return ""
    shown = ", ".join(parts[:_MOST_PARTS]) + (f" and {len(parts) - _MOST_PARTS} more" if len(parts) > _MOST_PARTS else "")
    return f"  … {shown} {'finishes' if len(parts) == 1 else 'finish'}, {elapsed_s:.0f} s"


def as_json(part: str, line: str) -> str:
    """Return a part's line as it is if it is JSON, else wrapped."""
    return line if line.startswith("{") else json.dumps({"event": "part.output", "component": part, "line": line})


# Chooses the few lines that a person sees of a deployment's start, its crashes and its stop, from the log events of all
# parts.
#
# Nothing is written here: an event goes in, a line or nothing comes out.
#
#     ✓ nats-server  nats://127.0.0.1:40123                  0.1 s
#     ✓ frontend     http://127.0.0.1:8000                   0.6 s
#     ⠸ worker       waiting for the engine (vllm) to load   9.3 s
#     ✓ worker-1     vllm serves smollm2-135m-instruct      16.2 s
#     ✗ worker-1     killed by SIGKILL, starts again in 0.5 s
#     ✓ worker-1     is back after 1.9 s

SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_ASCII_SPINNER = "|/-\\"
_NAME_WIDTH = 12  # in characters
_TEXT_WIDTH = 48  # of what stands before the time
_VIEW_COLOURS = {"good": 32, "bad": 31, "note": 2}
_MARKS = {"good": "✓", "bad": "✗", "note": "·"}
_ASCII_MARKS = {"good": "+", "bad": "x", "note": "-"}
_NATS = "nats-server"


class Style(NamedTuple):
    colour: bool = False
    unicode: bool = True


class ShortView:
    """The view of one run of `headrace up`. `clock` gives seconds, of which the first call is the start."""

    def __init__(self, *, style: Style, clock: Callable[[], float] = time.monotonic) -> None:
        self._style = style
        self._clock = clock
        self._began_s = clock()
        self._crashed_s: dict[str, float] = {}
        self._announced = False
        self._stopping = False
        self._run_file_told = False  # it is tried again and again
        self._step = ""  # of preparing the model
        self._serving: set[str] = set()  # workers that can answer
        self.ready: set[str] = set()
        """Names of the parts that can do their work."""
        self._events: dict[str, Callable[[str, Mapping[str, Any]], str | None]] = {
            "server.started": lambda _part, event: self._is_ready(_NATS, str(event.get("url", ""))),
            "frontend.listening": lambda part, event: self._is_ready(part, str(event.get("url", ""))),
            "worker.ready": self._worker_is_ready,
            "router.ready": lambda part, _event: self._is_ready(part, "places requests", timed=False),
            "model.preparing": self._preparing,
            "model.prepared": self._prepared,
            "model.downloading": self._downloading,
            "part.crashed": self._crashed,
            "part.start_failed": lambda _part, event: self._line("bad", _told(event), f"does not start: {event.get('error')}"),
            "part.left": self._left,
            "settings.unknown": self._unknown,
            "up.no_workers": self._no_workers,
            "up.ready": self._is_announced,
            "up.stopping": self._stops,
            "up.killing": lambda _part, _event: "Killing everything.",
            "up.stopped": lambda _part, _event: "Stopped.",
            "up.run_file_not_written": self._run_file,
            "nats.restarting": self._restarting,
        }

    def line(self, part: str, logged: str) -> str | None:
        """Return the line to show for a log line of a part, or of `up` itself; None for one that is not shown."""
        if not logged.startswith("{") or not any(f'"{name}"' in logged for name in self._events):
            return None
        try:
            event = json.loads(logged)
        except ValueError:
            return None
        take = self._events.get(str(event.get("event")))
        return take(part, event) if take is not None else None

    def waiting(self, what: str) -> str:
        """Return the live line under all others while the deployment starts."""
        elapsed_s = self._clock() - self._began_s
        frames = SPINNER if self._style.unicode else _ASCII_SPINNER
        frame = frames[int(elapsed_s * 10) % len(frames)]
        if self._step:
            name, text = "model", self._step
        elif self._serving & self.ready:
            name, text = "frontend", "waiting until it knows the workers"
        else:
            name, text = "worker", what
        return f"  {frame} {name:<{_NAME_WIDTH}} {text:<{_TEXT_WIDTH}} {elapsed_s:6.1f} s"

    def _is_ready(self, part: str, text: str, *, timed: bool = True) -> str | None:
        self.ready.add(part)
        crashed_s = self._crashed_s.pop(part, None)
        if self._stopping:
            return None
        if crashed_s is not None:
            return self._line("good", part, f"is back after {self._clock() - crashed_s:.1f} s")
        if self._announced:
            return None
        return self._line("good", part, text, after_s=self._clock() - self._began_s if timed else None)

    def _worker_is_ready(self, part: str, event: Mapping[str, Any]) -> str | None:
        if not part.startswith(("prefill-", "encode-")):
            self._serving.add(part)
        return self._is_ready(part, f"{event.get('engine')} serves {event.get('model')}")

    def _is_announced(self, _part: str, _event: Mapping[str, Any]) -> None:
        self._announced = True

    def _preparing(self, _part: str, event: Mapping[str, Any]) -> None:
        self._step = str(event.get("step", "")).rstrip(" …")

    def _downloading(self, _part: str, event: Mapping[str, Any]) -> None:
        self._step = "" if event.get("done") else f"downloading {event.get('model')}, {event.get('arrived_mb')} MB so far"

    def _prepared(self, part: str, event: Mapping[str, Any]) -> str:
        self._step = ""
        return self._line("good", part, str(event.get("name", "")), after_s=self._clock() - self._began_s)

    def _crashed(self, _part: str, event: Mapping[str, Any]) -> str:
        part = _told(event)
        self.ready.discard(part)
        self._crashed_s.setdefault(part, self._clock())
        error = f": {event['error']}" if event.get("error") else ""
        return self._line(
            "bad", part, f"{_ending(event.get('exit_code'))}, starts again in {event.get('restart_in_s', 0):g} s{error}"
        )

    def _restarting(self, _part: str, event: Mapping[str, Any]) -> str:
        self._crashed_s.setdefault(_NATS, self._clock())
        return self._line("bad", _NATS, f"starts again: {event.get('reason')}")

    def _run_file(self, _part: str, event: Mapping[str, Any]) -> str | None:
        if self._run_file_told:
            return None
        self._run_file_told = True
        return self._line("bad", "run file", f"cannot be written: {event.get('error')}")

    def _left(self, _part: str, event: Mapping[str, Any]) -> str | None:
        self.ready.discard(_told(event))
        match event.get("reason"):
            case "drained":
                return self._line("note", _told(event), "is drained and has left")
            case "configuration" if not event.get("fatal"):  # else `up` ends with the error
                return self._line("bad", _told(event), f"cannot start: {event.get('error')}")
            case _:
                return None

    def _unknown(self, part: str, event: Mapping[str, Any]) -> str | None:
        return self._line("bad", "settings", str(event.get("detail"))) if part == "up" else None

    def _no_workers(self, _part: str, event: Mapping[str, Any]) -> str:
        return self._line("note", "no worker", f"is started here. To add one: {event.get('join')}")

    def _stops(self, _part: str, event: Mapping[str, Any]) -> str | None:
        self._stopping = True
        if event.get("failed"):
            return None  # the reason follows
        return f"\nStopping: running answers may end, for {event.get('grace_s', 0):g} s at most. Ctrl-C again kills everything."

    def _line(self, kind: str, part: str, text: str, *, after_s: float | None = None) -> str:
        mark = (_MARKS if self._style.unicode else _ASCII_MARKS)[kind]
        if self._style.colour:
            mark = f"\x1b[{_VIEW_COLOURS[kind]}m{mark}\x1b[0m"
        timed = f"{text:<{_TEXT_WIDTH}} {after_s:6.1f} s" if after_s is not None else text
        return f"  {mark} {part:<{_NAME_WIDTH}} {timed}"


def _told(event: Mapping[str, Any]) -> str:
    name = str(event.get("part", "?"))
    return _NATS if name == "nats" else name


def _ending(exit_code: Any) -> str:
    if not isinstance(exit_code, int):
        return "has ended"
    if exit_code >= 0:
        return f"ended with code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


MOST_BYTES = 8 << 20


class LogFile:
    """A log of at most twice `most_bytes`: a full file becomes `<name>.1`. Lines that cannot be written are counted."""

    def __init__(self, path: Path, *, most_bytes: int = MOST_BYTES) -> None:
        self.path = path
        self.lost = 0
        self.error = ""
        """Why the last line was lost, empty if none was."""
        self._most_bytes = most_bytes
        self._file: TextIO | None = None
        self._bytes = 0

    def write(self, *lines: str) -> bool:
        """Append lines. Returns False if they are lost; never raises for what the disk does."""
        text = "".join(f"{line}\n" for line in lines)
        try:
            if self._file is None:
                self._open()
            elif self._bytes >= self._most_bytes:
                self.close()
                self.path.replace(self.path.with_name(self.path.name + ".1"))
                self._open()
            assert self._file is not None  # noqa: S101  # just opened
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            self.close()
            self.lost += len(lines)
            self.error = os.strerror(error.errno) if error.errno else str(error)
            return False
        self._bytes += len(text)
        return True

    def close(self) -> None:
        """Close the file. The next line opens it again."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self.error = str(error)

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8", errors="replace")
        self._bytes = self._file.tell()


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
