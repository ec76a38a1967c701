"""Data of a deployment that ran without logins is taken along when it asks for them: its folder is that of an account."""

from __future__ import annotations

from pathlib import Path

from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.logins.nkey_logins import accounts_config, make_keys, write_context
from headrace.jetstream.logins.roles import Login
from headrace.jetstream.provision import ensure_topology
from headrace.jetstream.settings import ServerSettings
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology

S = Subjects("hr")
TOPOLOGY = Topology(S)


async def test_a_renamed_folder_brings_jobs_keys_and_files_under_logins(tmp_path: Path) -> None:
    data, operator = tmp_path / "nats", Login("operator")
    plain = ServerSettings(encrypt="none")  # the keys of an encrypted store are those of an account: `up` takes them along
    with EmbeddedServer(data, plain) as server:
        async with await Connection.connect(ConnectOptions(servers=(server.url,)), subjects=S) as connection:
            await ensure_topology(connection, TOPOLOGY)
            await connection.publish(S.job("m", "acme"), b"a job")
            await connection.bucket("hr_keys").put("k1", b"a key")
            await connection.objects("hr_files").put("acme/f", b"x" * 300_000)
    accounts = data / "store" / "jetstream"
    (accounts / "$G").rename(accounts / "HR")
    config = accounts_config(TOPOLOGY, make_keys(tmp_path / "logins", [operator]))
    with EmbeddedServer(data, ServerSettings(extra=config, encrypt="none")) as server:
        context = write_context(tmp_path / "logins", operator, url=server.url, prefix="hr")
        async with await Connection.connect(ConnectOptions.from_context(str(context)), subjects=S) as connection:
            await ensure_topology(connection, TOPOLOGY)
            assert [m.data for m in await connection.subject_messages("HR_JOB", ">")] == [b"a job"]
            entry = await connection.bucket("hr_keys").get("k1")
            assert entry is not None
            assert entry.value == b"a key"
            assert await connection.objects("hr_files").get("acme/f") == b"x" * 300_000
