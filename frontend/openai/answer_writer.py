"""Chooses the writer for an answer of the chat and completions APIs, with all that the client wants to see in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from headrace.broker.codec import unpack_u32
from headrace.frontend.generation.plan import GenerationPlan
from headrace.frontend.schema.common import GenerationRequest
from headrace.frontend.writers.base import StreamWriter, WholeWriter
from headrace.frontend.writers.echo import EchoWriter
from headrace.frontend.writers.logprobs import LogprobWriter
from headrace.frontend.writers.parsed import ParsedWriter
from headrace.frontend.writers.sse import AnswerOptions, EventForm, EventWriter
from headrace.frontend.writers.unary import UnaryWriter

T = TypeVar("T")


def whole_writer(request: GenerationRequest, plan: GenerationPlan, form: EventForm, *, echo: Sequence[str] = ()) -> WholeWriter:
    """Return a writer of the whole answer beside that of its stream. Both take the same rows, so it has its own counter."""
    alone = msgspec.structs.replace(plan, counter=plan.counter.fresh())
    whole = answer_writer(msgspec.structs.replace(request, stream=False), alone, form, echo=echo)
    assert isinstance(whole, WholeWriter)  # noqa: S101  # it is not streamed
    return whole


def answer_writer(
    request: GenerationRequest, plan: GenerationPlan, form: EventForm, *, echo: Sequence[str] = ()
) -> StreamWriter | WholeWriter:
    """Return the writer of the answer. `echo` has one text per prompt, or is empty."""
    n, total, asked = request.n or 1, plan.choices, plan.options
    logprobs, token_ids = None, bool(request.return_token_ids)
    if asked.top_logprobs is not None:
        logprobs = LogprobWriter(asked.top_logprobs, choices=total, as_ids=bool(request.return_tokens_as_token_ids))
    if asked.parse is not None and not asked.parse.reasoning:  # tokens would reveal the reasoning that is to be left out
        logprobs, token_ids = None, False
    prompt_ids = [unpack_u32(p.packed) for p in asked.prompts] if request.return_token_ids else []
    echo_first: list[tuple[int, str]] = []
    if echo and logprobs is not None and not form.chat:
        first_ids = [unpack_u32(p.packed[:4]) for p in asked.prompts]
        echo_first = [(ids[0], plan.model.encoder.decode(ids)) for ids in first_ids]
    stream_options = request.stream_options
    usage = bool(stream_options and stream_options.include_usage)
    options = AnswerOptions(
        usage=usage,
        usage_always=bool(usage and stream_options and stream_options.continuous_usage_stats),
        token_ids=token_ids,
        logprobs=logprobs,
        role=asked.role,
        parse=asked.parse,
        freeform=asked.freeform,
        echo=_per_choice(echo, n) if echo else (),
        echo_first=_per_choice(echo_first, n) if echo_first else (),
        prompt_ids=_per_choice(prompt_ids, n) if prompt_ids else (),
        prompt_text=asked.prompt_text,
        prompt_logprobs=asked.prompt_logprobs is not None,
        silent=asked.silent,
    )
    if not request.stream:
        return UnaryWriter(plan.head, plan.counter, choices=total, chat=form.chat, options=options)
    kind = ParsedWriter if asked.parse is not None else EchoWriter if echo_first or asked.silent else EventWriter
    return kind(form, plan.head, plan.counter, choices=total, options=options)


def _per_choice(values: Sequence[T], choices: int) -> list[T]:
    """Repeat each prompt's value for its choices."""
    return [value for value in values for _ in range(choices)]
