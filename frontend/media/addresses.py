"""Decides which URLs and addresses this server may fetch from at a client's request. No I/O.

A request names a URL, and this process opens it from inside the operator's network. So only public addresses are allowed. The
check is made on the addresses after the name was resolved, because a name does not show where it leads.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

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
        """Return the value of the Host header."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == PORTS[self.scheme] else f"{name}:{self.port}"

    @property
    def is_address(self) -> bool:
        """Return True if the host is an IP address."""
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
