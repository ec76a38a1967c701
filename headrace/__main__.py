"""`python -m headrace` is the `headrace` command."""

from headrace.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
