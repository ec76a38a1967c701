"""TLS of the HTTP server: one context, into which a new certificate is loaded when its files have changed."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import structlog

from headrace.frontend.errors import CertificateUnusable

log = structlog.get_logger()

LOOK_S = 2.0


class ServerTls:
    """The certificate of a server, from PEM files. `key_file` may be the certificate's own file."""

    def __init__(self, cert_file: str, key_file: str | None = None) -> None:
        """Load the certificate. Raises CertificateUnusable naming the files."""
        self._cert = Path(cert_file).expanduser()
        self._key = Path(key_file or cert_file).expanduser()
        self.context = _new_context()
        self._seen = self._stamp()
        self._load()

    async def watch(self) -> None:
        """Load the certificate again whenever its files have changed, until cancelled.

        Connections that are open keep theirs. A certificate that cannot be loaded is logged, and the old one stays.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Load the certificate again if its files have changed since it was loaded or tried."""
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._load()
        except CertificateUnusable as error:
            log.warning("tls.not_reloaded", error=str(error))
        else:
            log.info("tls.reloaded", cert=str(self._cert))

    def _load(self) -> None:
        try:
            _new_context().load_cert_chain(self._cert, self._key)  # a pair that does not fit must not reach the one in use
            self.context.load_cert_chain(self._cert, self._key)
        except (OSError, ssl.SSLError) as error:
            why = str(error) if isinstance(error, ssl.SSLError) else error.strerror
            raise CertificateUnusable(f"the certificate {self._cert} with the key {self._key} cannot be used: {why}") from None

    def _stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(path) for path in (self._cert, self._key))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _new_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context
