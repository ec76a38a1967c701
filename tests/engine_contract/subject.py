"""A started engine under test, what came out of it, and what its tests need to know of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import POOLING_KINDS, Engine, EngineConfig, EngineInfo, Output, Sequence, StoredTensor
from headrace.workers.errors import RequestInvalid, UnsupportedByEngine
from headrace.workers.kit import EngineSupport, words

MediaPrompt = tuple[list[int], list[Mapping[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Means:
    """What an engine's tests need besides the engine: things to load, to send, and the way to kill it."""

    adapters: tuple[str, ...] = ()  # places from which adapters can be loaded: two, unlike each other
    media: Callable[[EngineInfo, str, int], MediaPrompt] | None = None  # kind and number of an item → a prompt with it
    embeds: Callable[[list[int]], StoredTensor] | None = None  # the embeddings of these tokens
    embeds_are_tokens: bool = True  # the embeddings of a prompt give the answer to that prompt
    kill: Callable[[Engine], Awaitable[None]] | None = None  # what ends a started engine as a crash would
    start_s: float = 60.0
    end_s: float = 60.0  # the longest wait for the end of a sequence
    events_have_salts: bool = True  # else they tell blocks of salted prompts as those of plain ones
    computes_penalties: bool = True  # a stand-in may not: then nothing can be said of them
    least_rank: int = 1  # 0 for an engine that does not tell the rank of every prompt token
    offers_are_counted: bool = True  # the load of an idle prefill side shows the blocks on offer
    senseless: bool = False  # its model lacks layers: it would write white space for ever wherever a grammar lets it


@dataclass(kw_only=True)
class Subject:
    """An engine, started, with everything that came out of it."""

    engine: Engine
    support: EngineSupport
    means: Means
    info: EngineInfo
    calls: list[list[Output]] = field(default_factory=list)
    outputs: dict[str, list[Output]] = field(default_factory=dict)
    _ended: dict[str, asyncio.Event] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _vocabulary: Any = None

    @property
    def declared(self) -> frozenset[str]:
        return words(self.engine.capabilities, self.info.kinds)

    @property
    def pools(self) -> bool:
        return bool(POOLING_KINDS & set(self.info.kinds))

    def sink(self, outputs: list[Output]) -> None:
        self.calls.append(outputs)
        for output in outputs:
            self.outputs.setdefault(output.id, []).append(output)
            if (output.finish or output.fault) and output.id in self._ended:
                self._ended[output.id].set()

    def prompt(self, seed: int, blocks: float = 2.5) -> list[int]:
        """A prompt of its own, some blocks long."""
        most = min(self.info.vocab_size, 40_000) - 200
        length = max(2, int(blocks * self.info.block_size))
        return [(seed * 7919 + n * 31) % most + 100 for n in range(length)]

    def text(self, ids: Seq[int]) -> str:
        if self._vocabulary is None:
            self._vocabulary = Tokenizer.from_file(str(Path(self.info.tokenizer_dir) / "tokenizer.json"))
        return str(self._vocabulary.decode(list(ids), skip_special_tokens=True))

    def encode(self, text: str) -> list[int]:
        self.text(())
        return list(self._vocabulary.encode(text, add_special_tokens=False).ids)

    def grammatical(self, tokens: int) -> Sampling:
        """So many tokens at most, until the grammar ends them."""
        if not self.means.senseless:
            return greedy(tokens, ignore_eos=False)
        self.text(())
        blank = [
            n
            for n in range(self._vocabulary.get_vocab_size())
            if self._vocabulary.decode([n], skip_special_tokens=False).isspace()
        ]
        return greedy(tokens, ignore_eos=False, logit_bias=dict.fromkeys(blank, -100.0))

    def sequence(self, token_ids: list[int], sampling: Sampling | None = None, **options: Any) -> Sequence:
        options = {"prompt_tokens": len(token_ids), "sampling": sampling or greedy(8)} | options
        return Sequence(id=f"c{next(self._numbers)}-1-0", token_ids=list(token_ids), **options)

    async def submit(self, token_ids: list[int], sampling: Sampling | None = None, **options: Any) -> str:
        return await self.give(self.sequence(token_ids, sampling, **options))

    async def give(self, sequence: Sequence) -> str:
        self._ended[sequence.id] = asyncio.Event()
        self.outputs[sequence.id] = []
        await self.engine.submit(sequence)
        return sequence.id

    async def end(self, name: str) -> list[Output]:
        async with asyncio.timeout(self.means.end_s):
            await self._ended[name].wait()
        return self.outputs[name]

    async def run(self, token_ids: list[int], sampling: Sampling | None = None, **options: Any) -> list[Output]:
        return await self.end(await self.submit(token_ids, sampling, **options))

    async def ids(self, token_ids: list[int], sampling: Sampling | None = None, **options: Any) -> list[int]:
        outputs = await self.run(token_ids, sampling, **options)
        assert outputs[-1].fault is None, outputs[-1].fault
        return emitted(outputs)

    async def begins(self, name: str) -> None:
        """Wait for the first output of a sequence."""
        await self.until(lambda: bool(self.outputs[name]))

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(self.means.end_s):
            while not holds():
                await asyncio.sleep(0.002)

    async def idle(self) -> None:
        """Wait until nothing is inside and nothing is held."""

        def empty() -> bool:
            load = self.engine.load()
            return (load.running, load.waiting, load.blocks_used) == (0, 0, 0)

        await self.until(empty)

    async def refuses(self, word: str, token_ids: list[int], sampling: Sampling | None = None, **options: Any) -> None:
        """The engine refuses this sequence by name, and nothing of it stays. Fails if it is served instead."""
        sequence = self.sequence(token_ids, sampling, **options)
        with pytest.raises((UnsupportedByEngine, RequestInvalid), match=f"(?i){word}"):
            await self.give(sequence)
        assert not self.outputs[sequence.id], f"{word} is served, though it is refused"
        await self.idle()


def greedy(tokens: int, **options: Any) -> Sampling:
    """So many tokens, the likeliest ones, whatever would end them."""
    return Sampling(temperature=0.0, max_tokens=tokens, **({"ignore_eos": True} | options))


def emitted(outputs: Seq[Output]) -> list[int]:
    return [token for output in outputs for token in output.ids]


@contextlib.asynccontextmanager
async def started(
    make: Callable[[], Engine], config: EngineConfig, support: EngineSupport, means: Means | None = None
) -> AsyncIterator[Subject]:
    """Start an engine for its tests, and stop it after them."""
    means = means or Means()
    engine = make()
    subject: Subject | None = None

    def sink(outputs: list[Output]) -> None:
        assert subject is not None, "an output before the engine has started"
        subject.sink(outputs)

    async with asyncio.timeout(means.start_s):
        info = await engine.start(config, sink)
    subject = Subject(engine=engine, support=support, means=means, info=info)
    try:
        yield subject
    finally:
        await engine.stop(5.0)
