"""Runs `headrace steward`: keeps the streams of a deployment, and makes the consumers of parts that may not make them."""

from __future__ import annotations

import asyncio
import sys

from headrace.base import logs
from headrace.base.errors import EXIT_OK
from headrace.base.process import stop_signals
from headrace.config.settings import Settings
from headrace.up.provisioner import Provisioner


def run_steward(settings: Settings) -> int:
    """Run until a stop signal. Raises StartFailed when the login is not an operator's or no server answers."""
    logs.configure(log_format=settings["log.format"], level=settings["log.level"], fields={"component": "steward"})
    return asyncio.run(_run(settings))


async def _run(settings: Settings) -> int:
    provisioner, stopping = Provisioner(), asyncio.Event()
    with stop_signals(stopping.set, stopping.set):
        await provisioner.start(settings)
        sys.stdout.write("the steward answers; Ctrl-C ends it\n")
        sys.stdout.flush()
        try:
            await stopping.wait()
        finally:
            await provisioner.stop()
    return EXIT_OK
