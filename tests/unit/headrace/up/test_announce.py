"""The end of a start: what is said once a model answers."""

from __future__ import annotations

import io
import json
import time

import pytest

from headrace.up import parts
from headrace.up.announce import say_ready, until_answering
from headrace.up.terminal import Terminal


class Frontend:
    """What a frontend says at each question about `/ready`; the last answer stays."""

    def __init__(self, *answers: tuple[int, list[str]]) -> None:
        self._answers = list(answers)

    async def get(self, _host: str, _port: int, path: str, *, tls: bool = False) -> tuple[int, bytes]:
        if path != "/ready":
            return 0, b""
        status, models = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return status, json.dumps({"models": models}).encode() if status else b""


async def test_a_frontend_that_falls_silent_after_it_was_ready_does_not_take_the_model_from_the_block(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    frontend = Frontend((0, []), (503, []), (200, ["acme/m"]), (503, []))
    monkeypatch.setattr(parts, "get", frontend.get)
    terminal = Terminal(io.StringIO(), json_lines=True, colour=False)
    models = await until_answering(
        terminal, "127.0.0.1", [1], tls=False, waiting_for=lambda: "a model", began_s=time.monotonic()
    )
    assert models == ["acme/m"]
    await say_ready("127.0.0.1", 8000, tls=False, models=models, after_s=1.0)
    block = capsys.readouterr().out
    assert "Headrace is ready after 1.0 s and serves acme/m." in block
    assert '"model": "acme/m"' in block
