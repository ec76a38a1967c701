"""Runs `headrace top`: live on a terminal, once where there is none."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys

import msgspec

from headrace.base.errors import EXIT_OK, CommandError
from headrace.base.logs import wants_colour
from headrace.commands.operating.control_client import connected
from headrace.config.settings import Settings
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.top.facts import Snapshot, read_snapshot
from headrace.top.screen import Screen
from headrace.top.view import ORDERS, Order, draw

PIPE_WIDTH = 120  # where nothing tells the width
LEAST_INTERVAL_S = 0.2
ANSWER_S = 5.0  # an answer that takes longer is an error, and the last state stays


def run_top(settings: Settings, *, once: bool, as_json: bool, interval_s: float, order: Order) -> int:
    """Show the deployment until `q` or Ctrl-C, or one time. Raises CommandError."""
    if not LEAST_INTERVAL_S <= interval_s <= 3600:
        raise CommandError(f"--interval must be between {LEAST_INTERVAL_S:g} and 3600 seconds, got {interval_s:g}")
    live = sys.stdout.isatty() and not once and not as_json

    async def ask(messaging: Messaging, names: Subjects) -> None:
        if live:
            await watch(messaging, names, interval_s=interval_s, order=order)
            return
        found = await read_snapshot(messaging, names)
        sys.stdout.write(_json(found) if as_json else "\n".join(_plain(found, order)) + "\n")

    with contextlib.suppress(KeyboardInterrupt):
        connected(settings, ask, name="headrace top")
    return EXIT_OK


def _plain(snapshot: Snapshot, order: Order) -> list[str]:
    width = shutil.get_terminal_size((PIPE_WIDTH, 24)).columns
    return draw(snapshot, width=width, height=None, order=order, colour=wants_colour(sys.stdout))


def _json(snapshot: Snapshot) -> str:
    return json.dumps(msgspec.to_builtins(snapshot), indent=1) + "\n"


async def watch(messaging: Messaging, names: Subjects, *, interval_s: float, order: Order) -> None:
    """Show the state and renew it every `interval_s`. While it cannot be read, the last one stays and says why."""
    loop = asyncio.get_running_loop()
    snapshot = await read_snapshot(messaging, names)
    due_s = loop.time() + interval_s
    trouble = ""
    with Screen() as screen:
        while True:
            width, height = screen.size
            screen.show(
                draw(snapshot, width=width, height=height, order=order, colour=wants_colour(sys.stdout), trouble=trouble)
            )
            match await screen.key(max(0.0, due_s - loop.time())):
                case "q" | "Q" | "\x03":
                    return
                case "s":
                    order = ORDERS[(ORDERS.index(order) + 1) % len(ORDERS)]
            if loop.time() >= due_s:
                due_s = loop.time() + interval_s
                try:
                    async with asyncio.timeout(ANSWER_S):
                        snapshot = await read_snapshot(messaging, names)
                    trouble = ""
                except TimeoutError:
                    trouble = f"no answer within {ANSWER_S:g} s"
                except JetStreamError as error:
                    trouble = str(error)
