"""Reads what servers of a cluster say of their raft groups, and writes the message that has a group elect soon.

Every stream, bucket and consumer with copies is a raft group, and so is all of JetStream (`_meta_`). Its followers wait 4 to
9 s after the last message of a leader. A request for votes in a newer term ends that wait: a follower whose log is newer than
the asking one's refuses its vote, and campaigns itself within 0.1 to 0.8 s. The message written here asks for the votes of an
empty log, so no member with a log grants it, and what is stored and confirmed cannot be lost by it: it is what a
member that lost its disk would send. A leader that lives steps down at it, and one is elected as soon.

Only users of the system account may send it. It is no documented interface of nats-server; a message of a length that a server
does not expect is logged there and has no effect.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import msgspec

ASK_GROUPS = "$SYS.REQ.SERVER.PING.RAFTZ"
ASK_ACCOUNTS = "$SYS.REQ.SERVER.PING.JSZ"
OF_ACCOUNTS = b'{"accounts": true}'
LEADER = "LEADER"
_NOBODY = b"headrace"  # as long as the id of a server must be
_REQUEST = struct.Struct("<QQQ8s")  # term, and of the log: its last term, its last index, its owner


class Member(msgspec.Struct, frozen=True):
    """A server of a group, as another one knows it."""

    name: str = ""


class RaftGroup(msgspec.Struct, frozen=True):
    """A group as one of its servers sees it. `leader` and `voted_for` are ids of servers, empty while there is none."""

    state: str = ""
    term: int = 0
    leader: str = ""
    voted_for: str = ""
    quorum_needed: int = 0
    peers: dict[str, Member] = {}
    system_account: bool = False
    traffic_account: str = ""

    @property
    def leader_name(self) -> str:
        """The name of the server that leads, its id where it is not known by name."""
        member = self.peers.get(self.leader)
        return member.name if member is not None and member.name else self.leader


class _Server(msgspec.Struct, frozen=True):
    name: str = ""


class _Answer(msgspec.Struct, frozen=True):
    server: _Server = _Server()
    data: dict[str, dict[str, RaftGroup]] | None = None


class _Account(msgspec.Struct, frozen=True):
    id: str = ""


class _Accounts(msgspec.Struct, frozen=True):
    account_details: list[_Account] = []


class _JetStream(msgspec.Struct, frozen=True):
    server: _Server = _Server()
    data: _Accounts = _Accounts()


def groups_of(account: str) -> bytes:
    """Return what ASK_GROUPS is sent with; an empty account is that of the system."""
    return msgspec.json.encode({"account": account}) if account else b""


def parse_accounts(text: bytes) -> tuple[str, frozenset[str]] | None:
    """Return the name of a server that answered ASK_ACCOUNTS, and its accounts with streams; None for no such answer."""
    try:
        answer = msgspec.json.decode(text, type=_JetStream)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return (answer.server.name, frozenset(one.id for one in answer.data.account_details)) if answer.server.name else None


def parse_groups(text: bytes) -> tuple[str, Mapping[str, RaftGroup]] | None:
    """Return the name of a server that answered ASK_GROUPS, and its groups; None for what is no such answer."""
    try:
        answer = msgspec.json.decode(text, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if not answer.server.name:
        return None
    groups: dict[str, RaftGroup] = {}
    for of_account in (answer.data or {}).values():
        groups.update(of_account)
    return answer.server.name, groups


def vote_subject(group: str) -> str:
    """Return the subject at which the members of a group are asked for their votes."""
    return f"$NRG.V.{group}"


def vote_request(term: int) -> bytes:
    """Return a request for votes in this term that no member with a log grants."""
    return _REQUEST.pack(term, 0, 0, _NOBODY)
