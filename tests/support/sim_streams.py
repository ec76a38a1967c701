"""Clients in threads that stream completions of the simulator, whose exact text is known."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import openai

from headrace.workers.sim.tokens import expected_text
from tests.support.up_process import RunningUp

JOIN_S = 90.0


def client_of(up: RunningUp) -> openai.OpenAI:
    """A client that does not hide a failure by a second try."""
    return openai.OpenAI(base_url=f"{up.state()['url']}/v1", api_key="none", max_retries=0, timeout=60)


def wrong_with(api: openai.OpenAI, prompt: list[int], tokens: int, on_chunk: Callable[[], None] = lambda: None) -> str:
    """Stream a completion. Return what was wrong with it, empty where its text is exact."""
    text = ""
    try:
        stream = api.completions.create(
            model="sim", prompt=prompt, max_tokens=tokens, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        for chunk in stream:
            on_chunk()
            text += "".join(choice.text for choice in chunk.choices)
    except openai.OpenAIError as error:
        return repr(error)
    return "" if text == expected_text(prompt, tokens) else f"{prompt}: {text[-200:]!r}"


@contextmanager
def in_threads(work: Callable[[int], None], count: int, *, stop: Callable[[], None] = lambda: None) -> Iterator[None]:
    """`work(0)` to `work(count - 1)` run beside the block. Afterwards `stop` is called and all have ended."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop()
        for thread in threads:
            thread.join(JOIN_S)
    assert not any(thread.is_alive() for thread in threads), "a client waits for ever"
