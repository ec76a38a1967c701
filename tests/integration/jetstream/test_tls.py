"""TLS to nats-server: who is refused, that a refusal ends soon, and that TLS that was asked for is not left out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import ConnectError
from headrace.jetstream.settings import ServerSettings
from headrace.jetstream.subjects import Subjects
from tests.support.certificates import write_certificate

Files = dict[str, tuple[Path, Path]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Certificates, each its own authority, with their keys."""
    return {name: write_certificate(tmp_path_factory.mktemp(name), name=name) for name in ("server", "client", "stranger")}


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory, files: Files) -> Iterator[EmbeddedServer]:
    cert, key = files["server"]
    settings = ServerSettings(tls_cert=str(cert), tls_key=str(key), tls_client_ca=str(files["client"][0]))
    with EmbeddedServer(tmp_path_factory.mktemp("nats"), settings) as server:
        yield server


def options(server: EmbeddedServer, files: Files, ca: str, cert: str) -> ConnectOptions:
    own = {"tls_cert": str(files[cert][0]), "tls_key": str(files[cert][1])} if cert else {}
    url = server.url if ca else server.url.replace("tls://", "nats://")
    return ConnectOptions(servers=(url,), tls_ca=str(files[ca][0]) if ca else None, **own)


async def test_a_client_with_its_certificate_connects_also_after_a_restart(mutual: EmbeddedServer, files: Files) -> None:
    async with await Connection.connect(options(mutual, files, "server", "client"), subjects=Subjects()) as connection:
        back = asyncio.Event()

        async def on_reconnect() -> None:
            back.set()

        connection.on_reconnect(on_reconnect)
        await mutual.restart_async()
        async with asyncio.timeout(20):
            await back.wait()
            await connection.api.call("INFO")


@pytest.mark.parametrize(
    ("ca", "cert", "says"),
    [
        ("", "", "certificate verify failed"),
        ("stranger", "client", "certificate verify failed"),
        ("server", "", "certificate required"),
        ("server", "stranger", "unknown ca"),
    ],
)
async def test_a_client_is_refused_soon_and_told_why(
    mutual: EmbeddedServer, files: Files, ca: str, cert: str, says: str
) -> None:
    async with asyncio.timeout(15):
        with pytest.raises(ConnectError, match=f"{says}|client certificate"):
            await Connection.connect(options(mutual, files, ca, cert), subjects=Subjects())


async def test_nothing_is_said_to_a_server_without_tls_when_tls_is_asked_for(nats_server: EmbeddedServer, files: Files) -> None:
    """A stranger in between could leave the offer of TLS out, and read the password."""
    ca = str(files["server"][0])
    for asked in (
        ConnectOptions(servers=(nats_server.url,), tls_ca=ca, user="u", password="p"),
        ConnectOptions(servers=(nats_server.url.replace("nats://", "tls://"),), user="u", password="p"),
    ):
        with pytest.raises(ConnectError, match="offers no TLS"):
            await Connection.connect(asked, subjects=Subjects())


async def test_a_renewed_certificate_is_used_without_a_restart_and_open_connections_stay(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path, name="first")
    first = tmp_path / "first.pem"
    first.write_bytes(cert.read_bytes())
    with EmbeddedServer(tmp_path / "nats", ServerSettings(tls_cert=str(cert), tls_key=str(key))) as server:
        pid = server.pid
        old, new = (ConnectOptions(servers=(server.url,), tls_ca=str(path)) for path in (first, cert))
        async with await Connection.connect(old, subjects=Subjects()) as connection:
            since = connection.connected_since_s
            write_certificate(tmp_path, name="second")
            server.reload()
            async with asyncio.timeout(20):
                while True:
                    try:
                        async with await Connection.connect(new, subjects=Subjects()):
                            break
                    except ConnectError:
                        await asyncio.sleep(0.1)
            with pytest.raises(ConnectError, match="certificate verify failed"):
                await Connection.connect(old, subjects=Subjects())
            await connection.api.call("INFO")
            assert (connection.connected, connection.connected_since_s, server.pid) == (True, since, pid)
