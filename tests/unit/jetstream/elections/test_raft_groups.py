"""What servers say of their raft groups, and the request for votes that nobody grants."""

from __future__ import annotations

import json
import struct

import pytest

from headrace.jetstream.elections.raft_groups import groups_of, parse_accounts, parse_groups, vote_request, vote_subject


def test_groups_are_read_from_all_accounts_of_a_server() -> None:
    one = {"state": "FOLLOWER", "term": 3, "leader": "abcdefgh", "quorum_needed": 2, "peers": {"abcdefgh": {"name": "n1"}}}
    text = json.dumps({"server": {"name": "n2"}, "data": {"SYS": {"_meta_": one}, "HR": {"S-R3F-x": one | {"new": [1]}}}})
    parsed = parse_groups(text.encode())
    assert parsed is not None
    name, groups = parsed
    assert (name, sorted(groups)) == ("n2", ["S-R3F-x", "_meta_"])
    assert groups["_meta_"].leader_name == "n1"


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b'{"server": {}}', b'{"server": {"name": 1}}', b"\xff"])
def test_anything_else_is_no_answer(text: bytes) -> None:
    assert parse_groups(text) is None
    assert parse_accounts(text) is None


def test_accounts_with_streams_are_read_by_their_ids_and_asked_for_one_by_one() -> None:
    text = b'{"server": {"name": "n2"}, "data": {"memory": 1, "account_details": [{"name": "HR", "id": "ABC"}]}}'
    assert parse_accounts(text) == ("n2", {"ABC"})
    assert parse_accounts(b'{"server": {"name": "n2"}, "data": {}}') == ("n2", frozenset())
    assert json.loads(groups_of("ABC")) == {"account": "ABC"}
    assert groups_of("") == b"", "the system's own"


def test_a_server_without_groups_answers_too() -> None:
    assert parse_groups(b'{"server": {"name": "n2"}, "error": {"code": 400}}') == ("n2", {})


def test_the_votes_of_an_empty_log_are_asked_for() -> None:
    """nats-server reads 32 bytes: the term, the last term and the last index of the log, and the id of the candidate."""
    term, last_term, last_index, candidate = struct.unpack("<QQQ8s", vote_request(12))
    assert (term, last_term, last_index, len(candidate)) == (12, 0, 0, 8)
    assert vote_subject("S-R3F-x") == "$NRG.V.S-R3F-x"
