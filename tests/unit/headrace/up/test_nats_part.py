"""The nats-server of `headrace up`: started again after a crash, and when it stores nothing although there is room."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from headrace.base.errors import EXIT_CONFIGURATION, StartFailed
from headrace.jetstream.embedded_server import ServerHealth
from headrace.jetstream.errors import ConnectError
from headrace.up import nats_part
from headrace.up.nats_part import (
    AFTER_ERROR_S,
    AFTER_FULL_S,
    AGAIN_FIRST_S,
    AGAIN_MOST_S,
    ROOM_BYTES,
    UNEXPLAINED_S,
    CertificateFiles,
    NatsPart,
    StoredStreams,
    StreamsNotMoved,
    StuckStore,
)
from headrace.up.restart_policy import Backoff


class Server:
    """An embedded server that crashes `crashes` times, each time right after its start."""

    def __init__(self, crashes: int = 0) -> None:
        self.data_dir = Path("/nowhere")
        self.crashes = crashes
        self.restarts = 0
        self.health = ServerHealth(ok=True)

    @property
    def running(self) -> bool:
        return self.restarts >= self.crashes

    async def restart_async(self) -> None:
        self.restarts += 1
        if self.restarts == 2:
            raise ConnectError("not ready in time")

    async def health_async(self) -> ServerHealth:
        return self.health


def part(server: Server, monkeypatch: pytest.MonkeyPatch) -> NatsPart:
    settings: Any = {"nats.url": ("nats://elsewhere",), "nats.context": ""}
    settings |= {f"server.tls_{name}": None for name in ("cert", "key", "client_ca")}
    made = NatsPart(settings)
    made._server = server  # type: ignore[assignment]
    for name in ("_WATCH_EVERY_S", "_ASK_EVERY_S"):
        monkeypatch.setattr(nats_part, name, 0.0)
    return made


async def run_until(work: Any, done: asyncio.Event) -> None:
    task = asyncio.ensure_future(work)
    async with asyncio.timeout(10):
        await asyncio.wait([task, asyncio.ensure_future(done.wait())], return_when=asyncio.FIRST_COMPLETED)
    assert not task.done()
    task.cancel()


async def test_a_server_that_crashes_again_and_again_is_back_within_two_seconds_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, waits, done = Server(crashes=6), [], asyncio.Event()
    nats = part(server, monkeypatch)
    sleep = asyncio.sleep

    async def noted(for_s: float) -> None:
        if for_s:
            waits.append(for_s)
        await sleep(0)

    monkeypatch.setattr("headrace.up.nats_part.asyncio.sleep", noted)
    await run_until(nats.keep(lambda: done.set() if server.running else None), done)
    assert waits == [0.5, 1.0, 2.0, 2.0, 2.0, 2.0]


async def test_a_server_that_cannot_start_ends_in_its_error_after_five_tries_that_its_disk_had_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(crashes=99)
    nats = part(server, monkeypatch)
    room = iter([0, 0, 0])
    monkeypatch.setattr(nats_part, "free_bytes", lambda _folder: next(room, ROOM_BYTES))
    monkeypatch.setattr(nats._state, "_backoff", Backoff(first_s=0.0, most_s=0.0))

    async def fails() -> None:
        server.restarts += 1
        raise ConnectError("its store is damaged")

    monkeypatch.setattr(server, "restart_async", fails)
    async with asyncio.timeout(10):
        with pytest.raises(StartFailed, match="tried 5 times: its store is damaged"):
            await nats.keep(lambda: None)
    assert server.restarts == 3 + 5


async def test_a_server_that_stores_nothing_is_started_again_when_there_is_room_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, done = Server(), asyncio.Event()
    nats = part(server, monkeypatch)
    room = iter([0, 0, ROOM_BYTES])
    monkeypatch.setattr(nats_part, "free_bytes", lambda _folder: next(room, ROOM_BYTES))
    monkeypatch.setattr("headrace.up.nats_part.AFTER_FULL_S", 0.0)

    async def stuck() -> bool:
        return server.restarts == 0

    with structlog.testing.capture_logs() as logs:
        await run_until(nats.mend(stuck, done.set), done)
    assert server.restarts == 1
    said = [line for line in logs if line["event"] == "nats.restarting"]
    assert [(line["reason"], line["free_bytes"]) for line in said] == [
        ("it stores nothing, and its disk, which was full, has room again", ROOM_BYTES)
    ]


async def test_a_server_that_stands_still_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen one would store nothing either; it goes on where it was."""
    server, asked = Server(), asyncio.Event()
    server.health = ServerHealth(ok=False, problem="timed out")
    nats = part(server, monkeypatch)
    monkeypatch.setattr(nats_part, "free_bytes", lambda _folder: ROOM_BYTES)
    monkeypatch.setattr("headrace.up.nats_part.UNEXPLAINED_S", 0.0)
    questions = 0

    async def stuck() -> bool:
        nonlocal questions
        questions += 1
        if questions == 20:
            asked.set()
        return True

    await run_until(nats.mend(stuck, lambda: None), asked)
    assert server.restarts == 0
    server.health = ServerHealth(ok=True)
    asked.clear()
    await run_until(nats.mend(stuck, asked.set), asked)
    assert server.restarts == 1


async def test_a_server_that_calls_a_stream_unwritable_is_started_again_though_all_requests_are_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A durable stream would stand for ever: its entries are not in the stream of requests, which frontends report."""
    server, done = Server(), asyncio.Event()
    server.health = ServerHealth(ok=False, unwritable=("HR_RSP",))
    nats = part(server, monkeypatch)
    monkeypatch.setattr(nats_part, "free_bytes", lambda _folder: ROOM_BYTES)
    monkeypatch.setattr("headrace.up.nats_part.AFTER_ERROR_S", 0.0)

    async def stuck() -> bool:
        if server.restarts:
            done.set()
        return False

    def mended() -> None:
        server.health = ServerHealth(ok=True)

    with structlog.testing.capture_logs() as logs:
        await run_until(nats.mend(stuck, mended), done)
    assert server.restarts == 1
    said = [(line["event"], line.get("streams") or line.get("reason")) for line in logs]
    assert said == [
        ("nats.unwritable", ("HR_RSP",)),
        ("nats.restarting", "it writes nothing to HR_RSP"),
        ("nats.writable", None),
    ]


def test_a_file_that_was_replaced_is_noticed_once(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_text("one")
    key.write_text("one")
    files = CertificateFiles((str(cert), str(key), None))
    assert not files.changed()
    fresh = tmp_path / "new.pem"
    fresh.write_text("two")
    fresh.replace(key)
    assert files.changed()
    assert not files.changed()


def test_a_file_that_is_missing_while_it_is_replaced_has_not_changed(tmp_path: Path) -> None:
    cert = tmp_path / "cert.pem"
    cert.write_text("one")
    files = CertificateFiles((str(cert),))
    cert.unlink()
    assert not files.changed()
    cert.write_text("another")
    assert files.changed()


def test_a_link_that_leads_elsewhere_is_noticed(tmp_path: Path) -> None:
    """As a mounted secret of Kubernetes is renewed."""
    for name in ("a", "b"):
        (tmp_path / name).write_text("same length")
        os.utime(tmp_path / name, (1, 1))
    link = tmp_path / "cert.pem"
    link.symlink_to("a")
    files = CertificateFiles((str(link),))
    link.unlink()
    link.symlink_to("b")
    assert files.changed()


def test_without_certificates_nothing_changes() -> None:
    assert not CertificateFiles((None, None)).changed()


OWN = ("HR_JOB", "KV_hr_keys", "OBJ_hr_files", "OBJ_hr_embeddings-sim-61b7c891")
OTHERS = ("ORDERS", "MINE_JOB", "KV_mine_keys")


def account(folder: Path, name: str) -> Path:
    return folder / "store" / "jetstream" / name / "streams"


def store(folder: Path, name: str, *streams: str) -> None:
    for stream in streams:
        (account(folder, name) / stream).mkdir(parents=True)
        (account(folder, name) / stream / "meta.inf").write_text(f"{stream} of {name}")


def stored(folder: Path, name: str) -> set[str]:
    return {path.name for path in account(folder, name).iterdir()} if account(folder, name).exists() else set()


def used_last(folder: Path, *, logins: bool) -> None:
    (folder / "nats-server.conf").write_text("accounts {\n  HR: {\n" if logins else "listen: x\n")


def streams(folder: Path, prefix: str = "hr") -> StoredStreams:
    return StoredStreams(folder, prefix)


def accounts(folder: Path) -> set[str]:
    return {path.name for path in (folder / "store" / "jetstream").iterdir()}


def test_all_streams_go_to_the_account_of_the_logins(tmp_path: Path) -> None:
    store(tmp_path, "$G", *OWN, *OTHERS)
    with capture_logs() as logged:
        streams(tmp_path).bring(logins=True)
    assert stored(tmp_path, "HR") == {*OWN, *OTHERS}
    assert accounts(tmp_path) == {"HR"}, "the server is not healthy with the folder of an account that it does not know"
    assert (account(tmp_path, "HR") / "HR_JOB" / "meta.inf").read_text() == "HR_JOB of $G"
    assert [(line["event"], line["streams"]) for line in logged] == [("nats.streams_moved", len(OWN) + len(OTHERS))]


def test_they_come_back_when_logins_are_turned_off(tmp_path: Path) -> None:
    store(tmp_path, "$G", *OWN)
    streams(tmp_path).bring(logins=True)
    streams(tmp_path).bring(logins=False)
    assert stored(tmp_path, "$G") == set(OWN)
    assert accounts(tmp_path) == {"$G"}


def test_a_deployment_with_another_prefix_in_the_same_folder_has_its_own_streams_with_logins_too(tmp_path: Path) -> None:
    store(tmp_path, "$G", *OWN, *OTHERS)
    streams(tmp_path).bring(logins=True)
    streams(tmp_path, "mine").bring(logins=True)
    assert stored(tmp_path, "MINE") == {*OWN, *OTHERS}
    assert accounts(tmp_path) == {"MINE"}


@pytest.mark.parametrize("logins", [True, False])
def test_a_folder_in_which_nothing_is_stored_and_one_in_its_place_are_left_alone(tmp_path: Path, logins: bool) -> None:
    streams(tmp_path).bring(logins=logins)
    store(tmp_path, "HR" if logins else "$G", *OWN)
    with capture_logs() as logged:
        streams(tmp_path).bring(logins=logins)
    assert not logged


def test_a_move_that_was_cut_short_is_finished(tmp_path: Path) -> None:
    store(tmp_path, "$G", *OWN[1:])
    store(tmp_path, "HR", OWN[0])
    used_last(tmp_path, logins=False)
    streams(tmp_path).bring(logins=True)
    assert stored(tmp_path, "HR") == set(OWN)


@pytest.mark.parametrize("logins", [True, False])
def test_two_sets_of_streams_are_not_put_together_and_the_error_says_what_to_do(tmp_path: Path, logins: bool) -> None:
    store(tmp_path, "$G", *OWN)
    store(tmp_path, "HR", "HR_JOB")
    used_last(tmp_path, logins=not logins)
    with pytest.raises(StreamsNotMoved) as failed:
        streams(tmp_path).bring(logins=logins)
    said = str(failed.value)
    assert "HR_JOB" in said
    assert all(str(account(tmp_path, name).parent) in said for name in ("$G", "HR"))
    assert f"--nats-login {'one' if logins else 'roles'}" in said
    assert failed.value.exit_code == EXIT_CONFIGURATION
    assert stored(tmp_path, "$G") == set(OWN)


def test_an_old_set_that_the_last_start_did_not_use_either_is_left_with_a_warning(tmp_path: Path) -> None:
    store(tmp_path, "$G", *OWN)
    store(tmp_path, "HR", *OWN)
    used_last(tmp_path, logins=True)
    with capture_logs() as logged:
        streams(tmp_path).bring(logins=True)
    assert [line["event"] for line in logged] == ["nats.streams_unseen"]
    assert (account(tmp_path, "HR") / "HR_JOB" / "meta.inf").read_text() == "HR_JOB of HR"


def test_a_folder_that_cannot_be_written_is_an_error_that_says_how_to_go_on(tmp_path: Path) -> None:
    store(tmp_path, "$G", *OWN)
    account(tmp_path, "HR").parent.write_text("a file in the place of a folder")
    with pytest.raises(StreamsNotMoved, match="--nats-login one to go on as before"):
        streams(tmp_path).bring(logins=True)
    assert stored(tmp_path, "$G") == set(OWN)


def test_nothing_is_moved_under_a_server_that_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(tmp_path, "$G", *OWN)
    config = str(tmp_path / "nats-server.conf")
    server = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)", "--config", config])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / f"nats-server_{server.pid}.ports").write_text("{}")
    (tmp_path / "run" / f"nats-server_{2**22 + 1}.ports").write_text("{}")  # of one that is gone
    monkeypatch.setattr(nats_part, "_OLD_SERVER_S", 0.0)
    try:
        while config not in Path(f"/proc/{server.pid}/cmdline").read_text():
            time.sleep(0.01)
        with pytest.raises(StreamsNotMoved, match=f"process id {server.pid} still uses"):
            streams(tmp_path).bring(logins=True)
        assert stored(tmp_path, "$G") == set(OWN)
    finally:
        server.kill()
        server.wait()
    streams(tmp_path).bring(logins=True)
    assert stored(tmp_path, "HR") == set(OWN)


FULL, ROOM = 0, 2 * ROOM_BYTES


def test_a_full_disk_is_waited_for_and_then_the_server_is_started_again_at_once() -> None:
    rule = StuckStore()
    assert not any(rule.restart_due(float(now), stuck=now > 8, free_bytes=FULL) for now in range(600))
    assert not rule.restart_due(600.0, stuck=True, free_bytes=ROOM_BYTES - 1)
    assert rule.restart_due(601.0, stuck=True, free_bytes=ROOM)
    assert rule.was_full


def test_room_before_anything_was_refused_makes_it_wait_a_little() -> None:
    rule = StuckStore()
    assert not rule.restart_due(0.0, stuck=False, free_bytes=FULL)
    assert not rule.restart_due(1.0, stuck=True, free_bytes=ROOM)
    assert not rule.restart_due(1.0 + AFTER_FULL_S - 0.1, stuck=True, free_bytes=ROOM)
    assert rule.restart_due(1.0 + AFTER_FULL_S, stuck=True, free_bytes=ROOM)


def test_a_write_error_that_the_server_names_needs_no_full_disk_and_little_patience() -> None:
    """A disk may be full and empty again between two looks."""
    rule = StuckStore()
    assert not rule.restart_due(0.0, stuck=False, free_bytes=ROOM, unwritable=True)
    assert rule.restart_due(AFTER_ERROR_S, stuck=False, free_bytes=ROOM, unwritable=True)
    assert not rule.restart_due(AFTER_ERROR_S, stuck=False, free_bytes=ROOM_BYTES - 1, unwritable=True)


def test_a_second_write_error_is_mended_soon_after_the_first() -> None:
    rule = StuckStore()
    rule.restarted(0.0)
    rule.restart_due(1.0, stuck=False, free_bytes=ROOM, unwritable=True)
    assert rule.restart_due(AGAIN_FIRST_S, stuck=False, free_bytes=ROOM, unwritable=True)


def test_a_disk_that_was_not_seen_full_takes_longer() -> None:
    rule = StuckStore()
    assert not rule.restart_due(0.0, stuck=True, free_bytes=ROOM)
    assert not rule.restart_due(UNEXPLAINED_S - 0.1, stuck=True, free_bytes=ROOM)
    assert rule.restart_due(UNEXPLAINED_S, stuck=True, free_bytes=ROOM)


def test_a_word_that_it_stores_begins_the_wait_again() -> None:
    rule = StuckStore()
    rule.restart_due(0.0, stuck=True, free_bytes=ROOM)
    rule.restart_due(10.0, stuck=False, free_bytes=ROOM)
    rule.restart_due(11.0, stuck=True, free_bytes=ROOM)
    assert not rule.restart_due(UNEXPLAINED_S + 1.0, stuck=True, free_bytes=ROOM)


def test_starts_that_do_not_help_become_rare() -> None:
    rule = StuckStore()
    at_s: list[float] = []
    for now in range(3000):
        if rule.restart_due(float(now), stuck=True, free_bytes=ROOM):
            rule.restarted(float(now))
            at_s.append(float(now))
    gaps = [later - earlier for earlier, later in pairwise(at_s)]
    assert gaps[:5] == [*([UNEXPLAINED_S + 1.0] * 3), 8 * AGAIN_FIRST_S, 16 * AGAIN_FIRST_S]
    assert max(gaps) == AGAIN_MOST_S
