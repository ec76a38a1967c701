"""Asks a database of vulnerabilities about every locked package, with pip-audit.

    python -m deploy.package.audit UV LOCK …

UV is the program of the package uv, LOCK a requirements file with digests. Ends with 1 if a locked package has a known
vulnerability, and with 3 where no database is within reach for one of the locks: an audit that cannot be made is not passed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_AUDIT_S = 120.0
_TOOL = "pip-audit>=2.9,<3"
FOUND, NOT_AUDITED = 1, 3  # exit codes


@dataclass(frozen=True)
class Audit:
    """The result: packages that were looked up, those that no database knew, and what was found."""

    asked: int
    unknown: tuple[str, ...]
    found: tuple[str, ...]

    def report(self) -> str:
        """Return what to print."""
        if self.asked == 0:
            return "NOT AUDITED: no database of vulnerabilities is within reach"
        lines = [f"{self.asked} packages audited, {len(self.found)} vulnerabilities known", *self.found]
        return "\n".join([*lines, *([f"not known there: {', '.join(self.unknown)}"] if self.unknown else [])])


def read(report: dict[str, Any]) -> Audit:
    """Read pip-audit's report in JSON."""
    dependencies = report["dependencies"]
    unknown = tuple(one["name"] for one in dependencies if "skip_reason" in one)
    found = [
        f"{one['name']} {one['version']}: {vulnerability['id']}, mended in {', '.join(vulnerability['fix_versions']) or 'none'}"
        for one in dependencies
        for vulnerability in one.get("vulns", ())
    ]
    return Audit(len(dependencies) - len(unknown), unknown, tuple(found))


def run(uv: Path, lock: Path) -> Audit:
    """Run pip-audit on a lock. What ends without a report has reached no database."""
    options = ["--disable-pip", "--require-hashes", "--progress-spinner", "off", "--format", "json"]
    command = [str(uv), "tool", "run", "--from", _TOOL, "pip-audit", *options, "--requirement", str(lock)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_AUDIT_S, check=False)
        return read(json.loads(done.stdout))
    except (subprocess.TimeoutExpired, ValueError, KeyError):
        return Audit(0, (), ())


def main() -> int:
    """Print a report for each lock, and return 1 if something was found, 3 if a lock could not be audited."""
    code = 0
    for lock in map(Path, sys.argv[2:]):
        audit = run(Path(sys.argv[1]), lock)
        print(f"{lock.name}: {audit.report()}", flush=True)
        if audit.found:
            code = FOUND
        elif audit.asked == 0:
            code = code or NOT_AUDITED
    return code


if __name__ == "__main__":
    sys.exit(main())
