"""Progress and ready text of `headrace up`, with an example request for the kind of the model."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence

import structlog

from headrace.up.parts import base_url, kinds_of, served_models
from headrace.up.terminal import Terminal

_CHAT = """
  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
    "model": "{model}", "max_tokens": 64,
    "messages": [{{"role": "user", "content": "Say hello."}}]}}'

or in Python:

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="none")
  hello = [{{"role": "user", "content": "Say hello."}}]
  stream = client.chat.completions.create(model="{model}", messages=hello, stream=True)
  for chunk in stream:
      print(chunk.choices[0].delta.content or "", end="", flush=True)
"""
_EMBEDDING = """
  curl {url}/v1/embeddings -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "input": ["Say hello.", "Say goodbye."]}}'

or in Python:

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="none")
  answer = client.embeddings.create(model="{model}", input=["Say hello.", "Say goodbye."])
  print([len(item.embedding) for item in answer.data])
"""
_SCORE = """
  curl {url}/v1/rerank -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "query": "a greeting", "documents": ["Hello!", "It rains."]}}'
"""
_CLASSIFY = """
  curl {url}/v1/classify -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "input": ["Say hello."]}}'
"""
_IMAGE = """
  curl {url}/v1/images/generations -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "prompt": "A river at dawn", "size": "256x256"}}' \\
    | python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["b64_json"])' | base64 -d > river.png
"""
_VIDEO = """
  curl {url}/v1/videos -H 'Content-Type: application/json' \\
    -d '{{"model": "{model}", "prompt": "A river at dawn", "seconds": "4"}}'
  curl {url}/v1/videos                             # how it stands
  curl {url}/v1/videos/ID/content -o river.mp4     # once it is completed
"""
_EXAMPLES = {
    "chat": _CHAT,
    "embedding": _EMBEDDING,
    "score": _SCORE,
    "classify": _CLASSIFY,
    "image": _IMAGE,
    "video": _VIDEO,
}
"""The first kind that fits decides."""


def ready_text(url: str, model: str, *, after_s: float, kinds: Sequence[str] = (), console: str = "") -> str:
    """Return the text that `up` prints once a request can be answered. `kinds` are those of the model's card.

    `console` is the link to the console, empty if there is none.
    """
    example = next((text for kind, text in _EXAMPLES.items() if kind in kinds), _CHAT)
    ready = f"Headrace is ready after {after_s:.1f} s and serves {model}."
    where = f"  {url}/v1    for clients\n  {url}/docs  in a browser: all routes\n"
    where += f"  {console}  the console\n" if console else ""
    return f"\n{ready}\n\n{where}{example.format(url=url, model=model)}\nCtrl-C stops everything.\n"


_log = structlog.get_logger()

_POLL_S = 0.05
_LOG_PROGRESS_EVERY_S = 10.0


async def until_answering(
    terminal: Terminal, host: str, ports: Sequence[int], *, tls: bool, waiting_for: Callable[[], str], began_s: float
) -> list[str]:
    """Show progress until the frontends at all `ports` say that some model can answer, and return the names of those that can.

    `began_s` is a time of the monotonic clock.
    """
    next_status_s = began_s + terminal.QUIET_START_S
    next_log_s = began_s + _LOG_PROGRESS_EVERY_S
    while True:
        served = [await served_models(host, port, tls=tls) for port in ports]
        if all(served):
            return served[0]
        now_s = time.monotonic()
        elapsed_s = now_s - began_s
        if now_s >= next_status_s:
            next_status_s = now_s + terminal.STATUS_EVERY_S
            terminal.waiting(waiting_for(), elapsed_s)
        if now_s >= next_log_s:
            next_log_s = now_s + _LOG_PROGRESS_EVERY_S
            _log.info("up.waiting", waiting_for=waiting_for(), elapsed_s=round(elapsed_s))
        await asyncio.sleep(_POLL_S)


async def say_ready(host: str, port: int, *, tls: bool, models: Sequence[str], after_s: float, console: str = "") -> None:
    """Print the ready line with commands to try. `models` can answer; `after_s` is the time that the start took.

    `console` is the link to the console, which holds its key and is printed only, never logged.
    """
    url = base_url(host, port, tls=tls)
    _log.info("up.ready", url=url, models=models, elapsed_s=round(after_s, 2))
    model = models[0]
    kinds = await kinds_of(host, port, model, tls=tls)
    sys.stdout.write(ready_text(url, model, after_s=after_s, kinds=kinds, console=console))
    sys.stdout.flush()
