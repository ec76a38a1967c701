"""Contract of what a request may ask for: each option works where it is declared, and is refused by name where it is not."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from headrace.workers.engine import StoredTensor
from headrace.workers.errors import EngineOverloaded
from tests.engine_contract.subject import Subject, emitted, greedy

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "yes"}}
GUIDED: dict[str, Any] = {
    "json": SCHEMA,
    "json_object": True,
    "regex": "(ab|cd){2}[0-9]",
    "choice": ["apple", "pear"],
    "grammar": 'root ::= "yes" | "no"',
    "structural_tag": json.dumps(TAG),
}
MEDIA = ("image", "video", "audio")


def obeys(kind: str, text: str) -> bool:
    """Whether a finished answer is what was asked for."""
    match kind:
        case "json":
            return json.loads(text) in ({"city": "Paris"}, {"city": "Rome"})
        case "json_object":
            return isinstance(json.loads(text), dict)
        case "regex":
            return re.fullmatch(GUIDED["regex"], text) is not None
        case "choice":
            return text in GUIDED["choice"]
        case "grammar":
            return text in ("yes", "no")
    return text == "yes"


class OptionsContract:
    """Log-probabilities, structured output, salts, priorities, penalties, embeddings and media."""

    async def test_logprobs(self, subject: Subject) -> None:
        prompt = subject.prompt(200)
        if "logprobs" not in subject.declared:
            await subject.refuses("logprobs", prompt, logprobs=2)
            return
        outputs = await subject.run(prompt, greedy(6), logprobs=2)
        rows = [row for output in outputs for row in output.logprobs or ()]
        assert [row.id for row in rows] == emitted(outputs)
        for row in rows:
            assert row.logprob <= 0
            assert len(row.top) == 2
            assert row.top[0][0] == row.id, "at temperature 0 the token is the likeliest one"
            assert row.top[0][2] >= row.top[1][2]
        plain = await subject.run(prompt, greedy(2))
        assert all(not output.logprobs for output in plain)

    async def test_logprobs_without_alternatives(self, subject: Subject) -> None:
        if "logprobs" not in subject.declared:
            return
        outputs = await subject.run(subject.prompt(201), greedy(3), logprobs=0)
        rows = [row for output in outputs for row in output.logprobs or ()]
        assert [(row.id, len(row.top)) for row in rows] == [(token, 0) for token in emitted(outputs)]

    async def test_prompt_logprobs(self, subject: Subject) -> None:
        prompt = subject.prompt(202)
        if "prompt_logprobs" not in subject.declared:
            await subject.refuses("prompt_logprobs", prompt, prompt_logprobs=1)
            return
        for _ in range(2):  # also of a prompt that is cached
            outputs = await subject.run(prompt, greedy(2), prompt_logprobs=1)
            scores = outputs[0].prompt_logprobs
            assert scores is not None
            assert len(scores) == len(prompt)
            assert scores[0] is None
            assert [score.id for score in scores[1:] if score is not None] == prompt[1:]
            assert all(
                score is not None and score.rank >= subject.means.least_rank and score.logprob <= 0 for score in scores[1:]
            )
            assert all(output.prompt_logprobs is None for output in outputs[1:])

    @pytest.mark.parametrize("kind", sorted(GUIDED))
    async def test_structured_output(self, subject: Subject, kind: str) -> None:
        prompt = subject.encode("Answer with one word. Which fruit do you like? Answer:")
        if f"guided {kind}" not in subject.declared:
            await subject.refuses(kind, prompt, greedy(32, ignore_eos=False), guided={kind: GUIDED[kind]})
            return
        outputs = await subject.run(prompt, subject.grammatical(160), guided={kind: GUIDED[kind]})
        assert outputs[-1].fault is None, outputs[-1].fault
        text = subject.text(emitted(outputs))
        if outputs[-1].finish == "length" and kind == "json_object":  # a small model may never close its object
            assert text.lstrip().startswith("{")
            return
        assert outputs[-1].finish == "stop"
        assert obeys(kind, text), text

    async def test_an_unknown_kind_of_structured_output_is_refused(self, subject: Subject) -> None:
        await subject.refuses("haiku", subject.prompt(203), guided={"haiku": True})

    @pytest.mark.parametrize("cut", [2, 4])
    async def test_structured_output_goes_on_in_the_middle_only_where_declared(self, subject: Subject, cut: int) -> None:
        if "guided json" not in subject.declared:
            return
        prompt, sampling = subject.encode("A city:"), subject.grammatical(64)
        whole = await subject.ids(prompt, sampling, guided={"json": SCHEMA})
        rest = subject.grammatical(64 - cut)
        resumed = await subject.ids(prompt + whole[:cut], rest, prompt_tokens=len(prompt), guided={"json": SCHEMA})
        assert (resumed == whole[cut:]) == ("resume_guided" in subject.declared)

    @pytest.mark.parametrize(
        ("word", "penalties"),
        [
            ("resume_penalties", {"presence_penalty": 2.0, "frequency_penalty": 2.0}),
            ("resume_repetition", {"repetition_penalty": 1.5}),
        ],
    )
    async def test_penalties_count_the_tokens_before_a_resume_only_where_declared(
        self, subject: Subject, word: str, penalties: dict[str, float]
    ) -> None:
        if "resume" not in subject.declared or not subject.means.computes_penalties:
            return
        prompt = subject.encode("One two three one two three one two three")
        whole = await subject.ids(prompt, greedy(24, **penalties))
        resumed = await subject.ids(prompt + whole[:12], greedy(12, **penalties), prompt_tokens=len(prompt))
        assert (resumed == whole[12:]) == (word in subject.declared)

    async def test_a_salt_keeps_caches_apart(self, subject: Subject) -> None:
        prompt = subject.prompt(204, 4.5)
        if "cache_salt" not in subject.declared:
            await subject.refuses("cache_salt", prompt, cache_salt="tenant-1")
            return
        plain = await subject.ids(prompt, greedy(2))
        cached = (await subject.run(prompt, greedy(2)))[0].cached_tokens
        salted = [await subject.run(prompt, greedy(2), cache_salt=salt) for salt in ("tenant-1", "tenant-1", "tenant-2")]
        assert [outputs[0].cached_tokens for outputs in salted] == [0, cached, 0]
        assert [emitted(outputs) for outputs in salted] == [plain] * 3

    async def test_a_lower_priority_number_comes_first_only_where_declared(self, subject: Subject) -> None:
        slots = subject.info.slots
        room = subject.info.context_length - 2 * subject.info.block_size
        filling = [await subject.submit(subject.prompt(300 + n, 1.5), greedy(room)) for n in range(slots)]
        for name in filling:
            await subject.begins(name)
        try:
            later = await subject.submit(subject.prompt(400, 0.5), greedy(4), priority=5)
            sooner = await subject.submit(subject.prompt(401, 0.5), greedy(4), priority=-5)
        except EngineOverloaded:  # an engine that keeps no queue has nothing to put in order
            assert "priority" not in subject.declared
            return
        finally:
            await subject.engine.abort(filling[:1])
        await subject.until(lambda: bool(subject.outputs[later] or subject.outputs[sooner]))
        await subject.engine.abort(filling)
        await subject.end(later)
        await subject.end(sooner)
        place = {name: self._first_call(subject, name) for name in (later, sooner)}
        assert (place[sooner] < place[later]) == ("priority" in subject.declared)
        await subject.idle()

    @staticmethod
    def _first_call(subject: Subject, name: str) -> int:
        numbers = (n for n, call in enumerate(subject.calls) if any(output.id == name for output in call))
        return next(numbers, len(subject.calls))

    async def test_prompts_as_embeddings(self, subject: Subject) -> None:
        prompt = subject.prompt(205)
        places = [0] * len(prompt)
        if "prompt_embeds" not in subject.declared:
            width = memoryview(bytes(4 * len(prompt)))
            await subject.refuses("prompt_embeds", places, prompt_embeds=StoredTensor("float32", (len(prompt), 1), width))
            return
        assert subject.means.embeds is not None
        embeds, other = subject.means.embeds(prompt), subject.means.embeds(prompt[::-1])
        answer = await subject.ids(places, greedy(8), prompt_embeds=embeds)
        assert await subject.ids(places, greedy(8), prompt_embeds=embeds) == answer
        assert (await subject.run(places, greedy(8), prompt_embeds=other))[0].cached_tokens == 0
        if subject.means.embeds_are_tokens:
            assert answer == await subject.ids(prompt, greedy(8))

    @pytest.mark.parametrize("kind", MEDIA)
    async def test_media(self, subject: Subject, kind: str) -> None:
        if f"media {kind}" not in subject.declared:
            item = {"kind": kind, "digest": 1, "start": 0, "length": 1, "data": b""}
            await subject.refuses(f"media|{kind}", subject.prompt(206), media=[item])
            return
        assert subject.means.media is not None
        prompt, items = subject.means.media(subject.info, kind, 1)
        again, others = subject.means.media(subject.info, kind, 2)
        assert prompt == again, "items differ, placeholders do not"
        first = await subject.run(prompt, greedy(8), media=items)
        other = await subject.run(prompt, greedy(8), media=others)
        same = await subject.run(prompt, greedy(8), media=items)
        assert emitted(same) == emitted(first) != emitted(other)
        assert (same[0].cached_tokens or 0) > (other[0].cached_tokens or 0), "an item is part of what is cached"
