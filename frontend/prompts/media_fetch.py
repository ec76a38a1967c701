"""Fetches the bytes of a URL. Names are resolved once, every address is checked, and redirects get the same checks."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cache
from urllib.parse import quote, urljoin, urlsplit

import structlog

from headrace.base.http_client import BadAnswer, BodyTooLong, NoConnection, ask
from headrace.frontend.prompts.media_parts import HEAD

# Decides which URLs and addresses this server may fetch from at a client's request. No I/O.
#
# A request names a URL, and this process opens it from inside the operator's network. So only public addresses are allowed.
# The check is made on the addresses after the name was resolved, because a name does not show where it leads.

MAX_URL = 8192  # characters
PORTS = {"http": 80, "https": 443}

_FORBIDDEN = re.compile(r"[\x00-\x20\x7f\\]")  # urlsplit would drop some of these silently
_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*\.?\Z")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_NOT_PUBLIC = (  # networks that the standard library treats as public
    ipaddress.ip_network("168.63.129.16/32"),  # internal services of one cloud
    ipaddress.ip_network("192.0.0.0/24"),
    ipaddress.ip_network("64:ff9b:1::/48"),
)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Forbidden(ValueError):
    """The URL or the address is not allowed. The message has the reason."""


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of a URL. `host` is lower-case ASCII; an address is in its usual spelling."""

    scheme: str
    host: str
    port: int
    path: str  # with the query, percent-encoded

    @property
    def host_header(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == PORTS[self.scheme] else f"{name}:{self.port}"

    @property
    def is_address(self) -> bool:
        return _address(self.host) is not None


def parse_url(url: str, domains: Sequence[str] = ()) -> Target:
    """Parse a URL. Raises Forbidden unless it is a plain http or https URL, and, with `domains`, in one of these."""
    if len(url) > MAX_URL:
        raise Forbidden(f"a URL of {len(url)} characters; at most {MAX_URL} are taken")
    if _FORBIDDEN.search(url):
        raise Forbidden("the URL has blanks, control characters or backslashes in it")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise Forbidden(f"not a URL: {error}") from None
    if parts.scheme not in PORTS:
        raise Forbidden(f"scheme {parts.scheme[:20]!r} is not taken, only http, https and data")
    if parts.username is not None or parts.password is not None:
        raise Forbidden("a URL with a user name or password in it is not taken")
    if not host or port == 0:
        raise Forbidden("the URL names no host")
    host = _host(host)
    if domains and not any(host == domain or host.endswith("." + domain) for domain in domains):
        raise Forbidden(f"{host} is not among the allowed domains: {', '.join(domains)}")
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    if parts.query:
        path += "?" + quote(parts.query, safe="/%:@!$&'()*+,;=~-._?")
    return Target(parts.scheme, host, port or PORTS[parts.scheme], path)


def _host(host: str) -> str:
    address = _address(host)
    if address is not None:
        return str(address)
    if ":" in host:
        raise Forbidden(f"{host[:100]!r} is not an address")
    try:
        # the resolver accepts decimal, octal, hexadecimal and short forms of addresses, so they are parsed here
        return str(ipaddress.IPv4Address(socket.inet_aton(host)))
    except (OSError, ValueError):
        pass
    try:
        name = host if host.isascii() else host.encode("idna").decode("ascii")
    except UnicodeError:
        raise Forbidden(f"{host[:100]!r} is not a host name") from None
    name = name.lower()
    if not _NAME.match(name):
        raise Forbidden(f"{host[:100]!r} is not a host name")
    return name.removesuffix(".")


def _address(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def check_address(text: str) -> None:
    """Raise Forbidden unless this is a public unicast address, also inside IPv6 forms that contain an IPv4 address."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        raise Forbidden(f"{text[:100]!r} is not an address") from None
    for part in _destinations(address):
        if not part.is_global or part.is_multicast or part.is_reserved or any(part in network for network in _NOT_PUBLIC):
            raise Forbidden(f"{address} is not a public address")


def _destinations(address: Address) -> list[Address]:
    """Return the addresses that a packet may reach: for most forms that contain an IPv4 address, only that one."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if address in _NAT64:
        return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    carried = [address.sixtofour, *(address.teredo or ())]
    return [address, *(part for part in carried if part is not None)]


# A single GET over one connection to the address that was checked, under the name that was asked for, with every size bounded.

MAX_HEADER = 32 * 1024  # bytes of a header
MAX_HEADERS = 200


class FetchFailed(Exception):
    """The fetch failed. The message has the reason. `unreachable`: another address may work."""

    unreachable = False


class NoAnswer(FetchFailed):
    """The host has no address, takes no connection, or does not answer in HTTP."""


class Unreachable(NoAnswer):
    """No connection to this address could be made."""

    unreachable = True


class TooLarge(FetchFailed):
    """The body exceeds the limit."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """An answer. `body` is empty unless the status is 200."""

    status: int
    headers: dict[str, str]
    body: bytes = b""


async def get(
    target: Target, address: str, *, tls: ssl.SSLContext | None, limit: int, check_start: Callable[[bytes], None]
) -> Fetched:
    """Fetch `target` from `address`. Only the body of a 200 is read.

    With `tls` the certificate must be that of the target's host, for any address. `check_start` gets the first bytes and may
    raise. The caller sets the deadline. Raises FetchFailed.
    """
    in_body = False
    url = f"{target.scheme}://{target.host_header}{target.path}"
    headers = {"Accept": "*/*", "Accept-Encoding": "identity"}
    try:
        async with ask("GET", url, headers=headers, tls=tls, address=address) as answer:
            in_body = True
            if len(answer.headers) > MAX_HEADERS or any(len(one) > MAX_HEADER for one in answer.headers.values()):
                raise FetchFailed("it sends too many headers")
            if answer.status != 200:
                return Fetched(answer.status, answer.headers)
            encoding = answer.headers.get("content-encoding", "identity").lower()
            if encoding != "identity":
                raise FetchFailed(f"it sends content-encoding {encoding[:50]!r} though only identity was asked for")
            return Fetched(200, answer.headers, await answer.body(limit, start=HEAD, check=check_start))
    except NoConnection as error:
        cause = error.__cause__
        if isinstance(cause, ssl.SSLError):
            raise Unreachable(f"no trusted connection: {cause.reason or cause}") from None
        raise Unreachable(f"no connection: {type(cause).__name__}") from None
    except BodyTooLong as error:
        raise TooLarge(str(error)) from None
    except BadAnswer as error:
        raise (FetchFailed if in_body else NoAnswer)(f"its answer is not complete, or not HTTP: {error}") from None
    except OSError as error:
        raise NoAnswer(f"the connection broke: {type(error).__name__}") from None


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
                    return answer.body
                if answer.status not in MOVED:
                    raise FetchFailed(f"{target.host} answers with status {answer.status}")
                if "location" not in answer.headers:
                    raise FetchFailed(f"{target.host} redirects to nowhere")
                url = urljoin(url, answer.headers["location"])
            raise FetchFailed(f"more than {self._limits.redirects} redirects")

    def _told(self, target: Target, error: NoAnswer) -> NoAnswer:
        if self._limits.tells_why:
            return error
        log.info("media.no_answer", host=target.host, reason=str(error))
        return NoAnswer(f"{target.host} gives no answer that can be used")

    def _check_port(self, target: Target) -> None:
        """Raise Forbidden for a port that is none of the web's, or requests could be used to scan the ports of others."""
        if target.port not in PORTS.values() and not self._limits.any_port:
            raise Forbidden(f"port {target.port} of {target.host} is not fetched from, only 80 and 443")

    async def _get(self, target: Target, check_start: Callable[[bytes], None]) -> Fetched:
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
