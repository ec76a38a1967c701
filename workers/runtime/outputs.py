"""Turns the engine's outputs for a choice into rows of its run and into its end.

Nearly every output is a single token and nothing else; it takes the shorter path in
`headrace.workers.runtime.runtime.Runtime.on_step`.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from headrace.broker.codec import encode, log_ids
from headrace.broker.messages.frames import Finish, FinishReason, JobFault, Text, TokenLogprob
from headrace.broker.worker.runs import WorkerRuns
from headrace.workers import metrics
from headrace.workers.engine import Fault, Output
from headrace.workers.errors import RequestInvalid
from headrace.workers.runtime.choice import ChoiceRun
from headrace.workers.runtime.sequences import Sequences

# Checks that the log-probabilities of a prompt fit into the message with the end of the answer, and refuses them otherwise.
#
# The size is checked twice: before the computation, by the least size of the result, and on the result itself.

PARAM = "prompt_logprobs"
_LEAST_TOKEN = 16  # bytes of a token with its number, bytes, log-probability and rank
_LEAST_ALTERNATIVE = 14  # bytes of an alternative


def check_size(tokens: int, alternatives: int, *, most_bytes: int) -> None:
    """Check that the result for `tokens` prompt tokens can fit into `most_bytes`. Raises RequestInvalid if it cannot."""
    least = (tokens - 1) * (_LEAST_TOKEN + alternatives * _LEAST_ALTERNATIVE)
    if least > most_bytes:
        raise RequestInvalid(
            f"prompt_logprobs={alternatives} of {tokens} prompt tokens take {least} bytes at least; a message has {most_bytes}",
            param=PARAM,
        )


def fitting(items: Sequence[TokenLogprob | None], *, prompt_tokens: int, most_bytes: int) -> list[TokenLogprob | None]:
    """Return the items of the prompt alone: a resumed run's emitted tokens count as prompt. Raises RequestInvalid."""
    mine = list(items[:prompt_tokens])
    size = len(encode(mine))
    if size > most_bytes:
        raise RequestInvalid(
            f"prompt_logprobs of {prompt_tokens} prompt tokens take {size} bytes; one message has {most_bytes}", param=PARAM
        )
    return mine


log = structlog.get_logger()

INVALID = "invalid_request"  # the code of a fault that is the client's, as of an error of submission


class Outputs:
    """Passes outputs on to the sink at once; flushing it is left to the caller."""

    def __init__(self, sink: WorkerRuns, sequences: Sequences) -> None:
        self._sink = sink
        self._sequences = sequences

    def take(self, choice: ChoiceRun, output: Output, now_s: float) -> None:
        """Process an output. Raises AnswerUnreadable, and RequestInvalid if prompt log-probabilities are too large."""
        if output.fault is not None:
            self._failed(choice, output.fault)
            return
        if output.cached_tokens is not None:
            choice.cached_tokens = output.cached_tokens
        if output.prompt_tokens is not None:
            choice.prompt_tokens = output.prompt_tokens
        if output.prompt_logprobs is not None:  # They are sent with the end of the answer.
            most_bytes = self._sink.max_frame_bytes
            choice.prompt_logprobs = fitting(output.prompt_logprobs, prompt_tokens=choice.prompt_tokens, most_bytes=most_bytes)
        ids = output.ids
        if not choice.first_s and ids:
            self._first_token(choice, now_s)
        stops = choice.generation.stop
        choice.plain = choice.first_s > 0.0 and not stops
        push = choice.push
        finish = output.finish
        last = len(ids) - 1 if finish is not None else -1
        texts: list[Text] = []
        for index, token in enumerate(ids):
            if index != last:
                texts.append(push(token))
            else:  # A stop token is not part of the text.
                hidden = finish == "stop" and not choice.generation.include_stop
                texts.append(choice.pipeline.last(token, hidden=hidden))
            if stops and choice.pipeline.stopped is not None:
                self._stopped_by_string(choice, ids[: index + 1], texts, output)
                return
        if finish == "abort":
            self._sequences.end(choice)
            fault = JobFault("engine_error", "the engine aborted the sequence", retriable=True)
            self._sink.retry_elsewhere(choice.run, fault)
        elif finish is not None:
            self.finish(choice, ids, texts, finish, output.stop, output)
        else:
            self._sink.append(choice.run, choice.choice, ids, texts, logprobs=output.logprobs)

    def _failed(self, choice: ChoiceRun, fault: Fault) -> None:
        if choice.first_token is not None and not choice.first_token.done():
            log.info("handover.failed", **log_ids(choice.run.envelope), sequence=choice.id, code=fault.code, why=fault.message)
            self._sequences.fail_handover(choice, fault)
            return
        self._sequences.end(choice)
        ends = self._sink.retry_elsewhere if fault.retriable else self._sink.fail
        code = fault.code if fault.code == INVALID else "engine_error"
        ends(choice.run, JobFault(code, fault.message, retriable=fault.retriable))

    def _first_token(self, choice: ChoiceRun, now_s: float) -> None:
        choice.first_s = now_s
        metrics.FIRST_TOKEN_S.observe(now_s - choice.started_s)
        tokens = choice.prompt_tokens + choice.run.choices[choice.choice].start
        computed = tokens - choice.cached_tokens
        fetch_ms = 0
        if choice.first_token is not None:
            computed = min(computed, choice.computed_elsewhere)
            if not choice.first_token.done():
                choice.first_token.set_result(None)
            if choice.handed_s is not None:
                fetch_ms = max(1, round((now_s - choice.handed_s) * 1e3))
        if not choice.first_token_reported:
            choice.first_token_reported.append(True)
            self._sink.prefilled(choice.run, max(0, computed), fetch_ms)

    def _stopped_by_string(self, choice: ChoiceRun, ids: list[int], texts: list[Text], output: Output) -> None:
        if output.finish is None:
            self._sequences.abort(choice)
        self.finish(choice, ids, texts, "stop", choice.pipeline.stopped, output)

    def finish(
        self,
        choice: ChoiceRun,
        ids: list[int],
        texts: list[Text],
        reason: FinishReason,
        stop: str | int | None,
        output: Output | None = None,
    ) -> None:
        """End a choice with these tokens. `output` has their log-probabilities. Raises AnswerUnreadable."""
        self._sequences.end(choice)
        run = choice.run
        completion_tokens = len(run.choices[choice.choice].ids) + len(ids)
        logprobs = output.logprobs[: len(ids)] if output is not None and output.logprobs is not None else None
        tail = choice.pipeline.finish()
        # The held-back text may turn out to be a stop string only now.
        if choice.generation.stop and choice.pipeline.stopped is not None:
            reason, stop = "stop", choice.pipeline.stopped
        reason, reasoning_tokens = choice.verdict(reason)
        fin = Finish(
            reason=reason,
            stop=stop,
            tail=tail,
            prompt_tokens=choice.prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=min(max(choice.cached_tokens, choice.cached_elsewhere), choice.prompt_tokens),
            reasoning_tokens=reasoning_tokens,
            prompt_logprobs=choice.prompt_logprobs,
        )
        metrics.PROMPT_TOKENS.inc(choice.prompt_tokens)
        metrics.COMPLETION_TOKENS.inc(completion_tokens)
        self._sink.append(run, choice.choice, ids, texts, logprobs=logprobs, fin=fin)
