"""Defines the base of all messages: the version field, the encoding of records as maps, and the bounds of what fields may hold.

A message is written by another process and may hold anything.  What a field may hold stands in its type, so that a token that
cannot be part of a subject, an infinite deadline or a size that would fill the memory is refused where the message is decoded,
with the name of the field, and nothing behind that needs to look again.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

WIRE_VERSION = 1

MOST_TOKENS = 2**31 - 1  # of a prompt, an answer or a queue
MOST_ATTEMPTS = 10**9
MOST_CHOICES = 65_536  # of a request; for kind `pool` its inputs
MOST_RANKS = 1024
MOST_CALLS = 4096  # tool calls in one answer
MOST_HISTORY = 1024  # suspicions in the history of a job
LATEST = 4_102_444_800.0  # the year 2100, in Unix seconds: a Nats-TTL until then is one that the server can hold
LONGEST_S = 1e9
LONGEST_NAME = 4096  # characters

Token = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
"""A name that is part of a subject or of a key: a process, a pool, a tenant."""

OptionalToken = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{0,64}\Z")]
"""A token, or nothing."""

Place = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}(~[0-9]{1,4})?\Z")]
"""A worker, or one of its data-parallel ranks."""

Suspect = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}(#[a-z]{1,16})?\Z")]
"""A worker, with a mark where its engine has died instead of the process."""

JobId = Annotated[str, Meta(pattern=r"^[\x21-\x7e]{1,256}\Z")]
"""The id of a request, which becomes part of headers: printable, without blanks."""

Name = Annotated[str, Meta(max_length=LONGEST_NAME)]
"""A name that a client or operator has chosen."""

UnixTime = Annotated[float, Meta(ge=0.0, le=LATEST)]
Seconds = Annotated[float, Meta(ge=0.0, le=LONGEST_S)]
Finite = Annotated[float, Meta(ge=-1e12, le=1e12)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Tokens = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
Attempt = Annotated[int, Meta(ge=1, le=MOST_ATTEMPTS)]
Choice = Annotated[int, Meta(ge=0, lt=MOST_CHOICES)]
Choices = Annotated[int, Meta(ge=1, le=MOST_CHOICES)]
CallIndex = Annotated[int, Meta(ge=0, lt=MOST_CALLS)]
TokenId = Annotated[int, Meta(ge=0, lt=2**32)]
Run64 = Annotated[int, Meta(ge=0)]
"""A random number of up to 64 bits."""

Ranks = Annotated[int, Meta(ge=1, le=MOST_RANKS)]
Rank = Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
Small = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
"""An integer whose sign has a meaning, a priority for example."""


class Record(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Base of all messages that are maps."""

    v: int = msgspec.field(default_factory=lambda: WIRE_VERSION)  # a factory, so that omit_defaults never leaves it out
