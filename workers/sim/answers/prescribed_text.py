"""Spells any text in tokens of a tokenizer, for answers that are given to the simulator, and reads scripts of such answers.

Added tokens (`<think>`, `<|im_end|>`) are found by their text, what lies between them is cut greedily: always the longest token
that fits. That is rarely how the tokenizer's own merges would cut it, but the tokens' bytes put together are the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from headrace.workers.errors import EngineStartFailed, RequestInvalid, UnsupportedByEngine
from headrace.workers.text.tokens import TokenTable


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
