"""What is stored without logins is taken along when they are asked for, and back."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from headrace.base.errors import EXIT_CONFIGURATION
from headrace.up import stored_streams
from headrace.up.stored_streams import StoredStreams, StreamsNotMoved

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
    monkeypatch.setattr(stored_streams, "_OLD_SERVER_S", 0.0)
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
