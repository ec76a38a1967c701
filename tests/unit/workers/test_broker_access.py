"""A login is handed to an engine's processes in a file that others cannot read."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.jetstream.context import ConnectOptions
from headrace.jetstream.subjects import Subjects
from headrace.workers.broker_access import BrokerAccess


def test_a_login_comes_through_its_file_as_it_was(tmp_path: Path) -> None:
    options = ConnectOptions(("tls://a:4222", "tls://b:4222"), user="u", password="p", tls_first=True, connect_timeout_s=2.5)
    access = BrokerAccess(options, Subjects("x1"), "p")
    access.write(tmp_path / "access")
    assert BrokerAccess.read(tmp_path / "access") == access
    assert (tmp_path / "access").stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "access").write_text("another's")
    with pytest.raises(FileExistsError):
        BrokerAccess(ConnectOptions(), Subjects(), "p").write(tmp_path / "access")
