"""The one login of a deployment without roles."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.jetstream.context import ConnectOptions
from headrace.jetstream.logins.nkey_logins import LoginFileUnusable, public_key
from headrace.jetstream.logins.one_login import one_user_config, write_one_context

URL = "nats://127.0.0.1:4711"


def test_the_server_is_told_the_public_key_of_a_seed_that_is_made_once(tmp_path: Path) -> None:
    config = one_user_config(tmp_path, "d")
    seed = (tmp_path / "d.nk").read_text().strip()
    assert f"nkey: {public_key(seed)}" in config
    assert seed not in config
    assert one_user_config(tmp_path, "d") == config
    assert (tmp_path / "d.nk").stat().st_mode & 0o777 == 0o600


def test_its_context_names_address_seed_and_certificates_and_limits_nothing(tmp_path: Path) -> None:
    one_user_config(tmp_path, "d")
    path = write_one_context(tmp_path, "d", url=URL, tls={"ca": "/ca.pem"})
    assert ConnectOptions.from_context(str(path)) == ConnectOptions(
        servers=(URL,), nkey_seed=str(tmp_path / "d.nk"), tls_ca="/ca.pem"
    )
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "d.new").mkdir()
    with pytest.raises(LoginFileUnusable, match=r"d\.json cannot be written"):
        write_one_context(tmp_path, "d", url=URL, tls={})
