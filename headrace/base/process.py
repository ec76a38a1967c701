"""Prepares a process: the files that it makes, the signals that stop it, and its imports."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

PRIVATE_FOLDER = 0o700


def make_files_private() -> None:
    """Have this process and its children make files and sockets that only their user can use."""
    os.umask(0o077)


def make_private_folder(folder: Path) -> None:
    """Make a folder, or take one that is there from other users; one that cannot be taken is named in the log.

    Raises OSError for a folder that cannot be made.
    """
    folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    mode = folder.stat().st_mode & 0o777
    if not mode & 0o077:
        return
    import structlog  # every command imports this module, few make folders

    log = structlog.get_logger()
    try:
        folder.chmod(PRIVATE_FOLDER)
    except OSError as error:
        log.warning("folder.not_private", folder=str(folder), mode=f"{mode:04o}", error=error.strerror)
    else:
        log.info("folder.made_private", folder=str(folder), mode=f"{mode:04o}")


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask a process to end, SIGHUP among them unless nohup has it ignored."""
    hangup = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGTERM, signal.SIGINT, *hangup)


REFUSE = signal.SIGUSR1
"""Has a frontend refuse new requests and go on with the others, before it is asked to end."""


@contextlib.contextmanager
def stop_signals(ask: Callable[[], None], insist: Callable[[], None]) -> Iterator[None]:
    """Call `ask` for the first signal and `insist` for each later one while the context is open. Both run on the event loop."""
    import asyncio  # every command imports this module, and some need no event loop

    loop = asyncio.get_running_loop()
    asked = False

    def on_signal() -> None:
        nonlocal asked
        if asked:
            insist()
        else:
            asked = True
            ask()

    numbers = ending_signals()
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def hidden(name: str) -> Iterator[None]:
    """Let imports in the body find no module `name`, unless it was imported before. Restore it afterwards."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # the import system's own mark for a missing module
    try:
        yield
    finally:
        del sys.modules[name]


IMPORTING = (50_000, 50, 100)
"""Thresholds of the garbage collector while modules are loaded, when there is nothing to collect. A part sets its own once it
has started."""


def import_patiently() -> None:
    """Make the garbage collector run less often from now on."""
    gc.set_threshold(*IMPORTING)


def import_structlog() -> None:
    """Import structlog without rich, which some engines install.

    rich is a fifth of what a part imports. It is used for tracebacks with all local variables, prompts included, which no log
    may have (`headrace.base.logs`).
    """
    with hidden("rich"):
        import structlog  # noqa: F401
