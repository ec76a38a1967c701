"""Fixtures shared by all tests: one real nats-server for the run, a fresh prefix for every test.

`own_server` is for tests that kill or restart their server. Everything else shares `nats_server`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import pytest_asyncio
import pytest_timeout
import structlog
from httpx._transports import default as http_transports
from hypothesis import settings as searching

from headrace.frontend.prompts import text_encoder
from headrace.frontend.prompts.text_encoder import TextEncoder
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.provision import ensure_topology, remove_topology
from headrace.jetstream.settings import ServerSettings
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from headrace.workers.sim.tokens import BUNDLED_TOKENIZER
from headrace.workers.tokens import TokenTable
from tests.support import examples
from tests.support.moved_seeds import MOVED_SEED

collect_ignore = ["clients"]  # they have an environment of their own: `make test-clients`

Connect = Callable[..., Awaitable[Connection]]

_numbers = itertools.count(1)
_configure = structlog.configure


def _configure_for_one_test(*args: Any, **options: Any) -> None:
    """A command that a test runs in this process configures logging to what the test captures. Loggers must not keep that
    once the test is over, as `cache_logger_on_first_use` would make them."""
    _configure(*args, **{**options, "cache_logger_on_first_use": False})


structlog.configure = _configure_for_one_test

for _processor in structlog.get_config()["processors"]:
    if isinstance(_processor, structlog.dev.ConsoleRenderer):  # painting a traceback takes a tenth of a second each
        _processor.exception_formatter = structlog.dev.plain_traceback

_load_table = TokenTable.load
_bundled_table = functools.cache(lambda: _load_table(BUNDLED_TOKENIZER))


def _load_table_once(tokenizer_dir: str | Path) -> TokenTable:
    """Every worker works out the same table, which nobody can change; here hundreds of workers start in one process."""
    return _bundled_table() if Path(tokenizer_dir) == BUNDLED_TOKENIZER else _load_table(tokenizer_dir)


mock.patch.object(TokenTable, "load", _load_table_once).start()

_use_fast_tokenizer = TextEncoder.use_fast_tokenizer
_fast_tokenizers: dict[Any, Any] = {}


def _use_fast_tokenizer_once(encoder: TextEncoder) -> None:
    """Threads may share it, and so may the frontends of all tests: the bundled one takes half a second, hundreds are small."""
    library = getattr(text_encoder.fastokens, "Tokenizer", None)  # a test may put another one there
    kind = (library, encoder._json, tuple(encoder.added))
    if kind in _fast_tokenizers:
        encoder._fast = _fast_tokenizers[kind]
        return
    _use_fast_tokenizer(encoder)
    if encoder.fast:
        _fast_tokenizers[kind] = encoder._fast


mock.patch.object(TextEncoder, "use_fast_tokenizer", _use_fast_tokenizer_once).start()

# every client reads all certificates of the world for connections that none of them makes
mock.patch.object(http_transports, "create_ssl_context", functools.cache(http_transports.create_ssl_context)).start()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if searching.get_current_profile_name() == examples.FAST:
        examples.shorten(items)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What has been imported by now stays: the collector need not look through it again (user time of the unit tests -5 %)."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name the tables of `tests/simulation` whose seeds show nothing any more."""
    passed = terminalreporter.stats.get("passed", [])
    moved = [told for report in passed for key, told in getattr(report, "user_properties", ()) if key == MOVED_SEED]
    if moved:
        terminalreporter.section("seeds that have moved")
        for told in moved:
            terminalreporter.line(told)


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Whatever a test configures ends with it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    if structlog.is_configured():
        structlog.reset_defaults()
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.captureWarnings(False)


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server that must not be stopped."""
    # Streams set their bytes aside, and tests make many.
    settings = ServerSettings(max_file_store="100TB")
    with EmbeddedServer(tmp_path_factory.mktemp("nats"), settings) as server:
        yield server


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give a second try its whole time: pytest-timeout sets one timer for all tries of a test."""
    if getattr(item, "execution_count", 1) > 1:
        settings = pytest_timeout._get_item_settings(item)
        if settings.timeout and not settings.func_only:
            item.ihook.pytest_timeout_cancel_timer(item=item)
            item.ihook.pytest_timeout_set_timer(item=item, settings=settings)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server of this test's own, to be killed and restarted."""
    with EmbeddedServer(tmp_path / "nats") as server:
        yield server


@pytest.fixture
def prefix() -> str:
    """Unlike any other prefix of this run."""
    return f"t{os.getpid()}x{next(_numbers)}"


@pytest.fixture
def subjects(prefix: str) -> Subjects:
    return Subjects(prefix)


@pytest_asyncio.fixture
async def connect(request: pytest.FixtureRequest, subjects: Subjects) -> AsyncIterator[Connect]:
    """`await connect(server=..., topology=...)`: more connections, closed at the end of the test.

    The default server is the shared one. A topology is made on the server when given.
    """
    async with contextlib.AsyncExitStack() as stack:

        async def make(server: EmbeddedServer | None = None, *, topology: Topology | None = None) -> Connection:
            url = (server or request.getfixturevalue("nats_server")).url
            made = await Connection.connect(ConnectOptions(servers=(url,), name="test"), subjects=subjects)
            await stack.enter_async_context(made)
            if topology is not None:
                await ensure_topology(made, topology)
                made.on_reconnect(lambda: ensure_topology(made, topology))  # as every process does
            return made

        yield make


@pytest_asyncio.fixture
async def connection(nats_server: EmbeddedServer, subjects: Subjects) -> AsyncIterator[Connection]:
    """A connection to the shared server, with the whole topology under this test's prefix."""
    topology = Topology(subjects)
    async with await Connection.connect(ConnectOptions(servers=(nats_server.url,), name="test"), subjects=subjects) as made:
        await ensure_topology(made, topology)
        yield made
        with contextlib.suppress(JetStreamError):
            await remove_topology(made, topology)
