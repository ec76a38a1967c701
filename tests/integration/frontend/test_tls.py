"""HTTPS with a self-signed certificate, and a new one in its place while the server runs."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import httpx
import openai
import pytest

from headrace.frontend.errors import CertificateUnusable
from headrace.frontend.http import connections
from headrace.frontend.http.connections import ServerTls
from tests.support.certificates import write_certificate
from tests.support.frontend.fakes import MODEL
from tests.support.rude_server import post, running


def trusting(cert: Path) -> httpx.AsyncClient:
    return httpx.AsyncClient(verify=ssl.create_default_context(cafile=str(cert)))


async def test_the_openai_client_streams_over_https_and_plain_http_gets_nothing(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path)
    async with running(tls_cert=str(cert), tls_key=str(key)) as server, trusting(cert) as http:
        client = openai.AsyncOpenAI(
            base_url=f"https://localhost:{server.port}/v1", api_key="none", max_retries=0, http_client=http
        )
        messages = [{"role": "user", "content": "hi"}]
        stream = await client.chat.completions.create(model=MODEL, messages=messages, stream=True)  # type: ignore[call-overload]
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        assert text == "Hello world"
        assert not (await server.send(post({"model": MODEL}))).startswith(b"HTTP/1.1 200")
        with pytest.raises(httpx.ConnectError):
            await httpx.AsyncClient().get(f"https://localhost:{server.port}/live")


async def test_a_new_certificate_is_used_without_a_restart_and_a_broken_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LOOK_S", 0.02)
    cert, key = write_certificate(tmp_path)
    async with running(tls_cert=str(cert), tls_key=str(key)) as server:
        url = f"https://localhost:{server.port}/live"
        async with trusting(cert) as old:
            assert (await old.get(url)).status_code == 200
            write_certificate(tmp_path, name="second")
            async with asyncio.timeout(10):
                while True:
                    async with trusting(cert) as fresh:
                        try:
                            assert (await fresh.get(url)).status_code == 200
                            break
                        except httpx.ConnectError:
                            await asyncio.sleep(0.02)
            assert (await old.get(url)).status_code == 200, "an open connection goes on"
            good = cert.read_bytes()
            cert.write_bytes(b"no certificate")
            await asyncio.sleep(0.1)
            (tmp_path / "good.pem").write_bytes(good)
            async with trusting(tmp_path / "good.pem") as fresh:
                assert (await fresh.get(url)).status_code == 200


def test_a_certificate_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    _, other_key = write_certificate(other)
    for wrong in ((str(tmp_path / "none.pem"), None), (str(cert), None), (str(cert), str(other_key))):
        with pytest.raises(CertificateUnusable, match=r"\.pem"):
            ServerTls(*wrong)
    assert ServerTls(str(cert), str(key)).context.minimum_version == ssl.TLSVersion.TLSv1_2
