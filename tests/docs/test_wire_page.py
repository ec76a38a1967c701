"""docs/wire.md has every message and every field of it."""

from __future__ import annotations

import re

import msgspec
import pytest

from headrace.broker.messages import durable, requests
from headrace.broker.models import cards
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from tests.docs.blocks import ROOT
from tests.support.wire_samples import every_message

PAGE = (ROOT / "docs" / "wire.md").read_text()
WORDS = frozenset(re.findall(r"\w+", PAGE))
MESSAGES = sorted(
    {
        kind
        for kind in (*every_message().values(), *vars(cards).values())
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    },
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_field_of_a_message_is_on_the_page(kind: type[msgspec.Struct]) -> None:
    named = set(kind.__struct_fields__)
    if isinstance(tag := kind.__struct_config__.tag, str):
        named.add(tag)
    assert named <= WORDS


def test_every_header_of_a_stored_job_is_on_the_page() -> None:
    for header in (requests.HEADER_ATTEMPT, requests.HEADER_HISTORY, requests.HEADER_PREFILL, requests.HEADER_RANK):
        assert f"`{header}`" in PAGE


def test_every_header_of_a_job_is_on_the_page() -> None:
    headers = [value for name, value in vars(durable).items() if name.startswith("HEADER_")]
    assert len(headers) >= 8
    assert [header for header in headers if f"`{header}`" not in PAGE] == []


def test_every_place_and_subject_is_on_the_page_or_in_the_architecture() -> None:
    both = PAGE + (ROOT / "docs" / "architecture.md").read_text()
    topology = Topology(subjects=Subjects("hr"))
    places = [spec.name for spec in (*topology.streams(), *topology.buckets(), *topology.object_stores())]
    assert [name for name in places if not re.search(rf"\b{name}\b", both)] == []
    kinds = {subject.split(".")[1] for stream in topology.streams() for subject in stream.subjects if subject.startswith("hr.")}
    kinds |= {"out", "ev", "ctl", "adm", "cancel", "find", "jobev"}
    assert [kind for kind in sorted(kinds) if f"`hr.{kind}." not in both] == []
