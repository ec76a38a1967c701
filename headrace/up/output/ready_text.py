"""Writes the ready text of `headrace up`, with an example request for the kind of the model."""

from __future__ import annotations

from collections.abc import Sequence

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
