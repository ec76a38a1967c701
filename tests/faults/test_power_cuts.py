"""The power of nats-server cut under load, on a disk that loses what was not synced: what was acknowledged is there again."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.jetstream import embedded_server
from tests.faults.support.power_cuts import Powered, loss, lost_after_a_purge, powered
from tests.support.unsynced_disk import Unmountable, UnsyncedDisk, missing

OLD_SERVER = Path(sys.executable).parents[1] / "nats-server-2.15.0" / "bin" / "nats-server"
LOAD_S = 1.0

pytestmark = [pytest.mark.fault, pytest.mark.timeout(120), pytest.mark.skipif(bool(missing()), reason=missing())]

Power = Callable[..., AbstractAsyncContextManager[Powered]]


@pytest.fixture
def power(tmp_path: Path) -> Power:
    @asynccontextmanager
    async def start(*arguments: Any, **options: Any) -> AsyncIterator[Powered]:
        try:
            async with powered(tmp_path, *arguments, **options) as running:
                yield running
        except Unmountable as error:
            pytest.skip(str(error))

    return start


@pytest.mark.parametrize("strict", [False, True])
def test_a_cut_leaves_on_the_disk_what_was_synced(tmp_path: Path, strict: bool) -> None:
    disk = UnsyncedDisk(tmp_path / "disk", strict=strict)
    try:
        disk.start()
    except Unmountable as error:
        pytest.skip(str(error))
    with_sync, without, each, shorter, old, new, gone = (disk.mount / name for name in "abcdefg")
    written(with_sync, b"kept", b" and lost")
    without.write_bytes(b"lost")
    with open(os.open(each, os.O_CREAT | os.O_WRONLY | os.O_DSYNC, 0o600), "wb", buffering=0) as file:
        file.write(b"kept")
    written(shorter, b"kept whole", b"")
    os.truncate(shorter, 4)
    written(new, b"before", b"")
    old.write_bytes(b"after")
    old.rename(new)
    written(gone, b"kept", b"")
    gone.unlink()
    assert (with_sync.read_bytes(), shorter.read_bytes(), new.read_bytes()) == (b"kept and lost", b"kept", b"after")
    disk.cut()
    with disk:
        found = {path.name: path.read_bytes() for path in disk.mount.iterdir()}
    assert found == {"a": b"kept", "b": b"", "c": b"kept", "d": b"kept whole", "f": b"" if strict else b"after"}


def written(path: Path, synced: bytes, unsynced: bytes) -> None:
    with path.open("wb", buffering=0) as file:
        file.write(synced)
        os.fsync(file)
        file.write(unsynced)


async def test_an_interval_of_syncs_loses_what_was_acknowledged_within_it(power: Power) -> None:
    """Without this the other tests would prove nothing."""
    async with power("2m") as running:
        found = await loss(running, seconds=LOAD_S)
    assert found.lost > found.due // 2


@pytest.mark.parametrize("strict", [False, True])
async def test_a_server_that_always_syncs_loses_nothing(power: Power, strict: bool) -> None:
    async with power("always", strict=strict) as running:
        found = await loss(running, seconds=LOAD_S)
    assert (found.lost, found.note) == (0, "")
    assert found.due


@pytest.mark.parametrize("old", [False, True])
async def test_nats_server_syncs_files_that_it_writes_anew_since_2_15_1(
    power: Power, monkeypatch: pytest.MonkeyPatch, old: bool
) -> None:
    """Where a rename syncs nothing, the release before loses what it had synced (nats-server #8629)."""
    if old:
        if not OLD_SERVER.exists():
            pytest.skip("there is no nats-server 2.15.0: make fuse installs it")
        monkeypatch.setattr(embedded_server, "find_binary", lambda: OLD_SERVER)
    async with power("always", strict=True) as running:
        lost = await lost_after_a_purge(running)
    assert (lost > 0) == old
