"""Encodes prompts into packed token ids and their block hash chain. This happens once per request, for all later stages.

Short prompts are encoded on the event loop, because handing them to a thread would cost more than encoding. Long prompts are
encoded in a small thread pool (the tokenizer releases the GIL), where the parts they share with earlier prompts are cached
(`headrace.frontend.prompts.prompt_encoder`).
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import msgspec
from tokenizers import Tokenizer

from headrace.broker.blocks import block_chain, chain_seed, extend_chain_packed
from headrace.broker.codec import pack_u32, pack_u64, unpack_u32
from headrace.broker.errors import MalformedMessage
from headrace.broker.models.cards import ModelCard
from headrace.frontend.errors import BadRequest, ContextTooLong
from headrace.frontend.http.loop import give_back
from headrace.frontend.prompts.media import MediaItem, Placed, place
from headrace.frontend.prompts.text_encoder import LONG, SplitPoints, TextEncoder, in_groups, is_suspicious, least_tokens

# Caches token ids and block hashes of long prompts, so that the next turn of a conversation only costs its new part.
#
# It consists of two LRU caches of exact results, bounded together in bytes:
#
# - the ids of a piece of text that can be tokenised alone (`headrace.frontend.prompts.text_encoder`), by the tokenizer and
# the text itself, - the block hashes of a run of blocks, by the hash before it and its ids.
#
# Keys are complete, never digests, so no request can get the ids of another text. Losing the cache costs time, never an
# answer.

_ENTRY = 300  # bytes of an entry without its strings: key, tuple, links; rounded up
_RUN = 64  # blocks that are hashed and cached together

Reuse = Callable[[int, int], None]


class ByteLru:
    """An LRU cache of bytes, bounded in bytes. Safe to use from several threads; each call takes the lock once."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Hashable, tuple[bytes, int]] = OrderedDict()
        self._lock = Lock()
        self.size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get_many(self, keys: Sequence[Hashable]) -> list[bytes | None]:
        """Return the values of the keys, None for missing ones."""
        found: list[bytes | None] = []
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None:
                    self._entries.move_to_end(key)
                found.append(None if entry is None else entry[0])
        return found

    def put_many(self, items: Sequence[tuple[Hashable, bytes, int]]) -> None:
        """Add items of (key, value, bytes of both). Items larger than the whole cache are not kept."""
        with self._lock:
            for key, value, size in items:
                size += _ENTRY
                if size > self._max_bytes or key in self._entries:
                    continue
                self._entries[key] = value, size
                self.size += size
                while self.size > self._max_bytes:
                    _, (_, freed) = self._entries.popitem(last=False)
                    self.size -= freed


class PromptCache:
    """The prompt cache of a process, shared by all models."""

    def __init__(self, max_bytes: int, *, on_reuse: Reuse | None = None) -> None:
        """`on_reuse` gets the number of cached and of new tokens of each prompt. It is called from any thread."""
        self._pieces = ByteLru(max_bytes * 2 // 3)
        self._runs = ByteLru(max_bytes // 3)
        self._on_reuse = on_reuse

    @property
    def size(self) -> int:
        """Return the bytes held now, as an upper estimate."""
        return self._pieces.size + self._runs.size

    def ids(self, tokenizer: str, pieces: Sequence[str], encode: Callable[[list[str]], list[bytes]]) -> bytes:
        """Return the packed ids of the pieces, joined. `encode` computes those that are not cached."""
        keys = [(tokenizer, piece) for piece in pieces]
        found = self._pieces.get_many(keys)
        missing = list(dict.fromkeys(piece for piece, ids in zip(pieces, found, strict=True) if ids is None))
        fresh = dict(zip(missing, encode(missing), strict=True)) if missing else {}
        self._pieces.put_many([((tokenizer, piece), ids, sys.getsizeof(piece) + len(ids)) for piece, ids in fresh.items()])
        whole = b"".join(ids if ids is not None else fresh[piece] for piece, ids in zip(pieces, found, strict=True))
        if self._on_reuse is not None:
            known = sum(len(ids) for ids in found if ids is not None) // 4
            self._on_reuse(known, len(whole) // 4 - known)
        return whole

    def chain(self, packed: bytes, block_size: int, *, adapter: str | None = None, salt: str | None = None) -> bytes:
        """Return `headrace.broker.blocks.block_chain` of packed ids, packed."""
        width = block_size * 4
        value = chain_seed(adapter, salt)
        runs = [packed[at : at + width * _RUN] for at in range(0, len(packed) - width + 1, width * _RUN)]
        chains: list[bytes] = []
        fresh: list[tuple[Hashable, bytes, int]] = []
        for run in runs:
            whole = len(run) == width * _RUN
            known = self._runs.get_many([(block_size, value, run)])[0] if whole else None
            if known is None:
                known = _hashes(run, width, value)
                if whole:
                    fresh.append(((block_size, value, run), known, len(run) + len(known)))
            chains.append(known)
            value = int.from_bytes(known[-8:], "little")
        self._runs.put_many(fresh)
        return b"".join(chains)


def _hashes(run: bytes, width: int, value: int) -> bytes:
    chain: list[int] = []
    for end in range(width, len(run) + 1, width):
        value = extend_chain_packed(value, run[end - width : end])
        chain.append(value)
    return pack_u64(chain)


T = TypeVar("T")
_SLICE = 1 << 16  # token ids


class Prompt(msgspec.Struct, frozen=True):
    """An encoded prompt. `packed` has the ids as little-endian u32, `hashes` the block chain as little-endian u64."""

    tokens: int
    packed: bytes
    hashes: bytes
    media: Sequence[dict[str, Any]] = ()  # media items, in the form of `Generation.media`
    embeds: bytes = b""  # in place of ids, in the form of `Generation.prompt_embeds`


class LengthLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The limits on a prompt's length by the request and the model. `param` is the parameter that errors name."""

    context_length: int
    wanted: int | None  # tokens the client asked for; None = as many as fit
    truncate: int | None  # number of last prompt tokens to keep; -1 = as many as fit; None = all
    param: str

    def kept(self, tokens: int) -> int:
        """Return how many of the last of `tokens` tokens `truncate_prompt_tokens` keeps.

        Raises ContextTooLong if it asks for more than the context.
        """
        if self.truncate is None:
            return tokens
        keep = self.context_length - (self.wanted or 1) if self.truncate == -1 else self.truncate
        if keep > self.context_length:
            message = f"truncate_prompt_tokens ({keep}) exceeds the model's maximum context length ({self.context_length})"
            raise ContextTooLong(message, param="truncate_prompt_tokens")
        return min(max(keep, 0), tokens)

    def check(self, tokens: int) -> None:
        """Check that the context has room for one more token. As in vLLM's server, wanted tokens beyond the context are cut.

        Raises ContextTooLong with OpenAI's wording, which clients and frameworks look for, also if more tokens are wanted than
        the context has.
        """
        if tokens < self.context_length and (self.wanted or 1) <= self.context_length:
            return
        if self.wanted is None:
            request = f"your prompt resulted in {tokens} tokens"
        else:
            request = (
                f"you requested {tokens + self.wanted} tokens ({tokens} in the {self.param}, {self.wanted} in the completion)"
            )
        message = f"This model's maximum context length is {self.context_length} tokens. However, {request}. "
        error = ContextTooLong(message + f"Please reduce the length of the {self.param} or completion.", param=self.param)
        error.tokens, error.most = tokens, self.context_length
        raise error


class PromptEncoder:
    """The prompt encoder of a model. Threads may share it."""

    def __init__(
        self,
        tokenizer_json: bytes,
        card: ModelCard,
        *,
        executor: Executor,
        inline_bytes: int,
        cache: PromptCache | None = None,
        special_tokens: Sequence[str] = (),
    ) -> None:
        """`special_tokens` are those of `TextEncoder`.

        Raises ModelUnusable if the bytes are no tokenizer. Takes 0.1 s and more: call it off the event loop.
        """
        self._text = TextEncoder(tokenizer_json, name=card.model, special_tokens=special_tokens)
        self._tokenizer = self._text.reference
        self._card = card
        self._adapter: str | None = None
        self._executor = executor
        self._inline_bytes = inline_bytes
        self._inline_run = 0  # characters encoded on the event loop without a pause
        self._adds_special = self._tokenizer.num_special_tokens_to_add(is_pair=False) > 0
        self._prompt_cache = cache
        self._split_points = SplitPoints(self._tokenizer)
        self._digest = hashlib.sha256(tokenizer_json + repr(self._text.added).encode()).hexdigest()
        self._vocab_size = card.vocab_size or self._tokenizer.get_vocab_size()

    def for_adapter(self, adapter: str) -> PromptEncoder:
        """Return an encoder with the block chains of this adapter, which shares no blocks with the model itself."""
        encoder = copy.copy(self)
        encoder._adapter = adapter
        return encoder

    def use_fast_tokenizer(self, on_refused: Callable[[], None]) -> None:
        """Switch to the fast tokenizer if it agrees with this model's. Call it in a thread.

        `on_refused` is called for each text that the fast tokenizer refuses.
        """
        self._text.on_refused = on_refused
        self._text.use_fast_tokenizer()

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer for texts that are no prompts. Threads share it: change nothing."""
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    async def aside(self, work: Callable[[], T], *, size: int) -> T:
        """Return `work()`, run in a thread if the `size` of its text, in characters, is too large for the event loop."""
        if size <= self._inline_bytes:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        limit: LengthLimit,
        salt: str | None = None,
        media: Sequence[MediaItem] = (),
    ) -> Prompt:
        """Encode a text. Each of its placeholders stands for an item of `media`.

        Raises ContextTooLong, and BadRequest for a prompt without tokens, or if placeholders and items do not match.
        """
        size = len(text)
        if size <= self._inline_bytes:
            self._inline_run += size
            if self._inline_run > self._inline_bytes:  # many short prompts of one request take as long as a long one
                self._inline_run = 0
                await asyncio.sleep(0)
            return self.encode_now(text, add_special_tokens=add_special_tokens, limit=limit, salt=salt, media=media)

        def work() -> Prompt:
            try:
                return self.encode_now(text, add_special_tokens=add_special_tokens, limit=limit, salt=salt, media=media)
            finally:
                if size > LONG:
                    give_back()

        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def encode_now(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        limit: LengthLimit,
        salt: str | None = None,
        media: Sequence[MediaItem] = (),
    ) -> Prompt:
        """Encode a text in the calling thread. Raises as `encode`."""
        try:
            if is_suspicious(text, limit.context_length):
                self._check_length(text, limit)
            packed = self._ids_of(text, limit, add_special_tokens=add_special_tokens, salt=salt)
        except UnicodeEncodeError as error:
            raise BadRequest(f"the prompt is not valid Unicode: {error}", param=limit.param) from None
        if media:
            return self._pack_media(place(unpack_u32(packed), media, self._card.media), limit, salt)
        return self._prompt(packed, limit, salt)

    async def check_length(self, text: str, limit: LengthLimit) -> None:
        """Refuse a part of a prompt that alone is too long, before it is copied into the prompt. Raises ContextTooLong."""
        if is_suspicious(text, limit.context_length):
            await asyncio.get_running_loop().run_in_executor(self._executor, self._check_length, text, limit)

    def _check_length(self, text: str, limit: LengthLimit) -> None:
        tokens = least_tokens(self._tokenizer, text, enough=limit.context_length)
        if tokens > limit.context_length:
            if limit.truncate is not None:
                message = f"a text of {len(text)} characters is too long to be truncated here"
                raise ContextTooLong(message, param=limit.param)
            try:
                limit.check(tokens)
            except ContextTooLong as error:
                error.tokens = None  # a lower bound only
                raise

    async def take_ids(self, ids: Sequence[int], *, limit: LengthLimit, salt: str | None = None) -> Prompt:
        """Make a prompt of token ids. Raises BadRequest for ids outside the vocabulary, and as `encode`."""
        if len(ids) <= self._inline_bytes:
            return self._take_ids_now(ids, limit, salt)
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._take_ids_now, ids, limit, salt)

    def _take_ids_now(self, ids: Sequence[int], limit: LengthLimit, salt: str | None) -> Prompt:
        packed = []
        for at in range(0, len(ids), _SLICE):  # one call for a million ids would block every other thread
            some = ids[at : at + _SLICE]
            if min(some) < 0 or max(some) >= self._vocab_size:
                wrong = next(i for i in some if not 0 <= i < self._vocab_size)
                raise BadRequest(f"token id {wrong} is outside the vocabulary of {self._vocab_size}", param=limit.param)
            packed.append(pack_u32(some))
        return self._prompt(b"".join(packed), limit, salt)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    async def text_of(self, prompt: Prompt) -> str:
        """Return the text of a prompt that was given as ids."""
        if prompt.tokens <= self._inline_bytes:
            return self.decode(unpack_u32(prompt.packed))
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: self.decode(unpack_u32(prompt.packed)))

    def _ids_of(self, text: str, limit: LengthLimit, *, add_special_tokens: bool, salt: str | None) -> bytes:
        """Return the packed ids. Long texts go through the prompt cache, piece by piece, if this gives the same ids.

        Prompts of another salt find nothing there: how long they take must not tell what others have asked.
        """
        if len(text) <= self._inline_bytes:
            return self._text.encode([text], special=add_special_tokens)[0]
        whole = add_special_tokens and self._adds_special  # special tokens are added around the whole text
        if self._prompt_cache is not None and not whole:
            pieces = self._split_points.split(text)
            if len(pieces) > 1:
                known = self._digest if salt is None else f"{self._digest} {salt}"
                return self._prompt_cache.ids(known, pieces, partial(self._encode_pieces, limit=limit))
        return self._encode_pieces([text], limit=limit, special=add_special_tokens)[0]

    def _encode_pieces(self, pieces: list[str], *, limit: LengthLimit, special: bool = False) -> list[bytes]:
        packed: list[bytes] = []
        for group in in_groups(pieces):
            if len(group[0]) > LONG:
                self._check_length(group[0], limit)
            packed += self._text.encode(group, special=special)
        return packed

    def _pack(self, ids: Sequence[int], limit: LengthLimit, salt: str | None) -> Prompt:
        try:
            return self._prompt(pack_u32(ids), limit, salt)
        except MalformedMessage as error:
            raise BadRequest(str(error), param=limit.param) from None

    def _prompt(self, packed: bytes, limit: LengthLimit, salt: str | None) -> Prompt:
        tokens = len(packed) // 4
        kept = limit.kept(tokens)
        packed, tokens = packed[(tokens - kept) * 4 :], kept
        if not tokens:
            raise BadRequest("the prompt is empty", param=limit.param)
        limit.check(tokens)
        return Prompt(tokens, packed, self._hashes(packed, salt))

    def _hashes(self, packed: bytes, salt: str | None) -> bytes:
        size = self._card.block_size
        if not size:
            return b""
        if self._prompt_cache is not None and len(packed) > self._inline_bytes * 4:
            return self._prompt_cache.chain(packed, size, adapter=self._adapter, salt=salt)
        return pack_u64(block_chain(packed, size, adapter=self._adapter, salt=salt))

    def _pack_media(self, placed: Placed, limit: LengthLimit, salt: str | None) -> Prompt:
        """Make a prompt with media. Its block hashes end where the ids that the engine will see are not known."""
        if limit.truncate is not None:
            message = "truncate_prompt_tokens cannot be combined with images, videos or sounds"
            raise BadRequest(message, param="truncate_prompt_tokens")
        plain = self._pack(placed.ids, limit, salt)
        size = self._card.block_size
        if not size:
            return msgspec.structs.replace(plain, media=placed.media)
        known = plain.packed[: placed.known * 4]
        chain = block_chain(known, size, adapter=self._adapter, salt=salt, media=placed.spans)
        return msgspec.structs.replace(plain, hashes=pack_u64(chain), media=placed.media)
