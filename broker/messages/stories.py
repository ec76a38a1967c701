"""Defines what an ingress tells about the requests that it has accepted, for `headrace trace`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from headrace.broker.messages.base import Attempt, Choices, Count, Name, Rank, Record, Seconds, Tokens, UnixTime
from headrace.broker.messages.events import EventKind

MOST_EVENTS = 1024  # of one story: more are counted only
MOST_STORIES = 16  # in one answer


class StoryEvent(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A job event as its ingress heard it: [after_s, kind, attempt, worker, tokens, uncached, by, prefill, rank, fetch_ms].

    `after_s`: since the submission. The other fields are those of the job event.
    """

    after_s: Seconds
    kind: EventKind
    attempt: Attempt
    worker: Name
    tokens: Tokens = 0
    uncached: Tokens = 0
    by: Name = ""
    prefill: Name = ""
    rank: Rank | None = None
    fetch_ms: Count = 0


class Story(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A request from its submission to its end. `ended_s` is None while it is open; durations count from the submission.

    `finish`: the reasons why its choices ended, each once. `fault` and `message`: the error that ended it, if one did.
    `lost_events`: events beyond those that are kept.
    """

    id: Name
    ingress: Name
    pool: Name
    model: Name
    tenant: Name
    request_class: Name
    submitted: UnixTime
    prompt_tokens: Tokens
    max_tokens: Tokens = 0
    deadline_s: Seconds = 0.0
    choices: Choices = 1
    adapter: Name = ""
    name: Name = ""  # the client's own name for the request
    events: Annotated[list[StoryEvent], Meta(max_length=MOST_EVENTS)] = []
    lost_events: Count = 0
    answer_tokens: Tokens = 0
    ended_s: Seconds | None = None
    finish: Annotated[list[Name], Meta(max_length=64)] = []
    fault: Name = ""
    message: Name = ""


class TellStories(Record, frozen=True, omit_defaults=True, kw_only=True, tag_field="op", tag="tell_stories"):
    """A question to an ingress: what happened to the requests with this id, or client's name? Answered with Stories."""

    name: Name


class Stories(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The last requests of that name at an ingress, oldest first; empty if it remembers none."""

    stories: Annotated[list[Story], Meta(max_length=MOST_STORIES)] = []
