"""Handles Ctrl-C, SIGTERM and SIGHUP: the first signal asks for an orderly stop, the second for one at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stop_signals(ask: Callable[[], None], insist: Callable[[], None]) -> Iterator[None]:
    """Call `ask` for the first signal and `insist` for each later one while the context is open. Both run on the event loop."""
    loop = asyncio.get_running_loop()
    asked = False

    def on_signal() -> None:
        nonlocal asked
        if asked:
            insist()
        else:
            asked = True
            ask()

    # nohup ignores SIGHUP for us: that stays so.
    numbers = [number for number in _SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
