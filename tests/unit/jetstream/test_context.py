import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.jetstream.context import ConnectOptions, context_path, parse_context
from headrace.jetstream.errors import ConnectError


def save(home: Path, name: str, values: object) -> None:
    folder = home / "nats" / "context"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(values))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def test_a_context_of_the_nats_tool_is_read_by_name(home: Path) -> None:
    values = {
        "url": "nats://a:4222, nats://b:4222",
        "user": "u",
        "password": "p",
        "creds": "",
        "ca": "/ca.pem",
        "tls_first": True,
        "inbox_prefix": "_INBOX_me",
        "description": "ours",
        "socks_proxy": "",
    }
    save(home, "prod", values)
    options = ConnectOptions.from_context("prod", name="me")
    assert options.servers == ("nats://a:4222", "nats://b:4222")
    assert (options.user, options.password, options.credentials) == ("u", "p", None)
    assert (options.tls_ca, options.tls_first, options.inbox_prefix, options.name) == ("/ca.pem", True, "_INBOX_me", "me")


def test_without_a_name_the_selected_context_is_read(home: Path) -> None:
    save(home, "chosen", {"url": "nats://c:1"})
    (home / "nats" / "context.txt").write_text("chosen\n")
    assert ConnectOptions.from_context().servers == ("nats://c:1",)


def test_a_context_is_read_by_path(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"url": "nats://d:1"}')
    assert ConnectOptions.from_context(str(path)).servers == ("nats://d:1",)


def test_a_missing_context_names_its_file(home: Path) -> None:
    with pytest.raises(ConnectError, match=r"context/nope\.json"):
        ConnectOptions.from_context("nope")
    with pytest.raises(ConnectError, match="none is selected"):
        context_path(None)


@pytest.mark.parametrize("content", ["{", "[]", '{"url": 5}'])
def test_a_broken_context_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(ConnectError, match=r"broken\.json"):
        ConnectOptions.from_context(str(path))


def test_an_empty_context_means_the_default_server() -> None:
    assert parse_context({}, where="x").servers == ("nats://127.0.0.1:4222",)


def test_addresses_are_shown_without_passwords() -> None:
    assert ConnectOptions(servers=("nats://me:secret@host:4222", "tls://h2")).address == "nats://host:4222, tls://h2"


def test_files_that_do_not_exist_are_named_before_connecting() -> None:
    with pytest.raises(ConnectError, match=r"/no/such\.creds"):
        ConnectOptions(credentials="/no/such.creds").client_arguments()
    with pytest.raises(ConnectError, match="TLS"):
        ConnectOptions(tls_ca="/no/such.pem").client_arguments()


@pytest.mark.parametrize("url", ["http://me:secret@broker:4222", "wss://me:secret@broker:443"])
def test_what_is_no_address_of_a_nats_server_is_refused_by_name_and_without_its_password(url: str) -> None:
    with pytest.raises(ConnectError, match=r"nats:// or tls://, not as in (http|wss)://broker:4") as refused:
        ConnectOptions(servers=("nats://fine:4222", url))
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["nats://a:4222", "tls://me:secret@a:4222", "a:4222", "a"])
def test_the_usual_forms_of_an_address_are_taken(url: str) -> None:
    assert ConnectOptions(servers=(url,)).servers == (url,)


def test_a_part_does_not_import_aiohttp_for_websockets_and_an_engine_still_can() -> None:
    """aiohttp, where vLLM has brought it."""
    pytest.importorskip("aiohttp")
    code = (
        "import sys, headrace.jetstream.client; assert 'aiohttp' not in sys.modules; import aiohttp; assert "
        "aiohttp.ClientSession"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("copies", [2, 4])
def test_an_even_number_of_copies_is_refused(copies: int) -> None:
    with pytest.raises(ConnectError, match="odd number"):
        ConnectOptions(replicas=copies)
