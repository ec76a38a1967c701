"""Requests that came in another API's words, on their way through the chat API."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from msgspec.structs import replace

from headrace.frontend.generation.plan import Draft, GenerationOptions
from headrace.frontend.http.http_exchange import HttpExchange
from headrace.frontend.schema.chat import ChatRequest


class ChatAdapter(Protocol):
    """`headrace.frontend.openai.chat.ChatApi`, as APIs that speak in messages see it."""

    def draft(
        self, request: ChatRequest, exchange: HttpExchange, *, id_prefix: str
    ) -> Awaitable[tuple[Draft, GenerationOptions]]:
        """Raises a FrontendError or an AdmissionError."""


def bounded(draft: Draft, asked: int | None) -> tuple[Draft, bool]:
    """The draft with at most `asked` tokens per choice; True when the context leaves room for less.

    For APIs in which asking for more than fits is no error: the answer then ends where the context does.  The draft must have
    been made without a limit.  None = leave it so.
    """
    if asked is None:
        return draft, False
    jobs = []
    short = False
    for job in draft.jobs:
        room = job.card.context_length - job.prompt_tokens
        most = min(asked, room)
        short = short or room < asked
        sampling = replace(job.generation.sampling, max_tokens=most)
        generation = replace(job.generation, sampling=sampling)
        jobs.append(replace(job, generation=generation, max_tokens=most))
    return replace(draft, jobs=jobs), short


def piecewise(draft: Draft) -> Draft:
    """The draft with parts that come token by token, also where nobody reads along: it is then known which token says what."""
    jobs = []
    for job in draft.jobs:
        parse = job.generation.parse
        if parse is not None and parse.whole:
            parse = replace(parse, whole=False)
            job = replace(job, generation=replace(job.generation, parse=parse))
        jobs.append(job)
    return replace(draft, jobs=jobs)
