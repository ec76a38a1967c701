"""`headrace keys` against a real nats-server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.cli import main
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects


def test_a_key_is_made_shown_once_listed_rotated_and_revoked(
    nats_server: EmbeddedServer, subjects: Subjects, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--nats", nats_server.url, "--prefix", subjects.prefix]

    def run(*words: str) -> Any:
        assert main(["keys", *words, "--json", *where]) == 0
        return json.loads(capsys.readouterr().out)

    made = run("create", "ci", "--tenant", "acme", "--scope", "generate", "--model", "org/*", "--expires", "1d", "--rpm", "60")
    assert (made["tenant"], made["scopes"], made["models"]) == ("acme", ["generate"], ["org/*"])
    assert made["limits"] == {"requests_per_minute": 60}
    assert made["secret"].startswith(f"hr_sk_{made['id']}_")
    listed = run("ls")
    assert [key["id"] for key in listed] == [made["id"]]
    assert made["secret"] not in json.dumps(listed)
    rotated = run("rotate", "ci", "--grace", "1h")
    assert rotated["secret"] != made["secret"]
    assert run("revoke", made["id"])["state"] == "revoked"
    assert main(["keys", "ls", *where]) == 0
    assert "revoked" in capsys.readouterr().out
    for wrong in (["create", "x", "--scope", "all"], ["create", "x", "--expires", "soon"], ["revoke", "nothing"]):
        assert main(["keys", *wrong, *where]) == 1
    assert capsys.readouterr().err
