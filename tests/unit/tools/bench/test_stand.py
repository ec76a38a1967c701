"""The mock back end, as a gateway sees it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace.chat import served_models
from headrace.cli import main
from headrace.tools.bench.load import Target, bodies, run_closed
from headrace.tools.bench.stand import (
    MODEL,
    PEERS,
    STAMP,
    NotInstalled,
    Peer,
    Places,
    Stand,
    answer,
    install,
    installed,
    running,
    serve,
    tree,
    wait_until,
)


async def test_every_token_asked_for_is_streamed_over_connections_that_are_kept() -> None:
    async with await serve(0) as server:
        target = Target("127.0.0.1", server.sockets[0].getsockname()[1], MODEL)
        outcome = await run_closed(target, bodies(MODEL, requests=9, words=3, tokens=7, seed=1), streams=2, timeout_s=30)
        names = await asyncio.to_thread(served_models, f"http://127.0.0.1:{target.port}")
    assert (outcome.ok, outcome.failed, outcome.chunks) == (9, 0, 63)
    assert names == [MODEL]


async def test_a_request_that_comes_in_pieces_is_answered_once_it_is_whole() -> None:
    body = json.dumps({"stream": True, "max_tokens": 2}).encode()
    async with await serve(0) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
        for part in (b"POST /v1/chat/completions HTTP/1.1\r\ncontent-", b"length: %d\r\n\r\n" % len(body), body[:5], body[5:]):
            writer.write(part)
            await asyncio.sleep(0.01)
        told = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 30)
        writer.close()
    assert told == answer(body)
    assert told.count(b'"content":"word "') == 2


def test_a_chat_that_is_not_streamed_is_answered_whole() -> None:
    told = json.loads(answer(b'{"max_tokens": 3}').partition(b"\r\n\r\n")[2])
    assert told["choices"][0]["message"]["content"].split() == ["word"] * 3


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
def test_every_peer_listens_on_this_machine_alone_and_before_its_own_back_end(peer: Peer) -> None:
    launch = peer.launch(Places(Path("/x"), Path("/x/bin/python"), 1111, 2222, 3333, Path("/m")))
    said = json.dumps([launch.commands, dict(launch.environment), dict(launch.files)])
    assert "1111" in said
    assert "127.0.0.1:2222" in said
    assert all(command[0].startswith("/x/bin/") for command in launch.commands)
    assert peer.version
    assert any(peer.version in word for step in peer.packages for words in step for word in words)


def test_a_peer_that_no_index_has_is_not_installed_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    peer = Peer("none", "", ((("no-such-package-anywhere==1",),),))
    with pytest.raises(NotInstalled, match="no-such-package-anywhere"):
        install(peer, tmp_path / "none")
    assert not installed(peer, tmp_path / "none")


def test_what_is_installed_already_is_left_alone(tmp_path: Path) -> None:
    peer = PEERS["smg"]
    (tmp_path / STAMP).write_text(repr(peer.packages))
    install(peer, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [STAMP]


def test_a_peer_without_the_model_that_it_needs_is_refused_before_anything_is_installed(tmp_path: Path) -> None:
    with ExitStack() as stack, pytest.raises(NotInstalled, match="--model"):
        Stand(stack, tmp_path, tmp_path / "environments", None).start(PEERS["dynamo"])
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_peer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "compare", "nobody"]) == 1
    assert "no such peer: nobody" in capsys.readouterr().err


def test_descendants_are_counted_and_ended_with_their_parent(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE).wait()"
    with running((sys.executable, "-c", child), tmp_path / "log", {}, tmp_path) as pid:
        assert wait_until(lambda: len(tree([pid])) == 2, 30.0, [pid])
        pids = tree([pid])
    assert wait_until(lambda: not tree(sorted(pids)) - {os.getpid()}, 30.0, [os.getpid()])


def test_waiting_for_a_process_that_has_ended_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        assert not wait_until(lambda: False, 60.0, [process.pid])
