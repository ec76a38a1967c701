"""Reports the result of a chaos run as text and as data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from headrace.commands.operating.control_client import columns
from headrace.tools.chaos.ledger import Ledger, Outcome, percentile
from headrace.tools.chaos.quiescence import Residue

_MOST_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosReport:
    """The result of a chaos run. `dead_letters`: the number of messages in the dead-letter stream at the end.

    Stalls of the host bound the accuracy of the pauses: `longest_stall_s` is the longest of the clients' own process,
    `server_stall_s` the longest time that the NATS server took to store a small message while no fault was made to it.
    """

    seed: int
    mode: str
    minutes: float
    ledger: Ledger
    residue: Residue
    dead_letters: int
    troubles: list[str]
    longest_stall_s: float
    server_stall_s: float = 0.0
    epoch_s: float = 0.0  # Unix time of the ledger's zero

    @property
    def broken(self) -> list[str]:
        """Describe every promise that was not kept. Empty if all were kept."""
        found = [
            f"request {entry.number} ({entry.id or 'no id'}, {entry.frontend}) {entry.outcome.value}: {entry.detail}"
            for entry in self.ledger.broken()
        ]
        found += [f"{count} {name} left at the end" for name, count in self.residue.counts.items() if count]
        found += [f"{name} is the consumer of a worker that is gone" for name in self.residue.orphans]
        poisoned = self.ledger.counts()[Outcome.POISONED]
        if self.dead_letters > poisoned:
            found.append(f"{self.dead_letters} dead letters, but {poisoned} clients were told of poison")
        return found + self.troubles

    def as_data(self) -> dict[str, Any]:
        counts = self.ledger.counts()
        lasted: dict[str, list[float]] = {}
        for injury in self.ledger.injuries:
            lasted.setdefault(injury.kind, []).append(injury.over_s - injury.at_s)
        return {
            "seed": self.seed,
            "mode": self.mode,
            "minutes": self.minutes,
            "faults": dict(sorted(Counter(injury.kind for injury in self.ledger.injuries).items())),
            "sent": len(self.ledger.entries),
            "outcomes": {outcome.value: counts[outcome] for outcome in Outcome if outcome is not Outcome.OPEN},
            "pauses": {
                kind: {
                    "fault_s": round(percentile(lasted[kind.removesuffix(" again")], 0.5), 3),
                    "streams": len(pauses),
                    "p50_s": round(percentile(pauses, 0.5), 3),
                    "p99_s": round(percentile(pauses, 0.99), 3),
                    "max_s": round(max(pauses), 3),
                }
                for kind, pauses in sorted(self.ledger.pauses().items())
            },
            "longest_pauses": self._longest_pauses(),
            "longest_stall_s": round(self.longest_stall_s, 3),
            "server_stall_s": round(self.server_stall_s, 3),
            "residue": self.residue.counts,
            "dead_letters": self.dead_letters,
            "broken": self.broken,
        }

    def _longest_pauses(self) -> list[dict[str, Any]]:
        """Return the longest pauses with victim, request and Unix time of their begin, by which the logs can be searched."""
        longest = sorted(self.ledger.each_pause(), key=lambda pause: -pause.length_s)[:_MOST_SHOWN]
        return [
            {
                "pause_s": round(pause.length_s, 3),
                "kind": pause.kind,
                "victim": pause.victim,
                "request": pause.request,
                "at": round(pause.from_s + self.epoch_s, 3),
                "fault_at": round(pause.fault_s + self.epoch_s, 3),
            }
            for pause in longest
        ]


def render(report: ChaosReport) -> str:
    """Render the report as text."""
    data = report.as_data()
    counts = data["outcomes"]
    rows = [["faults", ""]] + [[f"  {kind}", str(count)] for kind, count in data["faults"].items()]
    rows += [["", ""], ["requests sent", str(data["sent"])]]
    rows += [
        [f"  {name}", str(counts[outcome.value])]
        for outcome, name in (
            (Outcome.ANSWERED, "answered once and right"),
            (Outcome.CANCELLED, "cancelled by the client"),
            (Outcome.REFUSED, "refused, to be tried again"),
            (Outcome.UNREACHED, "frontend was down"),
            (Outcome.CUT, "cut by their frontend's end"),
            (Outcome.POISONED, "crashed their workers"),
            (Outcome.FAILED, "failed"),
            (Outcome.LOST, "lost"),
            (Outcome.MISSING, "with missing tokens"),
            (Outcome.DUPLICATED, "with duplicated tokens"),
            (Outcome.WRONG, "wrong"),
        )
    ]
    rows += [["", ""], ["left at the end", ""], *([f"  {name}", str(count)] for name, count in report.residue.counts.items())]
    pauses = [["longest pause of a stream, s", "streams", "p50", "p99", "max", "mended after"]]
    numbers = ("p50_s", "p99_s", "max_s", "fault_s")
    pauses += [[f"  {kind}", str(p["streams"]), *(f"{p[n]:.2f}" for n in numbers)] for kind, p in data["pauses"].items()]
    pauses.append(["  (the clients themselves)", "", "", "", f"{report.longest_stall_s:.2f}", ""])
    pauses.append(["  (the NATS server, unhurt)", "", "", "", f"{report.server_stall_s:.2f}", ""])
    head = f"chaos: seed {report.seed}, mode {report.mode}, {report.minutes:g} minutes\n\n"
    text = head + columns(rows) + "\n" + columns(pauses)
    if not (broken := report.broken):
        return text + "\nevery promise was kept\n"
    more = [f"  … and {len(broken) - _MOST_SHOWN} more"] if len(broken) > _MOST_SHOWN else []
    return text + "\n".join(["", f"{len(broken)} promises broken:", *(f"  {b}" for b in broken[:_MOST_SHOWN]), *more]) + "\n"
