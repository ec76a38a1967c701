"""The small pieces of `headrace up`: terminal, run file, port choice, ready text, finding a worker."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import socket
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import AlreadyRunning, CommandError, SettingsError
from headrace.base.process import stop_signals
from headrace.broker.messages.members import WorkerMember
from headrace.commands.control import find_worker
from headrace.config.settings import Settings, load
from headrace.up.parts import (
    PART_GROUP,
    ConsolePart,
    Parts,
    assign_ports,
    base_url,
    choose_port,
    console_part,
    get,
    kinds_of,
    make_parts,
    served_models,
)
from headrace.up.restart_policy import ManagedProcess, RestartState
from headrace.up.runfile import RunFile
from headrace.up.supervisor import ready_text
from headrace.up.terminal import Terminal, stopping_text


class _Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_of_parts_get_a_prefix() -> None:
    out = io.StringIO()
    terminal = Terminal(out, json_lines=False, colour=False)
    terminal.part_lines("worker-1", ["hello"])
    assert out.getvalue() == "worker-1 │ hello\n"


def test_json_lines_pass_and_other_output_is_wrapped() -> None:
    out = io.StringIO()
    terminal = Terminal(out, json_lines=True, colour=False)
    terminal.part_lines("worker-1", ['{"event": "x"}'])
    terminal.part_lines("worker-1", ["Segmentation fault"])
    first, second = map(json.loads, out.getvalue().splitlines())
    assert first == {"event": "x"}
    assert (second["component"], second["line"]) == ("worker-1", "Segmentation fault")


def test_a_log_line_never_lands_inside_the_status_line() -> None:
    out = _Tty()
    terminal = Terminal(out, json_lines=False, colour=False)
    terminal.status("loading, 3 s")
    terminal.write("log line\n")
    terminal.status("")
    terminal.write("last\n")
    clear = "\r\x1b[2K"
    assert out.getvalue() == f"{clear}loading, 3 s{clear}log line\nloading, 3 s{clear}last\n"


def test_the_live_line_of_a_stop_names_what_has_not_ended() -> None:
    assert stopping_text(["worker-1"], 3.4) == "  … worker-1 finishes, 3 s"
    many = [f"worker-{number}" for number in range(1, 8)]
    assert stopping_text(many, 12.0) == "  … worker-1, worker-2, worker-3, worker-4 and 3 more finish, 12 s"
    assert stopping_text([], 1.0) == ""


def test_no_status_line_without_a_terminal() -> None:
    out = io.StringIO()
    Terminal(out, json_lines=False, colour=False).status("loading")
    assert out.getvalue() == ""


def test_the_run_file_keeps_a_second_up_out_and_is_removed_at_the_end(tmp_path: Path) -> None:
    with RunFile(tmp_path) as first:
        first.write({"pid": 4711})
        with pytest.raises(AlreadyRunning, match="pid 4711"), RunFile(tmp_path):
            pass
        assert json.loads(first.path.read_text())["pid"] == 4711
    assert not (tmp_path / "run" / "up.json").exists()
    with RunFile(tmp_path):
        pass


def test_a_taken_port_is_a_settings_error_and_zero_is_a_free_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"127\.0\.0\.1:{port}.*frontend\.port"):
            choose_port("127.0.0.1", port)
    assert choose_port("127.0.0.1", port) == port
    assert choose_port("127.0.0.1", 0) in range(20_000, 32_768)  # no connection is given one of these


def test_a_host_that_cannot_be_found_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = []

    def getaddrinfo(host: str, port: int, **options: object) -> list[object]:
        looked_up.append((host, port))
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(SettingsError, match=r"nowhere\.invalid:0.*Name or service not known"):
        choose_port("nowhere.invalid", 0)
    assert looked_up == [("nowhere.invalid", 0)]


def test_the_address_shown_is_one_that_a_client_can_use() -> None:
    assert base_url("0.0.0.0", 8000) == "http://127.0.0.1:8000"
    assert base_url("::", 8000) == "http://[::1]:8000"
    assert base_url("10.0.0.7", 80) == "http://10.0.0.7:80"


async def test_nobody_listening_is_status_zero_and_no_models() -> None:
    port = choose_port("127.0.0.1", 0)
    assert await get("127.0.0.1", port, "/ready") == (0, b"")
    assert await served_models("127.0.0.1", port) == []
    assert await kinds_of("127.0.0.1", port, "sim") == []


@pytest.mark.parametrize(
    ("kinds", "route"),
    [
        ([], "chat/completions"),
        (["chat", "completion"], "chat/completions"),
        (["embedding"], "embeddings"),
        (["embedding", "score"], "embeddings"),
        (["score", "classify"], "rerank"),
        (["classify"], "classify"),
    ],
)
def test_the_ready_text_can_be_pasted_and_asks_for_what_the_model_does(kinds: list[str], route: str) -> None:
    text = ready_text("http://127.0.0.1:8000", "sim", after_s=1.23, kinds=kinds)
    body = text.split("-d '")[1].split("'\n")[0]
    assert json.loads(body)["model"] == "sim"
    assert f"curl http://127.0.0.1:8000/v1/{route} " in text
    if "in Python" not in text:
        return
    assert text.count("http://127.0.0.1:8000/v1") == 3
    python = text.split("or in Python:\n")[1].split("Ctrl-C")[0]
    compile("\n".join(line[2:] for line in python.splitlines()), "snippet", "exec")


async def test_the_first_signal_asks_and_later_ones_insist() -> None:
    heard: list[str] = []
    with stop_signals(lambda: heard.append("ask"), lambda: heard.append("insist")):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.01)
    assert heard == ["ask", "insist", "insist"]


async def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    heard: list[str] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals(lambda: heard.append("ask"), lambda: None):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.01)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert heard == []


def test_a_worker_is_found_by_id_or_by_name() -> None:
    live = [WorkerMember(worker=worker, pool="p", model="m") for worker in ("a-1f", "a-2f", "b-3f")]
    assert find_worker("b", live).worker == "b-3f"
    assert find_worker("a-1f", live).worker == "a-1f"
    with pytest.raises(CommandError, match="a-1f, a-2f"):
        find_worker("a", live)
    with pytest.raises(CommandError, match="no live worker 'c'; live: a-1f, a-2f, b-3f"):
        find_worker("c", live)


def test_ports_count_up_from_the_first() -> None:
    taken: set[int] = set()
    assert assign_ports(9100, 3, taken) == [9100, 9101, 9102]
    assert taken == {9100, 9101, 9102}


def test_without_a_port_each_part_has_a_free_one() -> None:
    assert len({0, *assign_ports(None, 2, set())}) == 3


def test_a_free_port_is_never_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    picks = iter([20_001, 20_001, 20_002, 20_002, 20_003])
    monkeypatch.setattr("headrace.up.parts.choose_port", lambda _host, _port: next(picks))
    taken = {20_001}
    assert assign_ports(0, 2, taken) == [20_002, 20_003]
    assert taken == {20_001, 20_002, 20_003}


def test_parts_of_one_deployment_tell_different_free_ports() -> None:
    flags = {"worker.metrics_port": "0", "router.metrics_port": "0", "up.workers": "2", "up.routers": "2"}
    parts = make_parts(load("up", flags={**flags, "worker.engine": "sim"}), {}, port=1)
    told = [part.describe()["metrics_port"] for part in (*parts.workers, *parts.routers)]
    given = [part.env["HEADRACE_WORKER_METRICS_PORT"] for part in parts.workers]
    given += [part.env["HEADRACE_ROUTER_METRICS_PORT"] for part in parts.routers]
    assert [str(port) for port in told] == given
    assert len(set(told)) == 4
    assert 0 not in told


def _cleaner(settings: Settings, environment: Mapping[str, str]) -> ManagedProcess | None:
    if settings["up.routers"] == 0:
        return None
    return ManagedProcess("cleaner", ("clean",), environment, RestartState(essential=False))


def _impostor(settings: Settings, environment: Mapping[str, str]) -> ManagedProcess:
    return ManagedProcess("router-1", ("clean",), environment, RestartState(essential=False))


def with_installed(monkeypatch: pytest.MonkeyPatch, value: str, **flags: str) -> Parts:
    point = EntryPoint("clean", value, PART_GROUP)
    monkeypatch.setattr("headrace.up.parts.entry_points", lambda *, group: [point] if group == PART_GROUP else [])
    named = {name.replace("__", "."): value for name, value in flags.items()}
    environment = {"HEADRACE_API_KEY": "secret", "X": "y"}
    return make_parts(load("up", flags={"worker.engine": "sim", **named}), environment, port=1)


def test_a_part_of_another_package_is_started_without_the_secrets_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = with_installed(monkeypatch, f"{__name__}:_cleaner")
    (cleaner,) = parts.installed
    assert cleaner in list(parts)
    assert (cleaner.argv, dict(cleaner.env)) == (("clean",), {"X": "y"})
    assert with_installed(monkeypatch, f"{__name__}:_cleaner", up__routers="0").installed == ()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("no_such_package:part", "'clean' .* cannot be made: No module named"),
        (f"{__name__}:_impostor", "'clean' .* with a name of its own"),
        ("builtins:max", "'clean' .* cannot be made"),
    ],
)
def test_a_part_that_cannot_be_made_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch, value: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        with_installed(monkeypatch, value)


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
