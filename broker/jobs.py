"""Jobs as they are submitted to an ingress: their messages, limits, ids, and the parts of their answers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from os import urandom
from typing import Any, Literal, cast

import msgspec

from headrace.broker.codec import encode
from headrace.broker.errors import RequestOverLimit, WireError
from headrace.broker.messages.frames import Part, Text
from headrace.broker.messages.requests import Envelope, Generation, Pooling, Spill
from headrace.broker.models.cards import ModelCard
from headrace.jetstream.subjects import RequestClass

NOTHING = Generation(token_ids=b"")


def new_id() -> str:
    """Return a new request id: sortable by second, safe in subjects, with 72 random bits."""
    return f"{int(time.time()):08x}{urandom(9).hex()}"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A request, ready to be queued. `hashes` is the prompt's block chain as little-endian u64, empty for no affinity.

    A job with `pooling` is of kind `pool`; its `generation` is ignored, and each input counts as a choice.
    """

    id: str
    card: ModelCard
    generation: Generation = NOTHING
    pooling: Pooling | None = None
    prompt_tokens: int
    max_tokens: int = 0
    hashes: bytes = b""
    choices: int = 1
    request_class: RequestClass = "std"
    tenant: str = "_"
    priority: int = 0
    deadline_s: float = 600.0  # from now
    adapter: str = ""
    session: str = ""
    affinity: Literal["soft", "hard"] = "soft"
    worker: str = ""  # the only worker that may run it
    ttft_target_s: float | None = None
    itl_target_s: float | None = None
    agent_priority: int | None = None
    require: list[str] = []
    prefer: dict[str, float] = {}
    name: str = ""  # the client's own name for the request
    trace: dict[str, str] = {}  # W3C headers, for those who compute it
    explain: bool = False  # the ingress remembers which router placed it (`Ingress.explain`)

    def payload(self) -> bytes:
        """Encode the generation or, for kind `pool`, the pooling. Raises WireError for what clients may send in JSON alone."""
        try:
            return encode(self.generation if self.pooling is None else self.pooling)
        except OverflowError:
            raise WireError("an integer in the request does not fit into 64 bits") from None

    def envelope(self, *, judge: str, now: float, payload: bytes, spill: Spill | None) -> Envelope:
        """Return the message body; `now` is Unix time. Exactly one of `payload` and `spill` carries the generation."""
        return Envelope(
            id=self.id,
            pool=self.card.pool,
            model=self.card.model,
            judge=judge,
            deadline=now + self.deadline_s,
            created=now,
            kind="generate" if self.pooling is None else "pool",
            tokens=self.prompt_tokens,
            max_tokens=self.max_tokens,
            choices=self.choices,
            request_class=self.request_class,
            tenant=self.tenant,
            priority=self.priority,
            block_size=self.card.block_size if self.hashes else 0,
            hashes=self.hashes,
            payload=payload,
            spill=spill,
            name=self.name,
            adapter=self.adapter,
            session=self.session,
            affinity=self.affinity,
            worker=self.worker,
            ttft_target_s=self.ttft_target_s,
            itl_target_s=self.itl_target_s,
            agent_priority=self.agent_priority,
            require=self.require,
            prefer=self.prefer,
            trace=self.trace,
        )


# Bounds what one generation request may ask of a worker beyond its prompt: strings, lists, schemas, tools, and their number.
#
# The bytes of a request are bounded by the frontend already. These bounds are for what costs more than its bytes: a stop
# string becomes an automaton with a node per character, a schema a grammar, and the prompt counts once for each choice. The
# frontend checks before it stores a request, the worker again, because publishers on NATS need no frontend.

MOST_STOPS = 16  # OpenAI allows 4; a few more cost nothing
STOP_CHARS = 4096  # of all stop strings together
MOST_STOP_TOKENS = 1024
MOST_BAD_WORDS = 256
BAD_WORD_CHARS = 16 * 1024
MOST_BIASES = 4096
MOST_ALLOWED = 262_144  # about the largest vocabulary
GUIDED_BYTES = 256 * 1024  # of a schema, grammar or choices, encoded
REGEX_CHARS = 16 * 1024
MOST_TOOLS = 512  # OpenAI allows 128
TOOL_BYTES = 1024 * 1024  # of all tools, encoded
EXTRA_BYTES = 64 * 1024  # of parameters that are passed to the engine as they are, encoded
MOST_TOKENS = 8 * 1024 * 1024  # of the prompt, once per choice


def check_limits(generation: Generation, *, choices: int, prompt_tokens: int) -> None:
    """Check a request. Raises RequestOverLimit, which names the parameter, its size and the limit."""
    _check_strings(generation.stop, "stop", most=MOST_STOPS, chars=STOP_CHARS)
    if choices > 1:
        _check(choices * prompt_tokens, "n", MOST_TOKENS, "prompt tokens over all choices")
    sampling = generation.sampling
    if sampling.bad_words:
        _check_strings(sampling.bad_words, "bad_words", most=MOST_BAD_WORDS, chars=BAD_WORD_CHARS)
    if sampling.stop_token_ids:
        _check(len(sampling.stop_token_ids), "stop_token_ids", MOST_STOP_TOKENS, "ids")
    if sampling.logit_bias:
        _check(len(sampling.logit_bias), "logit_bias", MOST_BIASES, "entries")
    if sampling.allowed_token_ids:
        _check(len(sampling.allowed_token_ids), "allowed_token_ids", MOST_ALLOWED, "ids")
    if generation.guided is not None:
        _check_guided(generation.guided)
    if generation.extra:
        _check(_size(generation.extra), "vllm_xargs", EXTRA_BYTES, "bytes")
    parse = generation.parse
    if parse is not None:
        if parse.tools:
            _check(len(parse.tools), "tools", MOST_TOOLS, "tools")
            _check(_size(parse.tools), "tools", TOOL_BYTES, "bytes")
        if parse.template_kwargs:
            _check(_size(parse.template_kwargs), "chat_template_kwargs", EXTRA_BYTES, "bytes")


def _check_guided(guided: dict[str, Any]) -> None:
    regex = guided.get("regex")
    if isinstance(regex, str):
        _check(len(regex), "structured_outputs.regex", REGEX_CHARS, "characters")
    _check(_size(guided), "structured_outputs", GUIDED_BYTES, "bytes")


def _check_strings(values: Sequence[str], param: str, *, most: int, chars: int) -> None:
    if not values:
        return
    _check(len(values), param, most, "strings")
    _check(sum(map(len, values)), param, chars, "characters in all")


def _check(size: int, param: str, limit: int, what: str) -> None:
    if size > limit:
        raise RequestOverLimit(f"{param} has {size} {what}; the limit is {limit}", param=param)


def _size(value: Any) -> int:
    try:
        return len(msgspec.msgpack.encode(value))
    except (OverflowError, TypeError, RecursionError):  # refused with its own words where the request is encoded
        return 0


@dataclass(slots=True)
class Call:
    """A tool call; `arguments` is JSON text, or the part of it that has arrived."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class OutputParts:
    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if part.kind == "content":
                self.content += part.text
            elif part.kind == "reasoning":
                self.reasoning += part.text
            else:
                while len(self.calls) <= part.index:
                    self.calls.append(Call())
                call = self.calls[part.index]
                call.id = part.id or call.id
                call.name = part.name or call.name
                call.arguments += part.text


def parts_of(texts: Sequence[Text]) -> list[Part]:
    parts: list[Part] = []
    for text in texts:
        if isinstance(text, str):
            if text:
                parts.append(Part("content", text))
        else:
            parts += text
    return parts


def plain(texts: Sequence[Text]) -> str:
    try:
        return "".join(cast("Sequence[str]", texts))
    except TypeError:
        return "".join(part.text for part in parts_of(texts))


# Splits the request ids of stored jobs: a job's id, a mark, and the name of one delivery of the job.

RUN_MARK = "~"  # between a job's id and the nonce of a delivery; allowed nowhere else


def job_of_run(request_id: str) -> str:
    """Return the id of the job that a request belongs to; of one that belongs to none its own id."""
    return request_id.partition(RUN_MARK)[0]
