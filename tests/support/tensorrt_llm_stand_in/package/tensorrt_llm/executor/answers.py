"""Chooses the tokens of answers: a function of all tokens before, of the adapter and of the seed, in the simulator's words."""

from __future__ import annotations

import json
import re
from hashlib import blake2b
from typing import Any

import numpy as np

from headrace.broker.codec import pack_u32
from headrace.workers.errors import WorkerError
from headrace.workers.sim.guided import guided_text
from headrace.workers.sim.guided_strings import Draws
from headrace.workers.sim.tokens import Vocabulary

from .result import Logprob
from .utils import RequestError

_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')
_SURE = 10.0  # the logit of the chosen token, above 0 of all others


class Answer:
    """The answer to one request, token by token. Keeps a running digest of what has come so far."""

    def __init__(self, vocabulary: Vocabulary, prompt: list[int], params: Any, lora: int | None, mean_tokens: float) -> None:
        self._vocabulary = vocabulary
        self._params = params
        self._mean_tokens = mean_tokens
        sampled = not params._greedy_decoding
        seed = (params.seed or 0) if sampled else None
        self._digest = blake2b(repr((lora, seed)).encode(), digest_size=16)
        self._digest.update(pack_u32(prompt))
        self._given = 0
        self._script = self._guided() if params.guided_decoding is not None else None

    def skip(self, token: int) -> None:
        """Count a token that another engine has chosen."""
        self._digest.update(pack_u32([token]))
        self._given += 1

    def next(self, request_id: int, tokens: list[int]) -> tuple[int, Any]:
        """Return the next token and the logits that it was chosen by."""
        logits = None
        script, params = self._script, self._params
        token = self._drawn() if script is None else script[min(self._given, len(script) - 1)]
        if self._script is None and (params.embedding_bias is not None or params.logits_processor or self._wants_logits):
            logits = np.zeros((1, 1, self._vocabulary.size), np.float32)
            logits[0, 0, token] = _SURE
            processors = params.logits_processor or []
            for processor in processors if isinstance(processors, list) else [processors]:
                processor(request_id, logits, [tokens], None, request_id)
            if params.embedding_bias is not None:
                logits[0, 0] += np.asarray(params.embedding_bias, np.float32)
            token = int(logits[0, 0].argmax())
        self.skip(token)
        return token, logits

    @property
    def _wants_logits(self) -> bool:
        return bool(self._params.return_generation_logits)

    def logprobs(self, token: int) -> dict[int, Logprob]:
        """Return made-up log probabilities: the chosen token is the likeliest."""
        others = [(token + n) % self._vocabulary.size for n in range(1, self._params.logprobs)]
        return {token: Logprob(-0.25, 1)} | {other: Logprob(-2.0 - n, n + 2) for n, other in enumerate(others)}

    def _drawn(self) -> int:
        bits = int.from_bytes(self._digest.digest(), "little")
        params, end = self._params, self._params.end_id
        early = self._given + 1 < (params.min_tokens or 0)
        if (
            self._mean_tokens
            and not params.ignore_eos
            and not early
            and end is not None
            and (bits >> 64) % int(self._mean_tokens) == 0
        ):
            return int(end)
        draws = self._vocabulary.draws
        place = bits & 0xFFFF
        while draws[place] < 0:
            place = (place + 1) & 0xFFFF
        return int(draws[place])

    def _guided(self) -> list[int]:
        guide = self._params.guided_decoding
        words = ["river", "stone", "light"]
        draws = Draws(self._digest.digest(), words)
        try:
            if guide.grammar is not None:
                literals = _LITERAL.findall(guide.grammar.partition("::=")[2])
                if not literals:
                    raise RequestError(f"the stand-in knows no grammar but literals, got {guide.grammar!r}")
                text = str(json.loads(draws.pick(literals)))
            else:
                kinds = {name: getattr(guide, name) for name in ("json", "regex", "structural_tag")}
                given = {name: value for name, value in kinds.items() if value is not None}
                if guide.json_object:
                    given = {"json_object": True}
                for name in ("json", "structural_tag"):
                    if isinstance(given.get(name), str):
                        given[name] = json.loads(given[name])
                text = guided_text(given, draws)
            return [*self._vocabulary.speller.spell(text, param="guided"), int(self._params.end_id)]
        except (WorkerError, ValueError) as error:
            raise RequestError(str(error)) from error
