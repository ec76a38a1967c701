"""Log probabilities in the two forms OpenAI has for them."""

from __future__ import annotations

from collections.abc import Sequence

from broker.messages import TokenLogprob
from frontend.schema.answers import ChatLogprobs, CompletionLogprobs, ContentLogprob, TopLogprob

FLOOR = -9999.0  # JSON has no infinity


class LogprobWriter:
    """`top` alternatives per token; `as_ids` writes tokens as `token_id:N`, for those that are no valid text."""

    __slots__ = ("_as_ids", "_offsets", "_top")

    def __init__(self, top: int, *, choices: int, as_ids: bool = False, start: Sequence[int] = ()) -> None:
        """`start` is the text offset at which each choice begins (the length of an echoed prompt)."""
        self._top = top
        self._as_ids = as_ids
        self._offsets = list(start) or [0] * choices

    def _name(self, token_id: int, raw: bytes) -> str:
        return f"token_id:{token_id}" if self._as_ids else raw.decode("utf-8", "replace")

    def chat(self, items: Sequence[TokenLogprob]) -> ChatLogprobs:
        return ChatLogprobs(
            [
                ContentLogprob(
                    self._name(item.id, item.token),
                    max(item.logprob, FLOOR),
                    list(item.token),
                    [TopLogprob(self._name(i, raw), max(value, FLOOR), list(raw)) for i, raw, value in item.top[: self._top]],
                )
                for item in items
            ]
        )

    def completion(self, items: Sequence[TokenLogprob], choice: int) -> CompletionLogprobs:
        out = CompletionLogprobs([], [], [], [])
        offset = self._offsets[choice]
        for item in items:
            name = self._name(item.id, item.token)
            value = max(item.logprob, FLOOR)
            top = {self._name(i, raw): max(v, FLOOR) for i, raw, v in item.top[: self._top]}
            top.setdefault(name, value)  # the chosen token is always among them
            out.tokens.append(name)
            out.token_logprobs.append(value)
            out.top_logprobs.append(top)
            out.text_offset.append(offset)
            offset += len(name)
        self._offsets[choice] = offset
        return out
