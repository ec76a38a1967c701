"""Adds `headrace doctor` to the command line."""

from __future__ import annotations

import argparse
from typing import Any

from headrace.commands.running_deployment import located_settings
from headrace.config.flags import add_setting_flags

EXAMPLES = """examples:
  headrace doctor                                 beside a running `headrace up`, in its folder
  headrace doctor --nats nats://broker:4222 --monitoring http://broker:8222
  headrace doctor --json --strict

exit codes: 0 nothing to mend, 1 an error (with --strict: or a warning), 69 no NATS server answers"""


def add_doctor(commands: Any, about: str) -> None:
    """Add `doctor`."""
    parser = commands.add_parser(
        "doctor",
        help=about,
        description="Check this machine, the NATS server and the running deployment. Reads only.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--monitoring", metavar="URL", help="monitoring port of the NATS server (default: that of the running `headrace up`)"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 for warnings too")
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_setting_flags(parser, "control")
    parser.set_defaults(run=_run, prog="headrace doctor")


def _run(parsed: argparse.Namespace) -> int:
    from headrace.doctor.run import run_doctor

    settings = located_settings(parsed)
    return run_doctor(settings, monitoring_url=parsed.monitoring, as_json_=parsed.json, strict=parsed.strict)
