"""Prompts become token ids, their packed form and their block chain: once, here, for the whole way.

Short prompts are encoded on the event loop, because a hop to a thread and back costs more than they do; long ones in a small
thread pool (the tokenizer releases the GIL).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from tokenizers import Tokenizer

from broker.blocks import block_chain
from broker.cards import ModelCard
from broker.codec import pack_u32, pack_u64
from broker.errors import MalformedMessage
from frontend.errors import BadRequest, ContextTooLong, ModelUnusable


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the broker wants it. `packed` is the ids as little-endian u32, `hashes` the chain as little-endian u64."""

    tokens: int
    packed: bytes
    hashes: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What the request and the model say about length. `param` is the parameter to blame."""

    context_length: int
    wanted: int | None  # tokens the client asked for; None = as many as fit
    truncate: int | None  # keep this many of the last prompt tokens; -1 = as many as fit
    param: str

    def trim(self, ids: list[int]) -> list[int]:
        """Apply `truncate_prompt_tokens`. Raises ContextTooLong when it asks for more than the context."""
        if self.truncate is None:
            return ids
        keep = self.context_length - (self.wanted or 1) if self.truncate == -1 else self.truncate
        if keep > self.context_length:
            message = f"truncate_prompt_tokens ({keep}) exceeds the model's maximum context length ({self.context_length})"
            raise ContextTooLong(message, param="truncate_prompt_tokens")
        return ids[-keep:] if 0 < keep < len(ids) else ids

    def check(self, tokens: int) -> None:
        """Raises ContextTooLong with the words OpenAI uses, which clients and frameworks look for."""
        if tokens + (self.wanted or 1) <= self.context_length:
            return
        if self.wanted is None:
            told = f"your prompt resulted in {tokens} tokens"
        else:
            told = (
                f"you requested {tokens + self.wanted} tokens ({tokens} in the {self.param}, {self.wanted} in the completion)"
            )
        message = f"This model's maximum context length is {self.context_length} tokens. However, {told}. "
        raise ContextTooLong(message + f"Please reduce the length of the {self.param} or completion.", param=self.param)


class PromptEncoder:
    """One model's tokenizer. Stateless after construction, so threads may share it."""

    def __init__(self, tokenizer_json: bytes, card: ModelCard, *, executor: Executor, inline_bytes: int) -> None:
        """Raises ModelUnusable when the bytes are no tokenizer. Takes 0.1 s and more: call it off the event loop."""
        try:
            self._tokenizer = Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # the library raises plain Exception
            raise ModelUnusable(f"the tokenizer of {card.model!r} cannot be loaded: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._card = card
        self._executor = executor
        self._inline_bytes = inline_bytes
        self._bos = self._tokenizer.token_to_id(card.bos_token) if card.add_bos and card.bos_token else None
        self._vocab_size = card.vocab_size or self._tokenizer.get_vocab_size()

    async def encode(self, text: str, *, add_special_tokens: bool, fit: Fit, salt: str | None = None) -> Prompt:
        """Raises ContextTooLong, and BadRequest for a prompt without any token."""
        if len(text) <= self._inline_bytes:
            return self.encode_now(text, add_special_tokens=add_special_tokens, fit=fit, salt=salt)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._executor, lambda: self.encode_now(text, add_special_tokens=add_special_tokens, fit=fit, salt=salt)
        )

    def encode_now(self, text: str, *, add_special_tokens: bool, fit: Fit, salt: str | None = None) -> Prompt:
        try:
            # a batch of one is a quarter cheaper than `encode`: it keeps no offsets
            ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except UnicodeEncodeError as error:
            raise BadRequest(f"the prompt is not valid Unicode: {error}", param=fit.param) from None
        if add_special_tokens and self._bos is not None and (not ids or ids[0] != self._bos):
            ids.insert(0, self._bos)
        return self._pack(ids, fit, salt)

    async def take_ids(self, ids: Sequence[int], *, fit: Fit, salt: str | None = None) -> Prompt:
        """A prompt that came as ids. Raises BadRequest for ids outside the vocabulary, and as `encode`."""
        if ids and (min(ids) < 0 or max(ids) >= self._vocab_size):
            wrong = next(i for i in ids if not 0 <= i < self._vocab_size)
            raise BadRequest(f"token id {wrong} is outside the vocabulary of {self._vocab_size}", param=fit.param)
        return self._pack(list(ids), fit, salt)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of prompt ids, for `echo`."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _pack(self, ids: list[int], fit: Fit, salt: str | None) -> Prompt:
        ids = fit.trim(ids)
        if not ids:
            raise BadRequest("the prompt is empty", param=fit.param)
        fit.check(len(ids))
        try:
            packed = pack_u32(ids)
        except MalformedMessage as error:
            raise BadRequest(str(error), param=fit.param) from None
        block_size = self._card.block_size
        hashes = pack_u64(block_chain(packed, block_size, salt=salt)) if block_size else b""
        return Prompt(len(ids), packed, hashes)
