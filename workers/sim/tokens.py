"""Spells any text in tokens of a tokenizer, for answers that are given to the simulator, and reads scripts of such answers.

Added tokens (`<think>`, `<|im_end|>`) are found by their text, what lies between them is cut greedily: always the longest token
that fits. That is rarely how the tokenizer's own merges would cut it, but the tokens' bytes put together are the text.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b, shake_128
from pathlib import Path
from typing import Any, Self

import msgspec

from headrace.broker.blocks import MediaSpan
from headrace.broker.codec import encode, pack_u32
from headrace.broker.messages.frames import TokenLogprob
from headrace.broker.messages.requests import Sampling
from headrace.workers.detokenize import TextPipeline
from headrace.workers.errors import EngineStartFailed, ModelUnavailable, RequestInvalid, UnsupportedByEngine
from headrace.workers.tokens import TokenTable, token_table


class Speller:
    """Encodes text in one tokenizer's tokens; its tables are built on first use."""

    def __init__(self, table: TokenTable, tokenizer_dir: Path) -> None:
        self._table = table
        self._folder = tokenizer_dir
        self._added: dict[str, int] | None = None
        self._split = re.compile("")
        self._ids: dict[bytes, int] = {}
        self._lengths: dict[bytes, list[int]] = {}  # first byte → lengths of the tokens that begin with it, longest first

    def spell(self, text: str, *, param: str) -> list[int]:
        """Encode `text` as token ids whose bytes are the text.

        Raises RequestInvalid, naming `param`, when a character cannot be spelled, and UnsupportedByEngine for a tokenizer whose
        tokens do not decode one by one.
        """
        added = self._tables(param)
        ids: list[int] = []
        for part in self._split.split(text) if added else [text]:
            if part in added:
                ids.append(added[part])
            elif part:
                self._cut(part, ids, param)
        return ids

    def _cut(self, text: str, ids: list[int], param: str) -> None:
        try:
            data = text.encode()
        except UnicodeEncodeError:
            raise RequestInvalid(f"{param}: the text has a lone surrogate", param=param) from None
        at = 0
        while at < len(data):
            for length in self._lengths.get(data[at : at + 1], ()):
                token = self._ids.get(data[at : at + length])
                if token is not None:
                    ids.append(token)
                    at += length
                    break
            else:
                raise RequestInvalid(f"{param}: this tokenizer has no token for byte 0x{data[at]:02x} of {text!r}", param=param)

    @property
    def ready(self) -> bool:
        """True when the tables are built, or cannot be built."""
        return self._added is not None or self._table.decode is not None

    def prepare(self) -> None:
        """Build the tables, which takes a tenth of a second; safe in another thread."""
        if not self.ready:
            self._tables("")

    def _tables(self, param: str) -> dict[str, int]:
        if self._added is not None:
            return self._added
        table = self._table
        if table.decode is not None:
            raise UnsupportedByEngine(
                f"{param}: this tokenizer does not decode token by token, so it cannot spell a given text"
            )
        ids: dict[bytes, int] = {}
        spec = msgspec.json.decode((self._folder / "tokenizer.json").read_bytes())
        added = {token["content"]: token["id"] for token in spec.get("added_tokens") or () if token["content"]}
        lengths: dict[bytes, set[int]] = {}
        for token, piece in enumerate(table.pieces):
            if piece and token not in table.special:
                ids.setdefault(piece, token)
                lengths.setdefault(piece[:1], set()).add(len(piece))
        self._ids = ids
        self._lengths = {first: sorted(of, reverse=True) for first, of in lengths.items()}
        longest_first = sorted(added, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self._added = added
        return added


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rule of a script: where the pattern `when` is found in a prompt, the answer is `say`."""

    when: re.Pattern[str]
    say: str


def read_script(path: str) -> list[Rule]:
    """Read a script: a JSON list of rules. Raises EngineStartFailed naming the file and what is wrong with it."""

    def pattern(_kind: type, value: object) -> re.Pattern[str]:
        if not isinstance(value, str):
            raise ValueError(f"a pattern is a text, not {value!r}")
        try:
            return re.compile(value)
        except re.error as error:
            raise ValueError(f"{value!r} is not a pattern: {error}") from None

    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=list[Rule], dec_hook=pattern)
    except (OSError, msgspec.MsgspecError) as error:
        raise EngineStartFailed(f"simulator argument script={path!r}: {error}") from None


def scripted(rules: Iterable[Rule], table: TokenTable, prompt_ids: Sequence[int]) -> str | None:
    """Return the answer of the first rule that applies to a prompt, None when there is none."""
    prompt = b"".join(map(table.token_bytes, prompt_ids)).decode(errors="replace")
    return next((rule.say for rule in rules if rule.when.search(prompt)), None)


# The simulator's answers: a pure function of the prompt, so that any test can compute the exact expected text.
#
# Token *i* of an answer depends on the prompt ids, its media, the adapter, the seed (if the temperature is above 0) and *i*;
# it does not depend on batching, chunking, other requests, or how often the answer was interrupted and resumed. An engine
# whose cache holds something else than the prompt (its *taint*) answers something else.
#
# Answers are made of common words of the tokenizer, some punctuation, and now and then a character whose bytes lie in
# separate tokens, so that the text pipeline is exercised.

BUNDLED_TOKENIZER = Path(__file__).resolve().parents[1] / "assets" / "smollm2"

_CHUNK = 32  # tokens drawn at once
_unpack_chunk = struct.Struct(f"<{_CHUNK}H").unpack
_MOST_WORDS = 4096
_WORD = re.compile(rb" [a-z]{2,}")
_BARE_WORD = re.compile(rb"[a-z]{2,}")
_PUNCTUATION_EVERY = 12
_CHARACTER_EVERY = 64
LENGTH_SPREAD = (
    0.5  # standard deviation of the logarithm of an answer's length: nine of ten lie between 0.39 and 2.0 times the mean
)
LONGEST_GROUP = 4  # tokens of one character
FILLER = 2  # a draw that is a word in every vocabulary
_CHARACTERS = ("é", "ß", "漢", "→", "🙂", "🌊")


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The part of a tokenizer that answers are drawn from.

    `draws` maps 16 random bits to a token id, or, if negative, to `groups[-1 - x]`: the tokens of one split character.
    """

    table: TokenTable = field(repr=False)
    speller: Speller = field(repr=False)
    draws: Sequence[int] = field(repr=False)
    groups: Sequence[Sequence[int]]
    eos: int | None
    size: int

    @classmethod
    def load(cls, tokenizer_dir: str | Path) -> Self:
        """Read a tokenizer. Raises EngineStartFailed when it cannot be read or has no words."""
        try:
            table = token_table(tokenizer_dir)
        except ModelUnavailable as error:
            raise EngineStartFailed(f"tokenizer_dir={str(tokenizer_dir)!r}: {error}") from error
        size = len(table.pieces) or _library_size(table)
        pieces = {i: table.token_bytes(i) for i in range(size) if i not in table.special}
        words = [i for i, piece in pieces.items() if _WORD.fullmatch(piece)][:_MOST_WORDS]
        words = words or [i for i, piece in pieces.items() if _BARE_WORD.fullmatch(piece)][:_MOST_WORDS]
        if not words:
            raise EngineStartFailed(f"tokenizer_dir={str(tokenizer_dir)!r}: this tokenizer has no tokens that are words")
        punctuation = [i for i, piece in pieces.items() if piece in (b",", b".")]
        single = {piece[0]: i for i, piece in pieces.items() if len(piece) == 1}
        groups = [
            [single[byte] for byte in char.encode()] for char in _CHARACTERS if all(byte in single for byte in char.encode())
        ]
        return cls(
            table=table,
            speller=Speller(table, Path(tokenizer_dir)),
            draws=_draws(words, punctuation, len(groups)),
            groups=groups,
            eos=_eos(table, Path(tokenizer_dir)),
            size=size,
        )


def _library_size(table: TokenTable) -> int:
    """Find the size of a tokenizer without a table: search for a long run of ids that decode to nothing."""
    end, seen = 0, 0
    while end - seen < 1024:
        if table.token_bytes(end):
            seen = end + 1
        end += 1
    return seen


def _draws(words: Sequence[int], punctuation: Sequence[int], groups: int) -> list[int]:
    draws: list[int] = []
    for n in range(1 << 16):
        if groups and n % _CHARACTER_EVERY == 0:
            draws.append(-1 - (n // _CHARACTER_EVERY) % groups)
        elif punctuation and n % _PUNCTUATION_EVERY == 1:
            draws.append(punctuation[(n // _PUNCTUATION_EVERY) % len(punctuation)])
        else:
            draws.append(words[n % len(words)])
    return draws


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def has_chat_template(tokenizer_dir: str | Path) -> bool:
    folder = Path(tokenizer_dir)
    return (folder / "chat_template.jinja").is_file() or "chat_template" in _config(folder)


def _eos(table: TokenTable, folder: Path) -> int | None:
    name = _config(folder).get("eos_token")
    if isinstance(name, dict):
        name = name.get("content")
    return next((i for i in sorted(table.special) if table.token_bytes(i).decode(errors="replace") == name), None)


class SimAnswer:
    """The answer to one prompt, as far as it has been drawn: `ids` grows by `grow()` and never changes otherwise.

    `eos_at` is where the end-of-answer token stands (over `ids`), None when the answer has no end of its own, and `closed` if
    not even `min_tokens` holds it off.  All is drawn from `key`.
    """

    __slots__ = ("_vocabulary", "closed", "eos_at", "ids", "key")

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt_ids: Sequence[int],
        *,
        sampling: Sampling,
        adapter: str | None = None,
        mean_tokens: float | None = None,
        media: Sequence[MediaSpan] = (),
        taint: int = 0,
    ) -> None:
        seed = sampling.seed if sampling.temperature > 0 else None
        namespace: list[object] = [adapter, seed]
        if media or taint:
            namespace += [[[span.digest, span.start, span.length] for span in media], taint]
        self.key = blake2b(
            pack_u32(prompt_ids), key=blake2b(encode(namespace), digest_size=16).digest(), digest_size=16
        ).digest()
        self._vocabulary = vocabulary
        self.ids: list[int] = []
        self.eos_at: int | None = None
        self.closed = False
        if mean_tokens is not None and vocabulary.eos is not None and not sampling.ignore_eos:
            self.eos_at = self._length(mean_tokens) - 1

    def prescribe(self, script: Sequence[int], *, ends: bool, closed: bool = False) -> None:
        """Begin with these tokens; `ends`: and end then, or at the end token among them. To be called before anything is drawn.

        Where the answer may not end there it goes on with words.
        """
        eos = self._vocabulary.eos
        self.ids[:] = script
        self.eos_at = (script.index(eos) if eos in script else len(script)) if ends else None
        self.closed = closed

    def _length(self, mean: float) -> int:
        """Draw the answer's length: log-normally distributed, end token included, at least 1."""
        one, other = struct.unpack("<2Q", blake2b(self.key, person=b"length", digest_size=16).digest())
        deviation = math.sqrt(-2 * math.log((one + 1) / 2**64)) * math.cos(math.tau * other / 2**64)  # Box and Muller
        return 1 + math.floor((mean - 0.5) * math.exp(LENGTH_SPREAD * deviation - LENGTH_SPREAD**2 / 2))

    def grow(self) -> None:
        draws, ids, end = self._vocabulary.draws, self.ids, len(self.ids) + _CHUNK
        drawn = [draws[bits] for bits in self._drawn()]
        if min(drawn) >= 0:  # words only, as mostly
            ids += drawn
            return
        for token in drawn:
            if token >= 0:
                ids.append(token)
            elif len(ids) + LONGEST_GROUP <= end:
                ids += self._vocabulary.groups[-1 - token]
        while len(ids) < end:  # the last draws were characters that had no room
            ids.append(draws[FILLER])
        del ids[end:]

    def _drawn(self) -> Sequence[int]:
        part = len(self.ids) // _CHUNK
        return _unpack_chunk(shake_128(self.key + part.to_bytes(8, "little")).digest(2 * _CHUNK))

    def logprob(self, index: int, token_id: int, top: int) -> TokenLogprob:
        """Draw a plausible log-probability of token `index`, also a pure function; the token itself is the most likely one."""
        return self._logprob(b"logprobs", index, token_id, top)

    def prompt_logprob(self, index: int, token_id: int, top: int) -> TokenLogprob:
        """Draw a plausible log-probability of a token of the prompt."""
        return msgspec.structs.replace(self._logprob(b"prompt", index, token_id, top), rank=1)

    def _logprob(self, part: bytes, index: int, token_id: int, top: int) -> TokenLogprob:
        drawn = _unpack_chunk(shake_128(self.key + part + index.to_bytes(8, "little")).digest(2 * _CHUNK))
        chance = 0.3 + 0.69 * drawn[0] / 2**16
        own = math.log(chance)
        table = self._vocabulary.table
        chosen: list[tuple[int, bytes, float]] = [(token_id, table.token_bytes(token_id), own)]
        rest = 1 - chance
        for bits in drawn[1:]:
            if len(chosen) >= top:
                break
            other = self._vocabulary.draws[bits]
            if other >= 0 and all(other != known for known, _, _ in chosen):
                rest /= 2
                chosen.append((other, table.token_bytes(other), math.log(min(rest, chance))))
        return TokenLogprob(token_id, chosen[0][1], own, chosen[:top])


# -- for tests: what will it say? ----------------------------------------------------------------------------


@cache
def bundled_vocabulary() -> Vocabulary:
    """Return the vocabulary of the bundled tokenizer, read once."""
    return Vocabulary.load(BUNDLED_TOKENIZER)


def expected_ids(
    prompt_ids: Sequence[int],
    max_tokens: int,
    *,
    sampling: Sampling | None = None,
    adapter: str | None = None,
    mean_tokens: float | None = None,
    media: Sequence[MediaSpan] = (),
    vocabulary: Vocabulary | None = None,
) -> list[int]:
    """Compute the ids a simulator answers with: at most `max_tokens`, with the end or stop token if there is one."""
    sampling = sampling or Sampling()
    vocabulary = vocabulary or bundled_vocabulary()
    answer = SimAnswer(vocabulary, prompt_ids, sampling=sampling, adapter=adapter, mean_tokens=mean_tokens, media=media)
    while len(answer.ids) < max_tokens:
        answer.grow()
    ids = answer.ids[:max_tokens]
    if answer.eos_at is not None and vocabulary.eos is not None:
        eos_at = max(answer.eos_at, sampling.min_tokens)
        ids[eos_at:] = [vocabulary.eos][: max_tokens - eos_at]
    stops = [n for n, token in enumerate(ids) if n >= sampling.min_tokens and token in sampling.stop_token_ids]
    return ids[: stops[0] + 1] if stops else ids


def expected_text(
    prompt_ids: Sequence[int],
    max_tokens: int,
    *,
    stop: Sequence[str] = (),
    sampling: Sampling | None = None,
    adapter: str | None = None,
    vocabulary: Vocabulary | None = None,
) -> str:
    """Compute `expected_ids` as the text a client sees."""
    vocabulary = vocabulary or bundled_vocabulary()
    ids = expected_ids(
        prompt_ids,
        max_tokens,
        sampling=sampling,
        adapter=adapter,
        vocabulary=vocabulary,
    )
    pipeline = TextPipeline(vocabulary.table, prompt_ids=prompt_ids, stop=stop)
    return "".join(map(pipeline.push, ids)) + pipeline.finish()
