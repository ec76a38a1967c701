"""Fetches the bytes of a URL. Names are resolved once, every address is checked, and redirects get the same checks."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cache
from urllib.parse import urljoin

import structlog

from headrace.frontend.media.addresses import PORTS, Forbidden, Target, check_address, parse_url
from headrace.frontend.media.client import FetchedBody, FetchFailed, NoAnswer, get

log = structlog.get_logger()

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Resolves (host, port) to addresses. Raises OSError."""

MOVED = frozenset({301, 302, 303, 307, 308})
TRIED_ADDRESSES = 2  # at most, per host


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """The limits of a fetch.

    `domains`: fetch only from these and their subdomains; empty = from all. `private`: allow addresses that are not public.
    """

    max_bytes: int
    timeout_s: float  # of the whole fetch: waiting for a slot, names, redirects, the last byte
    redirects: int = 3
    domains: Sequence[str] = ()
    private: bool = False
    any_port: bool = False  # fetch from ports other than those of the web, too

    @property
    def tells_why(self) -> bool:
        """Return True if clients may know why a host gives no answer.

        Where they choose any host it would tell them which names and ports there are inside the operator's network.
        """
        return self.private or bool(self.domains)


def system_resolver(executor: Executor) -> Resolve:
    """Return the system's resolver, run in its own threads, so that a slow name server does not block other work."""

    def look_up(host: str, port: int) -> list[str]:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    async def resolve(host: str, port: int) -> Sequence[str]:
        return await asyncio.get_running_loop().run_in_executor(executor, look_up, host, port)

    return resolve


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


class Fetcher:
    """Fetches up to `at_once` URLs at the same time."""

    def __init__(self, limits: FetchLimits, resolve: Resolve, *, at_once: int, tls: ssl.SSLContext | None = None) -> None:
        self._limits = limits
        self._resolve = resolve
        self._places = asyncio.Semaphore(at_once)
        self._tls_context = tls

    async def fetch(self, url: str, check_start: Callable[[bytes], None]) -> bytes:
        """Fetch a URL. `check_start` gets the first bytes and may raise FetchFailed.

        Raises Forbidden, FetchFailed, TimeoutError.
        """
        async with asyncio.timeout(self._limits.timeout_s), self._places:
            scheme = ""
            for _ in range(self._limits.redirects + 1):
                target = parse_url(url, self._limits.domains)
                self._check_port(target)
                if scheme == "https" and target.scheme == "http":
                    raise Forbidden(f"a redirect from https to http, to {target.host}, is not followed")
                scheme = target.scheme
                try:
                    answer = await self._get(target, check_start)
                except NoAnswer as error:
                    raise self._told(target, error) from None
                if answer.status == 200:
                    return answer.body()
                if answer.status not in MOVED:
                    raise FetchFailed(f"{target.host} answers with status {answer.status}")
                if "location" not in answer.headers:
                    raise FetchFailed(f"{target.host} redirects to nowhere")
                url = urljoin(url, answer.headers["location"])
            raise FetchFailed(f"more than {self._limits.redirects} redirects")

    def _told(self, target: Target, error: NoAnswer) -> NoAnswer:
        """Return the error as the client gets it."""
        if self._limits.tells_why:
            return error
        log.info("media.no_answer", host=target.host, reason=str(error))
        return NoAnswer(f"{target.host} gives no answer that can be used")

    def _check_port(self, target: Target) -> None:
        """Raise Forbidden for a port that is none of the web's, or requests could be used to scan the ports of others."""
        if target.port not in PORTS.values() and not self._limits.any_port:
            raise Forbidden(f"port {target.port} of {target.host} is not fetched from, only 80 and 443")

    async def _get(self, target: Target, check_start: Callable[[bytes], None]) -> FetchedBody:
        tls = (self._tls_context or await asyncio.to_thread(_tls)) if target.scheme == "https" else None
        limit = self._limits.max_bytes
        failed: FetchFailed = NoAnswer(f"{target.host} has no address")
        for address in await self._addresses(target):
            try:
                return await get(target, address, tls=tls, limit=limit, check_start=check_start)
            except FetchFailed as error:
                failed = type(error)(f"{target.host}: {error}")
                if not error.unreachable:
                    raise failed from None
        raise failed

    async def _addresses(self, target: Target) -> Sequence[str]:
        """Return the addresses to try. A name with any private address is refused, as an attack on this check."""
        if target.is_address:
            addresses: Sequence[str] = [target.host]
        else:
            try:
                addresses = await self._resolve(target.host, target.port)
            except (OSError, UnicodeError):
                raise NoAnswer(f"{target.host} cannot be resolved") from None
        if not self._limits.private:
            for address in addresses:
                try:
                    check_address(address)
                except Forbidden as error:
                    if target.is_address:
                        raise
                    why = f"{target.host} is not at a public address"  # and not which address
                    raise (Forbidden(why) if self._limits.tells_why else NoAnswer(why)) from error
        return addresses[:TRIED_ADDRESSES]
