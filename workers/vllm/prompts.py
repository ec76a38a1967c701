"""Builds the prompts of an engine's requests, and keeps what encode workers have made of their media while they need it."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import structlog

from headrace.workers.errors import EngineError, UnsupportedByEngine
from headrace.workers.vllm import convert
from headrace.workers.vllm.embeddings.item_folder import LentItems
from headrace.workers.vllm.media import MediaReader, items_of
from headrace.workers.vllm.step_batcher import EngineRequest

_log = structlog.get_logger()


class Prompts:
    """The prompts of one engine. Without `reader` the model takes no media, without `lent` no embeddings are passed."""

    def __init__(self, llm: Any, reader: MediaReader | None, lent: LentItems | None, *, embeds: bool) -> None:
        """`embeds`: whether prompts may be given as embeddings."""
        self._llm = llm
        self._embeds = embeds
        self._reader = reader
        self._lent = lent

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    async def prompt(self, run: EngineRequest) -> Any:
        """Build vLLM's prompt of a request. Raises RequestInvalid, UnsupportedByEngine."""
        sequence = run.sequence
        if sequence.media:
            return await self._with_media(run)
        if sequence.prompt_embeds is None:
            return convert.to_prompt(sequence)
        if not self._embeds:
            raise UnsupportedByEngine("this vLLM was started without enable_prompt_embeds", param="prompt_embeds")
        return await asyncio.to_thread(convert.to_prompt, sequence, self._llm.model_config)

    async def _with_media(self, run: EngineRequest) -> Any:
        if self._reader is None:
            raise UnsupportedByEngine("this model takes no media, only text", param="messages")
        sequence = run.sequence
        made = await self._reader.prompt(sequence)
        run.token_ids, run.prompt_tokens = made.token_ids, made.tokens
        if self._lent is not None and sequence.embeddings:
            names = [item.name for item in items_of(sequence)]
            records = {names[number]: record for number, record in sequence.embeddings.items() if number < len(names)}
            try:
                self._lent.lend(sequence.id, records)  # files in memory or a cache of the kernel
            except OSError as error:
                _log.warning("media.not_lent", sequence=sequence.id, error=str(error))  # the engine encodes them
        return made.given

    def forget(self, run: EngineRequest) -> None:
        """Drop the items of a request from vLLM's cache: vLLM has processed them, but its core may not have got them."""
        self.ended(run.sequence.id)
        if self._reader is not None and run.prompt_tokens is not None:
            self._reader.forget(run.sequence)

    def ended(self, sequence_id: str) -> None:
        """Remove what was there for this sequence alone."""
        if self._lent is not None:
            self._lent.end(sequence_id)

    async def encode(self, item: Any) -> bytes:
        """Have the encoder compute one item, and return its record. Raises RequestInvalid, UnsupportedByEngine, EngineError."""
        if self._reader is None or self._lent is None:
            raise UnsupportedByEngine("this vLLM encodes no media for others")
        from vllm import SamplingParams

        name = f"encode-{uuid.uuid4().hex}"  # one of its own: for a name that it knows, vLLM's encoder does not run
        given = await self._reader.lone(item, name)
        async for _ in self._llm.generate(given, SamplingParams(max_tokens=1, temperature=0.0, detokenize=False), name):
            pass
        record = await asyncio.to_thread(self._lent.take, name)
        if record is None:
            raise EngineError("vLLM has encoded the item and handed nothing over; its own log lines may say why")
        return record
