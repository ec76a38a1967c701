"""`python -m headrace` is the `headrace` command."""

import sys

from headrace.cli import main


def run() -> int:
    """One command in a process of its own; returns the exit code, or ends the process with it."""
    code = main()
    if "torch" in sys.modules:
        from headrace.up.process import end_now

        end_now(code)
    return code


if __name__ == "__main__":
    raise SystemExit(run())
