"""Measures a prompt on the ingress: the next turn of a long conversation, and the longest block of the event loop.

Both with the bundled model's tokenizer and chat template, in this process, without NATS or HTTP.  Turns are timed with and
without the memory of prefixes, in turn, so that the ratio holds on a busy machine; each figure is the median of some rounds.

The loop is watched by a task that asks for its turn again and again.  How long it waits says too much on a busy machine, where
every process waits for a processor; so of every wait only as much counts as this thread and the pool's have computed in it,
which is what they could have held the interpreter for.  Linux only.

    python benchmarks/ingress/prompt_cost.py [--sizes 10000,30000,100000] [--rounds 9] [--long 10000,100000,1000000]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from headrace.broker.codec import unpack_u32
from headrace.broker.models.cards import ModelCard
from headrace.frontend.prompts.model_cache import LoadedModel
from headrace.frontend.prompts.prompt_encoder import LengthLimit, PromptCache, PromptEncoder
from headrace.frontend.prompts.templates import ChatTemplate

ASSETS = Path(__file__).parents[2] / "workers" / "assets" / "smollm2"
TEXT = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
CARD = ModelCard(model="bench", pool="bench-0", context_length=4_000_000, block_size=16)
LIMIT = LengthLimit(context_length=4_000_000, wanted=1, truncate=None, param="messages")
INLINE = 8192
TURN_WORDS = 150
PAUSE_S = 0.0005  # between two looks at the clock
Conversation = list[dict[str, Any]]


def model(cache: PromptCache | None, pool: ThreadPoolExecutor) -> LoadedModel:
    """Return the bundled model, as the frontend has it ready."""
    encoder = PromptEncoder((ASSETS / "tokenizer.json").read_bytes(), CARD, executor=pool, inline_bytes=INLINE, cache=cache)
    encoder.use_fast_tokenizer(lambda: None)
    template = ChatTemplate((ASSETS / "chat_template.jinja").read_text(), names={})
    return LoadedModel(CARD, encoder, template, "fp", pool, INLINE)


def words(count: int, seed: int) -> str:
    """Words of a real document in an order of their own, so that no two texts are the same."""
    random_words = random.Random(seed).choices(TEXT.split(" "), k=count)
    return " ".join(random_words)


def conversation(tokens: int, seed: int) -> Conversation:
    """About so many tokens, in turns of equal length."""
    per_turn = TURN_WORDS * 1.6  # tokens in a word of this text, about
    turns = max(1, int(tokens / per_turn)) | 1
    return [{"role": "assistant" if i % 2 else "user", "content": words(TURN_WORDS, seed * 100_000 + i)} for i in range(turns)]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds, and the result."""
    began = time.perf_counter()
    result = work()
    return (time.perf_counter() - began) * 1000, result


def next_turns(sizes: list[int], rounds: int) -> None:
    """Print what two more messages cost, for conversations of these sizes."""
    pool = ThreadPoolExecutor(1)
    print("next turn of a conversation (milliseconds, median)")
    print(f"{'tokens':>8} {'new':>6} {'render':>8} {'plain':>8} {'remembering':>12} {'ratio':>7} {'with render':>12}")
    for size in sizes:
        plain, remembering = model(None, pool), model(PromptCache(64 << 20), pool)
        talk = conversation(size, seed=size)
        assert plain.template is not None
        before = remembering.encoder.encode_now(plain.template.render(talk), add_special_tokens=False, limit=LIMIT)
        render, slow, fast = [], [], []
        for i in range(rounds):
            talk += [
                {"role": "assistant", "content": words(TURN_WORDS, -2 * i - 1)},
                {"role": "user", "content": words(TURN_WORDS, -2 * i - 2)},
            ]
            took, text = timed(lambda: plain.template.render(talk))  # type: ignore[union-attr]  # noqa: B023  # called at once
            render.append(took)
            kinds = [(plain, slow), (remembering, fast)]
            prompts = []
            for kind, times in kinds if i % 2 else kinds[::-1]:
                took, prompt = timed(lambda: kind.encoder.encode_now(text, add_special_tokens=False, limit=LIMIT))  # noqa: B023
                times.append(took)
                prompts.append(prompt)
            if prompts[0] != prompts[1]:
                raise SystemExit("the two prompts differ")
            new, before = prompts[0].tokens - before.tokens, prompts[0]
        r, s, f = (statistics.median(times) for times in (render, slow, fast))
        print(f"{before.tokens:>8} {new:>6} {r:>8.2f} {s:>8.2f} {f:>12.2f} {s / f:>6.1f}x {(r + s) / (r + f):>11.1f}x")


def computed() -> float:
    """Seconds of processor time that the threads of this program have had; the tokenizer's own threads never hold it up."""
    times = (Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text() for thread in threading.enumerate())
    return sum(int(line.split()[0]) for line in times) / 1e9


async def longest_block(work: Callable[[], Awaitable[Any]]) -> tuple[float, float, float]:
    """Milliseconds the loop stood still at most while `work` ran: computing, and by the clock; and how long it ran."""
    worst, by_clock, done = 0.0, 0.0, False

    async def watch() -> None:
        nonlocal worst, by_clock
        last, last_cpu = time.perf_counter(), computed()
        while not done:
            await asyncio.sleep(PAUSE_S)
            now, cpu = time.perf_counter(), computed()
            by_clock = max(by_clock, now - last)
            worst = max(worst, min(now - last, cpu - last_cpu))
            last, last_cpu = now, cpu

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.01)
    began = time.perf_counter()
    await work()
    took = time.perf_counter() - began
    done = True
    await watching
    return worst * 1000, by_clock * 1000, took * 1000


async def blocks(sizes: list[int], rounds: int) -> None:
    """Print how long prompts of these sizes hold the loop up."""
    pool = ThreadPoolExecutor(2)
    print("longest block of the event loop (milliseconds, worst of all rounds)")
    print(f"{'tokens':>8} {'':>19} {'computing':>10} {'by the clock':>13} {'work, median':>13}")
    idle = [await longest_block(lambda: asyncio.sleep(0.5)) for _ in range(rounds)]
    print(f"{'':>8} {'nothing':>19} {max(i[0] for i in idle):>10.1f} {max(i[1] for i in idle):>13.1f}")
    for size in sizes:
        ready = model(PromptCache(64 << 20), pool)
        talks = [conversation(size, seed=i) for i in range(rounds)]
        texts = [[{"role": "user", "content": words(int(size / 1.6), seed=i)}] for i in range(rounds)]
        ids = unpack_u32((await prompt_of(model(None, pool), texts[0])).packed)
        kinds: dict[str, list[Callable[[], Awaitable[Any]]]] = {
            "conversation, new": [partial(prompt_of, ready, talk) for talk in talks],
            "conversation, again": [partial(prompt_of, ready, talks[-1])] * rounds,
            "one message": [partial(prompt_of, ready, text) for text in texts],
            "token ids": [partial(ready.encoder.take_ids, ids, limit=LIMIT)] * rounds,
        }
        for name, works in kinds.items():
            watched = [await longest_block(work) for work in works]
            took = statistics.median(took for _, _, took in watched)
            stood, by_clock = max(w[0] for w in watched), max(w[1] for w in watched)
            print(f"{len(ids):>8} {name:>19} {stood:>10.1f} {by_clock:>13.1f} {took:>13.1f}")


async def prompt_of(ready: LoadedModel, messages: Conversation) -> Any:
    """As a chat request does it."""
    text = await ready.render(messages)
    return await ready.encoder.encode(text, add_special_tokens=False, limit=LIMIT)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="10000,30000,100000", help="tokens of the conversations")
    parser.add_argument("--long", default="10000,100000,1000000", help="tokens of the prompts the loop is watched with")
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args()
    next_turns([int(size) for size in chosen.sizes.split(",")], chosen.rounds)
    uvloop.run(blocks([int(size) for size in chosen.long.split(",")], max(3, chosen.rounds // 2)))


if __name__ == "__main__":
    main()
