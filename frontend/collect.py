"""The answer in one piece: rows are gathered until every choice has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from broker.messages import Finish, Row, TokenLogprob
from broker.said import plain
from frontend.logprobs import LogprobWriter
from frontend.schema.answers import UNSET, ChatAnswer, ChatChoice, ChatMessage, CompletionAnswer, CompletionChoice
from frontend.sse import Head
from frontend.usage import Tally
from frontend.writing import WholeWriter


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    fin: Finish | None = None


class Collector(WholeWriter):
    """The answers of chat and completions."""

    def __init__(
        self,
        head: Head,
        tally: Tally,
        *,
        choices: int,
        chat: bool,
        logprobs: LogprobWriter | None = None,
        token_ids: bool = False,
        echo: Sequence[str] = (),
        prompt_ids: Sequence[list[int]] = (),
    ) -> None:
        self.open = choices
        self._head = head
        self._tally = tally
        self._chat = chat
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._prompt_ids = prompt_ids
        self._choices = [_Choice([echo[i]] if echo else []) for i in range(choices)]

    def take(self, rows: list[Row]) -> None:
        for row in rows:
            choice = self._choices[row.choice]
            choice.texts.append(plain(row.texts))
            choice.ids += row.ids
            if row.logprobs:
                choice.logprobs += row.logprobs
            self._tally.completion += len(row.ids)
            if (fin := row.fin) is not None:
                if fin.tail:
                    choice.texts.append(plain([fin.tail]))
                choice.fin = fin
                self.open -= 1
                self._tally.end(row.choice, fin)

    def body(self) -> bytes:
        """The JSON of the whole answer; call it once `open` is 0."""
        head = self._head
        if self._chat:
            return msgspec.json.encode(
                ChatAnswer(
                    id=head.id,
                    created=head.created,
                    model=head.model,
                    system_fingerprint=head.fingerprint,
                    choices=[self._chat_choice(i, c) for i, c in enumerate(self._choices)],
                    usage=self._tally.usage(),
                    prompt_token_ids=self._prompt_ids[0] if self._prompt_ids else UNSET,
                )
            )
        return msgspec.json.encode(
            CompletionAnswer(
                id=head.id,
                created=head.created,
                model=head.model,
                system_fingerprint=head.fingerprint,
                choices=[self._completion_choice(i, c) for i, c in enumerate(self._choices)],
                usage=self._tally.usage(),
            )
        )

    def _chat_choice(self, index: int, choice: _Choice) -> ChatChoice:
        fin = choice.fin or Finish(reason="stop")
        return ChatChoice(
            index=index,
            message=ChatMessage("assistant", "".join(choice.texts)),
            logprobs=self._logprobs.chat(choice.logprobs) if self._logprobs else None,
            finish_reason=fin.reason,
            stop_reason=fin.stop,
            token_ids=choice.ids if self._token_ids else UNSET,
        )

    def _completion_choice(self, index: int, choice: _Choice) -> CompletionChoice:
        fin = choice.fin or Finish(reason="stop")
        return CompletionChoice(
            index=index,
            text="".join(choice.texts),
            logprobs=self._logprobs.completion(choice.logprobs, index) if self._logprobs else None,
            finish_reason=fin.reason,
            stop_reason=fin.stop,
            token_ids=choice.ids if self._token_ids else UNSET,
            prompt_token_ids=self._prompt_ids[index] if self._prompt_ids else UNSET,
        )
