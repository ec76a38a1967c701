"""Encodes texts and pairs into pooling inputs, and turns these into jobs, for all pooling APIs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

from tokenizers import Encoding, Tokenizer

from headrace.broker.codec import pack_u32
from headrace.broker.errors import MalformedMessage
from headrace.broker.jobs import Job
from headrace.broker.messages.requests import Pooling, PoolingInput, PoolingTask
from headrace.frontend.auth.caller import check_model
from headrace.frontend.errors import BadRequest, ContextTooLong
from headrace.frontend.generation.job_options import job_options_of
from headrace.frontend.http.bodies import kinds_of, unsupported
from headrace.frontend.http.exchange import HttpExchange
from headrace.frontend.pooling.schema import PoolingBase
from headrace.frontend.prompts.model_cache import LoadedModel
from headrace.frontend.prompts.prompt_encoder import PromptEncoder
from headrace.frontend.prompts.text_encoder import in_groups, is_suspicious, least_tokens
from headrace.frontend.settings import FrontendSettings

# Encodes texts, ids and pairs of texts into pooling inputs: ids, and the start of the second text of a pair.
#
# All texts of a request are encoded together, in a thread if they are long. Texts that are too long are refused, or truncated
# if the request asks for it. Truncation comes before the special tokens are added, so that these stay where the model expects
# them.

Side = Literal["left", "right"]
T = TypeVar("T", bound="str | tuple[str, str]")


@dataclass(frozen=True, slots=True)
class Encoded:
    tokens: int
    input: PoolingInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The limits of an input's length, in tokens. `purpose` and `param` are parts of error messages."""

    context_length: int
    truncate: int | None = None  # cut to so many; -1 = to the context length
    side: Side = "right"  # what is cut off
    special: bool = True  # put the model's special tokens around texts
    first: int = 0  # cut the first text of a pair to so many, 0 = not
    second: int = 0
    text: int = 0  # cut a single text to so many, its special tokens not counted; 0 = not
    purpose: str
    param: str

    @property
    def keep(self) -> int | None:
        """Return the number of tokens to keep; None = all. Raises BadRequest if it exceeds the context, or is 0."""
        if self.truncate is None:
            return None
        if self.truncate > self.context_length:
            raise BadRequest(
                f"truncate_prompt_tokens ({self.truncate}) is above the model's maximum context length ({self.context_length})",
                param="truncate_prompt_tokens",
            )
        if self.truncate == 0:
            raise BadRequest("truncate_prompt_tokens 0 would leave nothing of the input", param="truncate_prompt_tokens")
        return self.context_length if self.truncate == -1 else self.truncate

    def check(self, tokens: int, where: str) -> None:
        """Check the length of an input. Raises BadRequest for an empty one, ContextTooLong."""
        if not tokens:
            raise BadRequest(f"{where} is empty: it has no token", param=where)
        if tokens > self.context_length:
            raise ContextTooLong(
                f"This model's maximum context length is {self.context_length} tokens. However, you requested {tokens} tokens "
                f"in the input for {self.purpose} ({where}). Please reduce the length of the input.",
                param=where,
            )


async def list_inputs(given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """Return `input` in any of its four forms as a list of texts or ids. Raises BadRequest for a mixture."""
    if isinstance(given, str):
        return [given]
    kinds = await kinds_of(given)
    if len(kinds) > 1:
        raise BadRequest("input must be a text, a list of texts, a list of ids or a list of lists of ids", param="input")
    return [cast("list[int]", given)] if kinds == {int} else cast("list[str | list[int]]", given)


async def encode_inputs(encoder: PromptEncoder, inputs: Sequence[str | list[int]], bounds: Bounds) -> list[Encoded]:
    """Encode inputs, in order. Raises BadRequest naming the input, ContextTooLong."""
    size = sum(map(len, inputs))
    return await encoder.aside(lambda: _inputs(encoder, inputs, bounds), size=size)


async def encode_pairs(encoder: PromptEncoder, pairs: Sequence[tuple[str, str]], bounds: Bounds) -> list[Encoded]:
    """Encode pairs of texts, in order. Raises as `encode_inputs`."""
    size = sum(len(first) + len(second) for first, second in pairs)
    return await encoder.aside(lambda: _pairs(encoder.tokenizer, pairs, bounds), size=size)


def _inputs(encoder: PromptEncoder, inputs: Sequence[str | list[int]], bounds: Bounds) -> list[Encoded]:
    keep = bounds.keep
    texts = [given for given in inputs if isinstance(given, str)]
    _check_lengths(encoder.tokenizer, texts, bounds)
    encodings = _batch(encoder.tokenizer, texts, bounds)
    encoded: list[Encoded] = []
    for index, given in enumerate(inputs):
        where = f"{bounds.param}[{index}]" if len(inputs) > 1 else bounds.param
        if isinstance(given, str):
            ids = next(encodings).ids
            if bounds.text or (keep is not None and len(ids) > keep):
                ids = _cut_text(encoder.tokenizer, given, keep, bounds)
        else:
            ids = _checked(given, encoder.vocab_size, where)
            if keep is not None and len(ids) > keep:
                ids = ids[:keep] if bounds.side == "right" else ids[-keep:]
        bounds.check(len(ids), where)
        encoded.append(_packed(ids, None, where))
    return encoded


def _pairs(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], bounds: Bounds) -> list[Encoded]:
    keep = bounds.keep
    limited = bool(bounds.first or bounds.second)
    _check_lengths(tokenizer, dict.fromkeys(text for pair in pairs for text in pair), bounds)
    encoded = []
    for index, (pair, whole) in enumerate(zip(pairs, _batch(tokenizer, pairs, bounds), strict=True)):
        where = f"{bounds.param}[{index}]" if len(pairs) > 1 else bounds.param
        if limited or (keep is not None and len(whole.ids) > keep):
            whole = _cut_pair(tokenizer, pair, keep, bounds)
        bounds.check(len(whole.ids), where)
        encoded.append(_packed(whole.ids, _second(whole.type_ids), where))
    return encoded


def _batch(tokenizer: Tokenizer, texts: Sequence[T], bounds: Bounds) -> Iterator[Encoding]:
    """Encode a few texts at a time, because an encoding takes a hundred times the memory of its text."""
    for group in in_groups(texts):
        yield from tokenizer.encode_batch_fast(group, add_special_tokens=bounds.special)


def _check_lengths(tokenizer: Tokenizer, texts: Iterable[str], bounds: Bounds) -> None:
    """Refuse texts that are far too long without tokenising them as a whole. Raises ContextTooLong."""
    most = bounds.context_length
    for text in texts:
        if not is_suspicious(text, most) or (tokens := least_tokens(tokenizer, text, enough=most)) <= most:
            continue
        if bounds.keep is not None or bounds.text or bounds.first or bounds.second:
            message = f"a text of {len(text)} characters is too long to be truncated here"
            raise ContextTooLong(message, param=bounds.param)
        bounds.check(tokens, bounds.param)


def _cut_text(tokenizer: Tokenizer, text: str, keep: int | None, bounds: Bounds) -> list[int]:
    encoding = tokenizer.encode(text, add_special_tokens=False)
    if bounds.text:
        encoding.truncate(bounds.text, direction=bounds.side)
    if keep is not None:
        room = keep - _specials(tokenizer, bounds, pair=False)
        _check_room(room, keep)
        encoding.truncate(room, direction=bounds.side)
    return tokenizer.post_process(encoding, add_special_tokens=bounds.special).ids


def _cut_pair(tokenizer: Tokenizer, pair: tuple[str, str], keep: int | None, bounds: Bounds) -> Encoding:
    """Truncate both texts to their own limits, then the longer one until the pair fits."""
    first, second = (tokenizer.encode(text, add_special_tokens=False) for text in pair)
    if bounds.first:
        first.truncate(bounds.first, direction=bounds.side)
    if bounds.second:
        second.truncate(bounds.second, direction=bounds.side)
    if keep is not None:
        room = keep - _specials(tokenizer, bounds, pair=True)
        _check_room(room, keep)
        a, b = len(first.ids), len(second.ids)
        if a + b > room:
            shorter = min(a, b, room // 2)  # at most half of the room goes to the shorter text, the other gets what is left
            a, b = (shorter, room - shorter) if a <= b else (room - shorter, shorter)
            first.truncate(a, direction=bounds.side)
            second.truncate(b, direction=bounds.side)
    return tokenizer.post_process(first, second, add_special_tokens=bounds.special)


def _specials(tokenizer: Tokenizer, bounds: Bounds, *, pair: bool) -> int:
    return tokenizer.num_special_tokens_to_add(pair) if bounds.special else 0


def _check_room(room: int, keep: int) -> None:
    if room < 1:
        raise BadRequest(f"truncate_prompt_tokens ({keep}) leaves no room for the text", param="truncate_prompt_tokens")


def _checked(ids: list[int], vocab_size: int, where: str) -> list[int]:
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise BadRequest(f"token id {wrong} is outside the vocabulary of {vocab_size}", param=where)
    return ids


def _second(type_ids: list[int]) -> int | None:
    return type_ids.index(1) if 1 in type_ids else None


def _packed(ids: list[int], second: int | None, where: str) -> Encoded:
    try:
        return Encoded(len(ids), PoolingInput(pack_u32(ids), second))
    except MalformedMessage as error:
        raise BadRequest(str(error), param=where) from None


@dataclass(frozen=True)
class PoolingOptions:
    """Options of a pooling request: its task, the length of each vector, and whether vectors are normalised.

    None leaves `dimensions` and `normalize` to the model.
    """

    task: PoolingTask
    dimensions: int | None = None
    normalize: bool | None = None


def pooling_jobs(
    request: PoolingBase,
    exchange: HttpExchange,
    model: LoadedModel,
    settings: FrontendSettings,
    inputs: Sequence[Encoded],
    options: PoolingOptions,
) -> list[Job]:
    """Make jobs of several inputs each. Choice i, counted over all jobs, is the answer to input i. Raises BadRequest."""
    check_model(exchange.scope, model.card.model)
    job_options, routing = job_options_of(request, exchange, settings, session_id=None)
    jobs: list[Job] = []
    for part in split(inputs, most=settings.job_inputs, most_tokens=settings.job_input_tokens):
        pooling = Pooling(
            task=options.task,
            inputs=[encoded.input for encoded in part],
            dimensions=options.dimensions,
            normalize=options.normalize,
            extra=request.vllm_xargs or {},
        )
        jobs.append(
            Job(
                **job_options,
                id=exchange.job_id(),
                card=model.card,
                pooling=pooling,
                prompt_tokens=sum(encoded.tokens for encoded in part),
                max_tokens=1,  # no token is generated, but 0 would mean a whole context
                choices=len(part),
                explain=routing.explain and not jobs,
            )
        )
    return jobs


def split(inputs: Sequence[Encoded], *, most: int, most_tokens: int) -> Iterator[list[Encoded]]:
    """Yield parts of at most `most` inputs. Parts of several inputs have at most `most_tokens` tokens."""
    part: list[Encoded] = []
    tokens = 0
    for encoded in inputs:
        if part and (len(part) >= most or tokens + encoded.tokens > most_tokens):
            yield part
            part, tokens = [], 0
        part.append(encoded)
        tokens += encoded.tokens
    if part:
        yield part


def check_inputs(count: int, settings: FrontendSettings, *, param: str) -> None:
    """Refuse a request with too many inputs. Raises BadRequest."""
    if count > settings.max_inputs:
        raise BadRequest(f"at most {settings.max_inputs} inputs in one request, this one has {count}", param=param)


def activation_of(request: PoolingBase) -> bool | None:
    """Return `use_activation`, also under its older name. Raises BadRequest if both are given and differ."""
    if request.normalize is not None and request.use_activation not in (None, request.normalize):
        raise BadRequest("normalize is another name of use_activation; the two contradict each other", param="normalize")
    return request.normalize if request.use_activation is None else request.use_activation


def refuse_formats(embed_dtype: str | None, endianness: str | None) -> None:
    """Refuse every form of vectors but f32, little endian. Raises BadRequest."""
    if embed_dtype not in (None, "float32"):
        raise unsupported("embed_dtype", f"{embed_dtype!r} is not supported here: float32 only")
    if endianness not in (None, "native", "little"):
        raise unsupported("endianness", f"{endianness!r} is not supported here: little only")
