"""The console of `headrace up` gets a port, a key, and only what is safe where it listens."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from headrace.base.errors import SettingsError
from headrace.config.settings import load
from headrace.up.console_part import ConsolePart, console_part


def part(taken: set[int] | None = None, **flags: str) -> ConsolePart | None:
    named = {name.replace("__", "."): value for name, value in flags.items()}
    settings = load("up", flags={"worker.engine": "sim", **named})
    return console_part(
        settings, {"X": "y"}, frontend="http://127.0.0.1:8000", taken=set() if taken is None else taken, logins=None
    )


def made(**flags: Any) -> ConsolePart:
    found = part(**flags)
    assert found is not None
    return found


def test_the_link_has_the_key_and_what_is_written_down_has_not() -> None:
    console = made()
    assert console.link == f"{console.url}#key={console.key}"
    assert console.part.env["HEADRACE_CONSOLE_KEY"] == console.key
    assert console.key not in str(console.describe())
    assert not any(console.key in word for word in console.part.argv)
    assert made().key != console.key


def test_the_link_of_a_console_with_a_certificate_is_https() -> None:
    assert made(console__tls_cert="/cert.pem").link.startswith("https://")
    assert made().link.startswith("http://")


def test_on_this_machine_alone_it_is_open_and_may_kill() -> None:
    env = made().part.env
    assert (env["HEADRACE_CONSOLE_PRIVATE"], env["HEADRACE_CONSOLE_ALLOW_KILL"]) == ("false", "true")


@pytest.mark.parametrize(
    "flags",
    [{"console__host": "0.0.0.0"}, {"frontend__host": "0.0.0.0"}, {"frontend__auth": "keys"}, {"api_key": "k" * 20}],
)
def test_where_others_may_come_it_is_private_and_kills_nothing(flags: dict[str, str]) -> None:
    env = made(**flags).part.env
    assert (env["HEADRACE_CONSOLE_PRIVATE"], env["HEADRACE_CONSOLE_ALLOW_KILL"]) == ("true", "false")


def test_it_can_be_left_out() -> None:
    assert part(up__console="false") is None


def test_a_taken_port_is_replaced_unless_it_was_asked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"{port} \(console.host, console.port\)"):
            part(console__port=str(port))
    taken = {8001}
    console = made(taken=taken)
    assert not console.url.endswith(":8001/console")
    assert len(taken) == 2
