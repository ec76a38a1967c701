"""A wait of suspects for lost workers is logged when it begins and measured when it ends."""

from __future__ import annotations

from structlog.testing import capture_logs

from headrace.router.session import metrics
from headrace.router.session.suspect_waits import SuspectWaits


def measured() -> tuple[float, float]:
    samples = {sample.name: sample.value for sample in metrics.SUSPECTS_HELD_S.collect()[0].samples}
    name = "headrace_router_suspects_held_seconds"
    return samples[f"{name}_count"], samples[f"{name}_sum"]


def test_a_wait_is_told_once_and_measured_once() -> None:
    waits, (count, seconds) = SuspectWaits("p"), measured()
    with capture_logs() as logs:
        for at_s, suspects in ((1.0, 0), (2.0, 3), (3.0, 2), (4.5, 0), (5.0, 0)):
            waits.note(suspects, at_s)
    assert [(entry["event"], entry.get("suspects"), entry.get("waited_s")) for entry in logs] == [
        ("suspects.held", 3, None),
        ("suspects.released", None, 2.5),
    ]
    assert measured() == (count + 1, seconds + 2.5)


def test_each_wait_is_measured_by_itself() -> None:
    waits, (count, seconds) = SuspectWaits("p"), measured()
    for at_s, suspects in ((1.0, 1), (2.0, 0), (10.0, 1), (10.5, 0)):
        waits.note(suspects, at_s)
    assert measured() == (count + 2, seconds + 1.5)
