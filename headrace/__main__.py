"""Runs the `headrace` command for `python -m headrace`."""

import sys

from headrace.cli import main


def run() -> int:
    """Run one command in this process. Returns the exit code, or ends the process with it where torch was loaded."""
    code = main()
    if "torch" in sys.modules:
        from headrace.up.process import end_now

        end_now(code)
    return code


if __name__ == "__main__":
    raise SystemExit(run())
