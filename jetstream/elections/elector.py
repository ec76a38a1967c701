"""Watches the servers of a cluster, and calls the elections of what a server led that is gone.

It holds one connection to each server, as a user of the system account, and sends small messages from each to all. A server is
gone when its connection ends, when it answers nothing, or when no messages from most of the others arrive there. Then the
others are asked for their raft groups, over and over until all have leaders again; while none is gone nothing is asked. A
server that only this process does not reach answers by way of the others, and is left alone. Any number of electors may run;
one beside each server is meant.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence

import structlog

from headrace.jetstream.context import ConnectOptions
from headrace.jetstream.core import wire
from headrace.jetstream.core.natspy import errors as nats_errors
from headrace.jetstream.core.raw_client import CoreClient
from headrace.jetstream.dial import abandon, dial
from headrace.jetstream.elections import metrics
from headrace.jetstream.elections.overdue import Overdue
from headrace.jetstream.elections.raft_groups import (
    ASK_ACCOUNTS,
    ASK_GROUPS,
    OF_ACCOUNTS,
    RaftGroup,
    groups_of,
    parse_accounts,
    parse_groups,
    vote_request,
    vote_subject,
)
from headrace.jetstream.elections.reach import Reach
from headrace.jetstream.errors import AccessDenied, ConnectError, ServerUnreachable
from headrace.jetstream.tasks import TaskScope

log = structlog.get_logger(__name__)

PING_S = 0.15
SILENT_S = 0.5
LATE_S = 0.2  # of this process: answers may wait to be read
REDIAL_S = 0.25
DIAL_S = 1.0
LISTEN_S = 0.1  # also for a server that only the others reach
ANSWER_S = 0.6
LOOK_S = 0.1  # between two looks at the groups
OUTAGE_S = 20.0  # after which a server that is gone leads nothing any more
BACK_S = 5.0  # in which a server that is back may depose leaders, by the newer term of its own tries to be elected
FIRST_S = 30.0  # a cluster that starts as well takes some seconds
TOLD_S = 5.0
ACCOUNTS_S = 30.0  # between two looks at the accounts


class Elector:
    """The connections of an elector to the servers of one cluster."""

    def __init__(self, options: ConnectOptions) -> None:
        """`options`: a user without a password has an empty one, which servers that ask for no login may want of electors."""
        if options.user and options.password is None:
            options = dataclasses.replace(options, password="")
        self._options = options
        self._cores: dict[str, CoreClient] = {}  # by the name of the server
        self._gone: dict[str, float] = {}  # name → since when
        self._back_s = 0.0  # when the last of them came back
        self._looked_s = 0.0
        self._news = asyncio.Event()
        self._overdue = Overdue()
        self._reach = Reach(len(set(options.servers)))
        self._tasks = TaskScope()
        self._inbox = f"{options.inbox}.elector.{time.monotonic_ns()}"
        self._accounts: frozenset[str] = frozenset()
        self._accounts_read = 0.0
        self._asked = 0
        self._ready = False

    @property
    def ready(self) -> bool:
        """True while it would see that a server dies: it has heard of raft groups and is connected to a server."""
        return self._ready and bool(self._cores)

    @property
    def addresses(self) -> int:
        """The number of servers that it was given the addresses of."""
        return len(set(self._options.servers))

    @property
    def servers(self) -> list[str]:
        """The names of the servers that it is connected to."""
        return sorted(self._cores)

    async def run(self, ready: asyncio.Event | None = None) -> None:
        """Watch until cancelled. `ready` is set once it has heard of raft groups.

        Raises ServerUnreachable if no server answers at first, AccessDenied for a login outside the system account.
        """
        async with self._tasks:
            watches = [self._tasks.spawn(self._watch(url)) for url in dict.fromkeys(self._options.servers)]
            try:
                refusal = await self._refusal()
                self._ready = refusal is None
                if ready is not None and self._ready:
                    ready.set()
                while refusal is None:
                    await self._look()
            finally:
                for watch in watches:
                    watch.cancel()
        raise refusal

    async def _refusal(self) -> ConnectError | None:
        """Return why it cannot watch."""
        try:
            async with asyncio.timeout(FIRST_S):
                while not self._cores:
                    await asyncio.sleep(LISTEN_S)
        except TimeoutError:
            return ServerUnreachable(f"no NATS server takes this login at {self._options.address}")
        if await self._read_accounts(TOLD_S):
            return None
        return AccessDenied(
            f"the servers at {self._options.address} tell this login nothing of their raft groups: give one of their system "
            "account"
        )

    async def _watch(self, url: str) -> None:
        """Be connected to a server, and note when it is gone and when it is back."""
        options = dataclasses.replace(self._options, servers=(url,), connect_timeout_s=DIAL_S)
        while True:
            try:
                core = await dial(options)
            except ConnectError as error:
                log.debug("elector.not_connected", server=url, error=str(error))
                await asyncio.sleep(REDIAL_S)
                continue
            core.options["allow_reconnect"] = False  # so that its end is seen at once
            core.mark_up()
            name = str(core.info.get("server_name", ""))
            self._cores[name] = core
            self._reach.forget(name)
            self._note_back(name)
            try:
                await self._until_gone(name, core)
            finally:
                if self._cores.get(name) is core:
                    del self._cores[name]
                    self._reach.forget(name)
                    self._gone[name] = time.monotonic()
                    self._news.set()
                await abandon(core)

    async def _until_gone(self, name: str, core: CoreClient) -> None:
        """Return when the connection ended, or the server has answered nothing for too long."""
        down = asyncio.Event()
        core.on_down = down.set

        def arrived(_subject: bytes, _reply: bytes, data: bytes, _headers: bytes | None) -> None:
            self._reach.arrived(name, data.decode("utf-8", "replace"), time.monotonic())

        core.tap(f"{self._inbox}.reach", arrived)
        try:
            while core.up:
                core.send_now(wire.pub(f"{self._inbox}.reach", name.encode()))
                await _answered(core)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(down.wait(), PING_S)
        except (TimeoutError, nats_errors.Error):
            return

    def _note_cut_off(self) -> None:
        """Note servers that are cut off from most of the others, though not from here, and those that no longer are."""
        now = time.monotonic()
        cut_off = self._reach.cut_off(now, SILENT_S)
        for name in self._cores:
            if name in cut_off:
                self._gone.setdefault(name, now)
            else:
                self._note_back(name)

    def _note_back(self, name: str) -> None:
        if self._gone.pop(name, None) is not None:
            self._back_s = time.monotonic()
            log.info("elector.server_back", server=name)

    async def _look(self) -> None:
        """Wait for a server to be gone, then call what is due. Returns after one look."""
        now, before = time.monotonic(), self._looked_s
        if before and now - before > SILENT_S:  # this process stood still, and what has arrived waits to be read
            await asyncio.sleep(LISTEN_S)
        else:
            self._note_cut_off()
        self._count()
        self._looked_s = time.monotonic()
        if not any(now - since < OUTAGE_S for since in self._gone.values()) and now - self._back_s > BACK_S:
            metrics.LEADERLESS.set(0)
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), PING_S)
            if now - self._accounts_read > ACCOUNTS_S:
                await self._read_accounts(ANSWER_S)
            return
        answers = await self.groups()
        gone = [name for name in self._gone if name not in answers]
        calls = self._overdue.due(time.monotonic(), answers, gone)
        metrics.LEADERLESS.set(self._overdue.leaderless)
        if calls and (core := self._any()) is not None:
            log.warning("elector.called", gone=gone, groups=len(calls), answered=sorted(answers))
            metrics.CALLED.inc(len(calls))
            for call in calls:
                core.send_now(wire.pub(vote_subject(call.group), vote_request(call.term), reply=f"{self._inbox}.votes"))
        await asyncio.sleep(LOOK_S)
        self._looked_s = 0.0  # questions take their time

    def _count(self) -> None:
        metrics.ADDRESSES.set(self.addresses)
        metrics.CONNECTED.set(len(self._cores))
        metrics.GONE.set(len(self._gone))

    async def groups(self) -> dict[str, dict[str, RaftGroup]]:
        """Return the raft groups of each server that answers."""
        answers: dict[str, dict[str, RaftGroup]] = {}
        heard: Counter[str] = Counter()
        accounts = ("", *sorted(self._accounts))

        def read(data: bytes) -> None:
            if (answer := parse_groups(data)) is not None:
                heard[answer[0]] += 1
                answers.setdefault(answer[0], {}).update(answer[1])

        def whole() -> bool:
            return bool(answers) and all(heard[name] >= len(accounts) for name in self._cores if name not in self._gone)

        await self._ask(ASK_GROUPS, [groups_of(account) for account in accounts], read, whole, ANSWER_S)
        return answers

    async def _read_accounts(self, within_s: float) -> bool:
        """Learn in which accounts streams are. Return False if no server answers."""
        found: dict[str, frozenset[str]] = {}

        def read(data: bytes) -> None:
            if (answer := parse_accounts(data)) is not None:
                found[answer[0]] = answer[1]

        self._accounts_read = time.monotonic()
        await self._ask(ASK_ACCOUNTS, [OF_ACCOUNTS], read, lambda: bool(found) and self._cores.keys() <= found.keys(), within_s)
        if found:
            self._accounts = frozenset().union(*found.values())
        return bool(found)

    async def _ask(
        self,
        subject: str,
        questions: Sequence[bytes],
        read: Callable[[bytes], None],
        whole: Callable[[], bool],
        within_s: float,
    ) -> None:
        """Ask all servers; returns when the answers are whole, or after a while."""
        core = self._any()
        if core is None:
            return
        self._asked += 1
        inbox = f"{self._inbox}.{self._asked}"
        tap = core.tap(inbox, lambda _subject, _reply, data, _headers: read(data))
        try:
            for question in questions:
                core.send_now(wire.pub(subject, question, reply=inbox))
            began = time.monotonic()
            while (waited_s := time.monotonic() - began) < within_s:
                if waited_s >= LISTEN_S and whole():
                    break
                await asyncio.sleep(LISTEN_S / 4)
        finally:
            core.untap(tap)

    def _any(self) -> CoreClient | None:
        return next((core for name, core in self._cores.items() if core.up and name not in self._gone), None)


async def _answered(core: CoreClient) -> None:
    """Return once a server has answered. Raises TimeoutError, nats.errors.Error.

    It is asked again where this process itself stood still meanwhile.
    """
    while True:
        began = time.monotonic()
        try:
            return await core.barrier(SILENT_S)
        except TimeoutError:
            if time.monotonic() - began < SILENT_S + LATE_S:
                raise
