"""Files of logins: seeds, contexts, and the server's configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.jetstream.context import ConnectOptions
from headrace.jetstream.logins.nkey_logins import (
    LoginFileUnusable,
    accounts_config,
    make_keys,
    new_seed,
    one_user_config,
    public_key,
    write_context,
    write_one_context,
)
from headrace.jetstream.logins.roles import Login, permissions
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology


def test_seeds_are_made_once_and_only_their_owner_can_read_them(tmp_path: Path) -> None:
    logins = [Login("operator"), Login("worker", "p")]
    made = make_keys(tmp_path / "logins", logins)
    assert make_keys(tmp_path / "logins", logins) == made
    assert len(set(made.values())) == 2
    assert all(key.startswith("U") and len(key) == 56 for key in made.values())
    assert (tmp_path / "logins").stat().st_mode & 0o777 == 0o700
    for name in ("operator.nk", "worker-p.nk"):
        assert (tmp_path / "logins" / name).stat().st_mode & 0o777 == 0o600


def test_the_public_key_says_nothing_of_the_seed() -> None:
    seed = new_seed()
    assert seed.startswith("SU")
    assert public_key(seed)[1:20] not in seed


@pytest.mark.parametrize("content", ["", "nonsense", "SUAAAA"])
def test_a_file_that_is_no_seed_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "operator.nk").write_text(content)
    with pytest.raises(LoginFileUnusable, match=r"operator\.nk cannot be used"):
        make_keys(tmp_path, [Login("operator")])


def test_a_context_is_what_a_part_needs_to_log_in(tmp_path: Path) -> None:
    login = Login("worker", "p")
    make_keys(tmp_path, [login])
    path = write_context(tmp_path, login, url="nats://127.0.0.1:4222", prefix="hr", tls={"ca": "/ca.pem"})
    options = ConnectOptions.from_context(str(path))
    assert options.servers == ("nats://127.0.0.1:4222",)
    assert options.nkey_seed == str(tmp_path / "worker-p.nk")
    assert (options.inbox, options.tls_ca) == ("_INBOX.worker.p", "/ca.pem")
    assert (options.js_api, options.steward) == ("JS.HR.API", "hr.steward.worker.p")
    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "worker-p.nk").read_text().strip() not in path.read_text()
    assert options.asked == permissions(Topology(Subjects("hr")), login).asked


def test_the_configuration_has_public_keys_and_allow_lists_only(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, [Login("console"), Login("batch", "acme")])
    text = accounts_config(Topology(Subjects("hr")), keys)
    assert all(f"nkey: {key}" in text for key in keys.values())
    assert '"hr.job.*.acme"' in text
    assert "$JS.EVENT" not in text
    assert "allow_responses" not in text
    assert not any(path.read_text().strip() in text for path in tmp_path.glob("*.nk"))


def test_an_operator_makes_its_consumers_itself(tmp_path: Path) -> None:
    make_keys(tmp_path, [Login("operator")])
    path = write_context(tmp_path, Login("operator"), url="nats://127.0.0.1:4222", prefix="hr")
    assert ConnectOptions.from_context(str(path)).steward is None


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
