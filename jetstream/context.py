"""Connection options of a NATS server, and contexts of the `nats` command line tool (ADR-21)."""

import hashlib
import hmac
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from headrace.base.setting import Setting
from headrace.jetstream.errors import ConnectError

if TYPE_CHECKING:
    import ssl

DEFAULT_URL = "nats://127.0.0.1:4222"
DEFAULT_INBOX = "_INBOX"
API = "$JS.API"
SCHEMES = ("nats", "tls")


@dataclass(frozen=True, slots=True)
class ConnectOptions:
    """Server address and credentials. Paths may start with `~`."""

    servers: tuple[str, ...] = (DEFAULT_URL,)
    name: str | None = None
    user: Annotated[str | None, Setting("User name.", "--nats-user")] = None
    password: Annotated[
        str | None, Setting("Password; prefer the environment or the file to the command line.", secret=True)
    ] = None
    token: Annotated[str | None, Setting("Token.", secret=True)] = None
    credentials: Annotated[str | None, Setting("Credentials file (.creds).", "--nats-credentials", kind="path")] = None
    nkey_seed: Annotated[str | None, Setting("NKey seed file.", "--nats-nkey-seed", kind="path")] = None
    tls_ca: Annotated[str | None, Setting("CA certificate of the server, PEM.", "--nats-tls-ca", kind="path")] = None
    tls_cert: Annotated[str | None, Setting("Client certificate, PEM.", "--nats-tls-cert", kind="path")] = None
    tls_key: Annotated[str | None, Setting("Client key, PEM.", "--nats-tls-key", kind="path")] = None
    tls_first: Annotated[bool, Setting("TLS handshake before the server's greeting.", "--nats-tls-first")] = False
    inbox_prefix: Annotated[
        str | None, Setting("Subject prefix for replies, if permissions require one.", "--nats-inbox-prefix")
    ] = None  # None = DEFAULT_INBOX
    js_prefix: Annotated[
        str | None,
        Setting("Prefix of the JetStream API for this login, if not $JS.API.", "--nats-js-prefix"),
    ] = None  # None = that of an account with JetStream
    steward: Annotated[str | None, Setting("Subject for requesting consumers, for a login that may not create them.")] = None
    worker: Annotated[
        str | None,
        Setting("Id of the only worker that may use this login, or * for any of its pool."),
    ] = None
    asked: Annotated[Sequence[str], Setting("Patterns of further JetStream API calls to request there.")] = ()
    card_key: Annotated[
        str | None,
        Setting(
            "File with the key of model cards, unless the part's own setting names one. Contexts of logins set it.",
            kind="path",
        ),
    ] = None
    pool_key: Annotated[
        str | None,
        Setting(
            "Secret of the login's pool, part of the names that its workers share. Contexts of logins set it.",
            secret=True,
        ),
    ] = None
    pools_key: Annotated[
        str | None, Setting("Secret from which a login for all pools derives the secrets of single pools.", secret=True)
    ] = None
    replicas: Annotated[
        int,
        Setting(
            "Copies of every stream, bucket and object store in a cluster; an odd number, at most its servers. "
            "Existing streams are changed. 0: unchanged, new ones with one copy.",
            "--nats-replicas",
            least=0,
            most=5,
        ),
    ] = 0
    connect_timeout_s: Annotated[
        float, Setting("Longest wait for one connection attempt.", "--nats-connect-timeout", least=0.1, most=300)
    ] = 5.0

    def __post_init__(self) -> None:
        if not self.servers:
            raise ConnectError("no NATS server address given")
        for server in self.servers:
            scheme, separator, _ = server.partition("://")
            if separator and scheme not in SCHEMES:
                raise ConnectError(f"a NATS server is reached at nats:// or tls://, not as in {_without_secret(server)}")
        if not self.inbox.startswith(DEFAULT_INBOX):
            raise ConnectError(f"the prefix of inboxes must begin with {DEFAULT_INBOX}, got {self.inbox_prefix!r}")
        if self.replicas in (2, 4):
            raise ConnectError(f"{self.replicas} copies outlast no more servers than {self.replicas - 1}: give an odd number")
        if not self.connect_timeout_s > 0:
            raise ConnectError(f"the connect timeout must be positive, got {self.connect_timeout_s!r}")

    @property
    def inbox(self) -> str:
        return self.inbox_prefix or DEFAULT_INBOX

    @property
    def js_api(self) -> str:
        return self.js_prefix or API

    def secret_of(self, pool: str) -> str:
        """Return the secret that the workers of this pool share, empty without logins."""
        return self.pool_key or (pool_key(self.pools_key, pool) if self.pools_key else "")

    @property
    def wants_tls(self) -> bool:
        return bool(self.tls_ca or self.tls_cert or self.tls_first or any(s.startswith("tls://") for s in self.servers))

    @property
    def address(self) -> str:
        """The server addresses without passwords, for messages."""
        return ", ".join(_without_secret(s) for s in self.servers)

    @classmethod
    def from_context(cls, name_or_path: str | None = None, *, name: str | None = None) -> "ConnectOptions":
        """Read a context saved by `nats context save`: by name, by path, or the selected one. Raises ConnectError."""
        path = context_path(name_or_path)
        try:
            values = json.loads(path.read_text())
        except FileNotFoundError:
            raise ConnectError(f"there is no NATS context file {path}") from None
        except (OSError, ValueError) as error:
            raise ConnectError(f"the NATS context {path} cannot be read: {error}") from error
        return parse_context(values, where=str(path), name=name)

    def tls_context(self) -> "ssl.SSLContext | None":
        """Return the TLS context, or None without TLS options; the address may still ask for TLS by `tls://`.

        Raises ConnectError for files that cannot be loaded.
        """
        if not (self.tls_ca or self.tls_cert or self.tls_first):
            return None
        import ssl

        try:
            context = ssl.create_default_context(cafile=_expand(self.tls_ca))
            if self.tls_cert:
                context.load_cert_chain(_expand(self.tls_cert) or "", _expand(self.tls_key))
        except (OSError, ssl.SSLError) as error:
            raise ConnectError(f"the TLS files cannot be loaded (ca {self.tls_ca}, cert {self.tls_cert}): {error}") from error
        return context

    def client_arguments(self) -> dict[str, Any]:
        """Return these options under the names that nats-py uses. Raises ConnectError for a missing file."""
        for what, path in (("credentials", self.credentials), ("nkey seed", self.nkey_seed)):
            if path is not None and not Path(_expand(path) or "").is_file():
                raise ConnectError(f"the {what} file {path} does not exist")
        arguments: dict[str, Any] = {
            "servers": list(self.servers),
            "name": self.name,
            "user": self.user,
            "password": self.password,
            "token": self.token,
            "user_credentials": _expand(self.credentials),
            "nkeys_seed": _expand(self.nkey_seed),
            "tls": self.tls_context(),
            "tls_handshake_first": self.tls_first,
            "inbox_prefix": self.inbox,
        }
        return {k: v for k, v in arguments.items() if v is not None}


def pool_key(pools_key: str, pool: str) -> str:
    return hmac.new(pools_key.encode(), pool.encode(), hashlib.sha256).hexdigest()[:32]


def context_path(name_or_path: str | None) -> Path:
    """Return the file of a context. Raises ConnectError when none is named and none is selected."""
    if name_or_path and ("/" in name_or_path or name_or_path.endswith(".json")):
        return Path(name_or_path).expanduser()
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "nats"
    if not name_or_path:
        try:
            name_or_path = (home / "context.txt").read_text().strip()
        except OSError:
            name_or_path = ""
        if not name_or_path:
            raise ConnectError("no NATS context is named and none is selected")
    return home / "context" / f"{name_or_path}.json"


def parse_context(values: Any, *, where: str, name: str | None = None) -> ConnectOptions:
    """Convert a context to options. Fields that Headrace does not use are ignored. Raises ConnectError for a wrong type."""
    if not isinstance(values, dict):
        raise ConnectError(f"the NATS context {where} is no JSON object")

    def text(key: str) -> str | None:
        value = values.get(key)
        if value is not None and not isinstance(value, str):
            raise ConnectError(f"the NATS context {where} has a {key} that is no string: {value!r}")
        return value or None

    asked = values.get("headrace_asked", [])
    if not isinstance(asked, list) or not all(isinstance(call, str) for call in asked):
        raise ConnectError(f"the NATS context {where} has a headrace_asked that is no list of strings: {asked!r}")
    urls = tuple(u.strip() for u in (text("url") or DEFAULT_URL).split(",") if u.strip())
    return ConnectOptions(
        servers=urls,
        name=name,
        user=text("user"),
        password=text("password"),
        token=text("token"),
        credentials=text("creds"),
        nkey_seed=text("nkey"),
        tls_ca=text("ca"),
        tls_cert=text("cert"),
        tls_key=text("key"),
        tls_first=bool(values.get("tls_first", False)),
        inbox_prefix=text("inbox_prefix"),
        js_prefix=text("jetstream_api_prefix"),
        steward=text("headrace_steward"),
        worker=text("headrace_worker"),
        card_key=text("headrace_card_key"),
        pool_key=text("headrace_pool_key"),
        pools_key=text("headrace_pools_key"),
        asked=tuple(asked),
    )


def _expand(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser())


def _without_secret(url: str) -> str:
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
