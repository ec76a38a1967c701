"""The processes of one SGLang meet where no other machine can knock, and what they leave there ends with them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from headrace.workers.sglang.local_store import METHOD, use_local_store

CHILD = "import sys; from pathlib import Path; file = Path(sys.argv[1]); file.write_text(file.read_text() + 'there')"


def test_they_meet_in_memory_that_children_of_the_process_read_and_write() -> None:
    environ: dict[str, str] = {}
    use_local_store({"tp_size": 2}, environ)
    path = environ[METHOD].removeprefix("file://")
    assert path.startswith(f"/proc/{os.getpid()}/fd/")
    try:
        for seen in ("there", "therethere"):
            subprocess.run([sys.executable, "-c", CHILD, path], check=True, timeout=30)
            assert os.pread(int(path.rpartition("/")[2]), 100, 0) == seen.encode()
        assert os.readlink(path).startswith("/memfd:"), "nothing of it lies on a disk"
    finally:
        os.close(int(path.rpartition("/")[2]))


@pytest.mark.parametrize(
    ("args", "environ"),
    [
        ({"nnodes": 2, "dist_init_addr": "10.0.0.1:5000"}, {}),
        ({"dist_init_addr": "127.0.0.1:5000"}, {}),
        ({"dp_size": 2}, {}),
        ({}, {METHOD: "env://"}),
    ],
)
def test_where_they_cannot_or_the_operator_has_named_a_place_it_stays(args: dict[str, Any], environ: dict[str, str]) -> None:
    before = dict(environ)
    use_local_store(args, environ)
    assert environ == before
