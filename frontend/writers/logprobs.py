"""Writes log probabilities in OpenAI's forms, and those of prompts in the form of vLLM's server."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.broker.messages import TokenLogprob
from headrace.frontend.schema.answers import (
    ChatLogprobs,
    CompletionLogprobs,
    ContentLogprob,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)

FLOOR = -9999.0  # JSON has no infinity


class LogprobWriter:
    """Writes `top` alternatives per token. `as_ids` writes tokens as `token_id:N`, as some are no valid text."""

    __slots__ = ("_as_ids", "_offsets", "_top")

    def __init__(self, top: int, *, choices: int, as_ids: bool = False) -> None:
        self._top = top
        self._as_ids = as_ids
        self._offsets = [0] * choices

    def _name(self, token_id: int, raw: bytes) -> str:
        return f"token_id:{token_id}" if self._as_ids else raw.decode("utf-8", "replace")

    def chat(self, items: Sequence[TokenLogprob]) -> ChatLogprobs:
        """Return log probabilities in the form of the chat API."""
        return ChatLogprobs(
            [
                ContentLogprob(
                    self._name(item.id, item.token),
                    max(item.logprob, FLOOR),
                    list(item.token),
                    [self._alternative(i, raw, value) for i, raw, value in item.top[: self._top]],
                )
                for item in items
            ]
        )

    def _alternative(self, token_id: int, raw: bytes, value: float) -> TopLogprob:
        """Return an alternative. For tokens written as ids, the bytes are those of the id's text, as in vLLM's server."""
        name = self._name(token_id, raw)
        return TopLogprob(name, max(value, FLOOR), list(name.encode() if self._as_ids else raw))

    def completion(
        self, items: Sequence[TokenLogprob | None], choice: int, *, first: tuple[int, str] = (0, "")
    ) -> CompletionLogprobs:
        """Return log probabilities in the form of the completions API.

        None stands for `first`: id and text of the first token of an echoed prompt.
        """
        out = CompletionLogprobs([], [], [], [])
        offset = self._offsets[choice]
        for item in items:
            if item is None:
                name = f"token_id:{first[0]}" if self._as_ids else first[1]
                out.token_logprobs.append(None)
                out.top_logprobs.append(None)
            else:
                name = self._name(item.id, item.token)
                value = max(item.logprob, FLOOR)
                top = {self._name(i, raw): max(v, FLOOR) for i, raw, v in item.top[: self._top]}
                top.setdefault(name, value)  # always include the chosen token
                out.token_logprobs.append(value)
                out.top_logprobs.append(top)
            out.tokens.append(name)
            out.text_offset.append(offset)
            offset += len(name)
        self._offsets[choice] = offset
        return out


def prompt_logprobs(items: Sequence[TokenLogprob | None]) -> PromptLogprobs:
    """Return log probabilities of a prompt: per position its own token first, then the likeliest ones."""
    return [None if item is None else _alternatives(item) for item in items]


def _alternatives(item: TokenLogprob) -> dict[str, PromptLogprob]:
    found = {str(item.id): PromptLogprob(max(item.logprob, FLOOR), item.rank or None, item.token.decode("utf-8", "replace"))}
    for rank, (token_id, raw, value) in enumerate(item.top, 1):
        found.setdefault(str(token_id), PromptLogprob(max(value, FLOOR), rank, raw.decode("utf-8", "replace")))
    return found
