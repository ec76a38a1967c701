import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.jetstream import wire
from headrace.jetstream.errors import SubjectError

text = st.text(alphabet=st.characters(blacklist_categories=("Cs", "Cc")), max_size=40)
names = st.text(alphabet=st.characters(whitelist_categories=("Lu", "Ll", "Nd"), max_codepoint=127), min_size=1, max_size=20)


@given(st.dictionaries(names, text, max_size=5))
def test_headers_survive_encoding_and_decoding(headers: dict[str, str]) -> None:
    assert wire.decode_headers(wire.encode_headers(headers)) == {k: v.strip(" ") for k, v in headers.items()}


@pytest.mark.parametrize("bad", [{"A": "x\r\nEvil: 1"}, {"A\n": "x"}, {"": "x"}, {"a b": "x"}, {"a:b": "x"}])
def test_a_header_cannot_break_out_of_its_line(bad: dict[str, str]) -> None:
    with pytest.raises(SubjectError):
        wire.encode_headers(bad)


def test_an_inline_status_is_read_with_its_headers() -> None:
    raw = b"NATS/1.0 408 Request Timeout\r\nNats-Pending-Messages: 3\r\nNats-Pending-Bytes: 0\r\n\r\n"
    assert wire.status_of(raw) == 408
    assert wire.decode_headers(raw) == {
        "Status": "408",
        "Description": "Request Timeout",
        "Nats-Pending-Messages": "3",
        "Nats-Pending-Bytes": "0",
    }
    assert wire.status_of(b"NATS/1.0\r\nA: b\r\n\r\n") == 0
    assert wire.status_of(None) == 0


def test_both_forms_of_ack_subject_are_read() -> None:
    short = wire.parse_ack_subject("$JS.ACK.S.C.2.30.31.1700000000000000000.4")
    assert short == wire.AckSubject("S", "C", 2, 30, 31, 4, 1.7e9)
    assert wire.parse_ack_subject("$JS.ACK.hub.ABC.S.C.2.30.31.1700000000000000000.4.rnd") == short


@pytest.mark.parametrize("bad", ["", "x.y", "$JS.API.S.C.1.2.3.4.5"])
def test_other_subjects_are_no_ack_subjects(bad: str) -> None:
    with pytest.raises(SubjectError):
        wire.parse_ack_subject(bad)


@given(st.floats(min_value=1e-3, max_value=1e6))
def test_a_ttl_is_whole_and_never_shorter_than_asked(ttl_s: float) -> None:
    assert int(wire.ttl_value(ttl_s)) >= max(1.0, ttl_s)
    assert int(wire.ttl_value(ttl_s)) < ttl_s + 1


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_ttl_must_be_a_positive_number(bad: float) -> None:
    with pytest.raises(ValueError, match="TTL"):
        wire.ttl_value(bad)


def test_publish_commands_count_bytes_not_characters() -> None:
    assert wire.pub("a.b", "ä".encode()) == b"PUB a.b 2\r\n\xc3\xa4\r\n"
    assert wire.pub("a.b", b"", "r") == b"PUB a.b r 0\r\n\r\n"
    assert wire.hpub("a", b"xy", b"NATS/1.0\r\n\r\n", "r") == b"HPUB a r 12 14\r\nNATS/1.0\r\n\r\nxy\r\n"
