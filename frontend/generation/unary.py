"""Writers of whole chat and completions answers, and of answers that are stored as well."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from headrace.broker.jobs import OutputParts, parts_of, plain
from headrace.broker.messages.frames import Finish, Row, TokenLogprob
from headrace.frontend.answer_schema import (
    UNSET,
    ChatAnswer,
    ChatChoice,
    ChatMessage,
    CompletionAnswer,
    CompletionChoice,
    PromptLogprobs,
)
from headrace.frontend.errors import FrontendError
from headrace.frontend.generation.content_blocks import message_of
from headrace.frontend.generation.sse import (
    AnswerOptions,
    EventForm,
    EventWriter,
    Head,
    StreamWriter,
    UsageCounter,
    WholeWriter,
    prompt_logprobs,
)


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list)
    parts: OutputParts = field(default_factory=OutputParts)  # in place of `texts` if the answer is parsed
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    fin: Finish | None = None


class UnaryWriter(WholeWriter):
    def __init__(self, head: Head, counter: UsageCounter, *, choices: int, chat: bool, options: AnswerOptions) -> None:
        self.open = choices
        self._head = head
        self._counter = counter
        self._chat = chat
        self._options = options
        self._choices = [_Choice([options.echo[i]] if options.echo else []) for i in range(choices)]

    def take(self, rows: list[Row]) -> None:
        for row in rows:
            choice = self._choices[row.choice]
            if not self._options.silent:
                self._add(choice, row)
            self._counter.completion += len(row.ids)
            if (fin := row.fin) is not None:
                choice.fin = fin
                self.open -= 1
                self._counter.end(row.choice, fin)

    def _add(self, choice: _Choice, row: Row) -> None:
        texts = row.texts if row.fin is None or not row.fin.tail else [*row.texts, row.fin.tail]
        if self._options.parse is None:
            choice.texts.append(plain(texts))
        else:
            choice.parts.add(parts_of(texts))
        choice.ids += row.ids
        if row.logprobs:
            choice.logprobs += row.logprobs

    def body(self) -> bytes:
        """Return the JSON of the answer. Call it once `open` is 0."""
        head, options = self._head, self._options
        if self._chat:
            return msgspec.json.encode(
                ChatAnswer(
                    id=head.id,
                    created=head.created,
                    model=head.model,
                    system_fingerprint=head.fingerprint,
                    service_tier=head.service_tier,
                    choices=[self._chat_choice(i, c) for i, c in enumerate(self._choices)],
                    usage=self._counter.usage(),
                    prompt_logprobs=self._prompt_logprobs(self._choices[0]),
                    prompt_token_ids=options.prompt_ids[0] if options.prompt_ids else UNSET,
                    prompt_text=options.prompt_text if options.prompt_text is not None else UNSET,
                )
            )
        return msgspec.json.encode(
            CompletionAnswer(
                id=head.id,
                created=head.created,
                model=head.model,
                system_fingerprint=head.fingerprint,
                choices=[self._completion_choice(i, c) for i, c in enumerate(self._choices)],
                usage=self._counter.usage(),
            )
        )

    def _chat_choice(self, index: int, choice: _Choice) -> ChatChoice:
        fin, options = choice.fin or Finish(reason="stop"), self._options
        return ChatChoice(
            index=index,
            message=self._message(choice),
            logprobs=options.logprobs.chat(choice.logprobs) if options.logprobs else None,
            finish_reason=fin.reason,
            stop_reason=fin.stop,
            token_ids=choice.ids if options.token_ids else UNSET,
        )

    def _message(self, choice: _Choice) -> ChatMessage:
        echoed = "".join(choice.texts)
        parse, role = self._options.parse, self._options.role
        if parse is None:
            return ChatMessage(role=role, content=echoed)
        forced = parse.choice not in ("auto", "none")
        message = message_of(choice.parts, role=role, forced=forced, freeform=self._options.freeform)
        if echoed:
            message.content = echoed + (message.content or "")
        return message

    def _completion_choice(self, index: int, choice: _Choice) -> CompletionChoice:
        fin, options = choice.fin or Finish(reason="stop"), self._options
        logprobs = None
        if options.logprobs is not None and options.echo_first:
            items = [*(fin.prompt_logprobs or ()), *choice.logprobs]
            logprobs = options.logprobs.completion(items, index, first=options.echo_first[index])
        elif options.logprobs is not None:
            logprobs = options.logprobs.completion(choice.logprobs, index)
        return CompletionChoice(
            index=index,
            text="".join(choice.texts),
            logprobs=logprobs,
            finish_reason=fin.reason,
            stop_reason=fin.stop,
            token_ids=choice.ids if options.token_ids else UNSET,
            prompt_logprobs=self._prompt_logprobs(choice),
            prompt_token_ids=options.prompt_ids[index] if options.prompt_ids else UNSET,
        )

    def _prompt_logprobs(self, choice: _Choice) -> PromptLogprobs | msgspec.UnsetType:
        """Return the prompt's log probabilities if requested. As in vLLM's server, those of an echo are separate."""
        items = choice.fin.prompt_logprobs if choice.fin is not None else None
        return prompt_logprobs(items) if items is not None and self._options.prompt_logprobs else UNSET


# Writers that store the answer they write. Beside a stream the whole answer is collected and stored before its end.


class KeepAnswer(Protocol):
    """Stores the JSON of an answer. Ends in bounded time and raises nothing."""

    def __call__(self, answer: bytes, /) -> Awaitable[None]: ...


class StoringWhole(WholeWriter):
    """Writes an answer as `inner` does, and stores it before it is sent."""

    unsettled = True

    def __init__(self, inner: WholeWriter, keep: KeepAnswer) -> None:
        self.open = inner.open
        self._inner = inner
        self._keep = keep
        self._body = b""

    def take(self, rows: list[Row]) -> None:
        self._inner.take(rows)
        self.open = self._inner.open

    async def settle(self) -> None:
        self._body = self._inner.body()
        await self._keep(self._body)

    def body(self) -> bytes:
        return self._body


class StoringStream(StreamWriter):
    """Writes a stream as `inner` does, and stores what `whole` makes of the same rows before the last events are sent."""

    unsettled = True

    def __init__(self, inner: StreamWriter, whole: WholeWriter, keep: KeepAnswer) -> None:
        self.open = inner.open
        self._inner = inner
        self._whole = whole
        self._keep = keep

    def events(self, rows: list[Row]) -> bytes:
        self._whole.take(rows)
        events = self._inner.events(rows)
        self.open = self._inner.open
        return events

    async def settle(self) -> None:
        await self._keep(self._whole.body())

    def closing(self) -> bytes:
        return self._inner.closing()

    def failure(self, error: FrontendError) -> bytes:
        return self._inner.failure(error)


_encode = msgspec.json.Encoder().encode


class EchoWriter(EventWriter):
    """Writes completions that echo their prompt with log probabilities, or the prompt alone.

    The engine returns the log probabilities of a prompt at the end, but in the answer they come first. So each choice is held
    back and sent as one event.
    """

    def __init__(self, form: EventForm, head: Head, counter: UsageCounter, *, choices: int, options: AnswerOptions) -> None:
        super().__init__(form, head, counter, choices=choices, options=msgspec.structs.replace(options, echo=()))
        self._echo = options.echo
        self._held: dict[int, list[Row]] = {}

    def events(self, rows: list[Row]) -> bytes:
        out: list[bytes] = []
        for row in rows:
            self.counter.completion += len(row.ids)
            held = self._held.setdefault(row.choice, [])
            held.append(row)
            if (fin := row.fin) is not None:
                out += [self.opening(row.choice) or b"", self._whole(row.choice, held, fin), self.finish(row.choice, fin)]
                held.clear()
        return b"".join(out)

    def _whole(self, choice: int, rows: list[Row], fin: Finish) -> bytes:
        options = self.options
        shown = [] if options.silent else rows
        text = self._echo[choice] + "".join(plain(row.texts) for row in shown)
        if fin.tail and not options.silent:
            text += plain([fin.tail])
        logprobs = None
        if options.logprobs is not None:
            items = [*(fin.prompt_logprobs or ()), *(item for row in shown for item in row.logprobs or ())]
            logprobs = options.logprobs.completion(items, choice, first=options.echo_first[choice])
        before, after = self.form.text
        ids = [i for row in shown for i in row.ids]
        return self.event(choice, before + _encode(text) + after, ids, _encode(logprobs))
