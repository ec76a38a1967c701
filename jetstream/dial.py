"""The first connection to a server, with one typed error for each failure, and checks of its version, JetStream and
permissions.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import structlog

from headrace.jetstream.api import JsApi
from headrace.jetstream.context import ConnectOptions
from headrace.jetstream.errors import (
    AccessDenied,
    ConnectError,
    JetStreamDisabled,
    JetStreamError,
    ServerTooOld,
    ServerUnreachable,
)
from headrace.jetstream.raw_client import CoreClient
from headrace.jetstream.raw_client import errors as nats_errors

log = structlog.get_logger(__name__)

OLDEST_SERVER = (2, 11)
# The least patch of each release line without a published way around permissions; lines that are not listed are newer.
# Up to 2.11.0 a user of one account could administer another's JetStream (CVE-2025-30215); a restore and a subscription to a
# queue could pass a denial until the others.
SAFE_PATCHES = {(2, 11): 16, (2, 12): 7, (2, 13): 99, (2, 14): 3}
RESET_TRIES = 4
RECONNECT_WAIT_S = 0.25
PING_INTERVAL_S = 5
CLUSTER_PING_INTERVAL_S = 1  # a frozen server is left after two unanswered pings: there is another one to go to
PINGS_OUTSTANDING = 2
CLOSE_S = 4.0  # the end of the socket has two seconds of them


async def dial(options: ConnectOptions) -> CoreClient:
    """Return a connected client that reconnects without limit.

    Raises ServerUnreachable, AccessDenied, or ConnectError for unusable options.
    """
    for _ in range(RESET_TRIES - 1):
        try:
            return await _dial_once(options)
        except ServerUnreachable as error:
            # A server that refuses sends the reason and closes. When the close overtakes the reason, only a reset arrives.
            if not isinstance(error.__cause__, ConnectionResetError):
                raise
            await asyncio.sleep(RECONNECT_WAIT_S / 5)
    return await _dial_once(options)


async def _dial_once(options: ConnectOptions) -> CoreClient:
    core = CoreClient()
    core.tls_only = options.wants_tls
    refusals: list[Exception] = []  # errors before the connection is made
    dialled = False

    async def on_error(error: Exception) -> None:
        if dialled:
            core.on_error(str(error) or type(error).__name__)
        else:
            refusals.append(error)

    async def on_restored() -> None:
        if dialled:
            core.on_restored()

    async with given_up_on_error(core, options, refusals):
        async with asyncio.timeout(options.connect_timeout_s):
            await core.connect(
                **options.client_arguments(),
                error_cb=on_error,
                reconnected_cb=on_restored,
                # A first connection fails at once with its reason; only a connection that was up is retried without limit.
                allow_reconnect=False,
                max_reconnect_attempts=1,
                connect_timeout=options.connect_timeout_s,
                reconnect_time_wait=RECONNECT_WAIT_S,
                ping_interval=CLUSTER_PING_INTERVAL_S if len(options.servers) > 1 else PING_INTERVAL_S,
                max_outstanding_pings=PINGS_OUTSTANDING,
                pending_size=0,  # our own limit applies (core.PENDING_SIZE); this one would block the senders
                skip_subject_validation=True,  # subjects are built by headrace.jetstream.subjects, which validates every token
            )
        core.options["allow_reconnect"] = True
        core.options["max_reconnect_attempts"] = -1
        core.set_server_pool(list(options.servers))
        dialled = True
    return core


@contextlib.asynccontextmanager
async def given_up_on_error(
    core: CoreClient, options: ConnectOptions, refusals: list[Exception] | None = None
) -> AsyncIterator[None]:
    """Close the client if the body fails, and raise ConnectError with the last entry of `refusals` as the reason, if any."""
    try:
        yield
    except ConnectError:
        await abandon(core)
        raise
    except (OSError, TimeoutError, nats_errors.Error, JetStreamError, ValueError) as error:
        await abandon(core)
        why = refusals[-1] if refusals else error
        raise _connect_error(options, why) from why
    except BaseException:
        await abandon(core)
        raise


async def check_server(info: Mapping[str, Any], api: JsApi, options: ConnectOptions) -> None:
    """Check the server's version, JetStream and permissions. Raises ServerTooOld, JetStreamDisabled, AccessDenied."""
    version = str(info.get("version", "0"))
    if _version(version) < OLDEST_SERVER:
        raise ServerTooOld(f"the NATS server at {options.address} is {version}, Headrace needs 2.11 or newer")
    if (safe := safer_version(version)) is not None:
        log.warning("server.bypasses_known", address=options.address, version=version, safe=safe)
    if not info.get("jetstream", False):
        raise JetStreamDisabled(f"the NATS server at {options.address} runs without JetStream: start it with -js")
    try:
        await api.call("INFO", timeout_s=options.connect_timeout_s)
    except JetStreamDisabled as error:
        raise JetStreamDisabled(f"the account used at {options.address} has no JetStream: {error}") from None
    except AccessDenied as error:
        raise AccessDenied(f"the user at {options.address} lacks a permission: {error}") from None


def safer_version(version: str) -> str | None:
    line = _version(version)
    least = SAFE_PATCHES.get(line)
    patch = version.lstrip("v").split("-")[0].split(".")[2:3]
    if least is None or (patch and patch[0].isdigit() and int(patch[0]) >= least):
        return None
    return f"{line[0]}.{line[1]}.{least} or 2.15" if least < 99 else "2.15"


async def abandon(core: CoreClient) -> None:
    """Close the client, so that it does not reconnect. A server that no longer reads does not delay this."""
    await core.stop_reconnecting()
    try:
        async with asyncio.timeout(CLOSE_S):
            await core.close()
    except (OSError, nats_errors.Error, TimeoutError) as error:
        core.cut()
        log.info("connection.cut", error=str(error) or type(error).__name__)


def _version(text: str) -> tuple[int, int]:
    parts = text.lstrip("v").split("-")[0].split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (ValueError, IndexError):
        return (0, 0)


def _connect_error(options: ConnectOptions, error: Exception) -> ConnectError:
    text = (str(error) or type(error).__name__).replace("nats: ", "").strip("'")
    if isinstance(error, nats_errors.AuthorizationError) or "authorization" in text.lower() or "authentication" in text.lower():
        if any((options.user, options.token, options.credentials, options.nkey_seed)):
            return AccessDenied(f"the NATS server at {options.address} refused the credentials: {text}")
        return AccessDenied(
            f"the NATS server at {options.address} asks for a login ({text}) and none was given or found: name a context "
            "(nats.context), of a `headrace up` one of <data-dir>/nats/logins, or its data folder (data_dir)"
        )
    if isinstance(error, AccessDenied):
        return AccessDenied(f"the user at {options.address} lacks a permission: {text}")
    if isinstance(error, (BrokenPipeError, ConnectionResetError)) and options.wants_tls:
        # a write failed before the server's alert was read, which would say why
        text += "; the server may want a client certificate, or another one"
    return ServerUnreachable(f"no NATS server answers at {options.address}: {text}")


DEFAULT_PORT = 4222


async def address_of_route(servers: Sequence[str]) -> str:
    """Return the local address of the route to the first reachable server. Nothing is sent.

    It is where others reach this machine. Raises ServerUnreachable if there is no route.
    """
    loop = asyncio.get_running_loop()
    why: list[str] = []
    for server in servers:
        url = urlsplit(server if "://" in server else f"nats://{server}")
        try:
            found = await loop.getaddrinfo(url.hostname, url.port or DEFAULT_PORT, type=socket.SOCK_DGRAM)
        except (OSError, ValueError) as error:
            why.append(f"{server}: {error}")
            continue
        for family, kind, protocol, _, address in found:
            with suppress(OSError), socket.socket(family, kind, protocol) as route:
                route.connect(address)  # of a datagram socket: this asks the routing table and sends nothing
                return str(route.getsockname()[0])
        why.append(f"{server}: no route to it")
    raise ServerUnreachable(f"this machine has no address towards its NATS server: {'; '.join(why)}")
