"""Writes streams with `echo` that need the whole answer (log probabilities) or none of it (the prompt alone)."""

from __future__ import annotations

import msgspec

from headrace.broker.messages import Finish, Row
from headrace.broker.output_parts import plain
from headrace.frontend.writers.sse import AnswerOptions, EventForm, EventWriter, Head
from headrace.frontend.writers.usage import UsageCounter

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
