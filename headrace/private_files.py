"""Keeps files from other users of the machine: prompts, answers and logs lie in the data folder."""

from __future__ import annotations

import os
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
