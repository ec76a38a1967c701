"""Builds the table from token id to bytes that makes detokenising a list lookup.

Most tokenizers decode token by token: byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM2) and the SentencePiece family (Llama 2,
Mistral, Gemma). For those the bytes of every id are computed once, when a worker starts. Any other decoder (such as WordPiece)
gives no table, and `headrace.workers.detokenize` calls the `tokenizers` library over a sliding window instead.

Only `tokenizer.json` is read; `tokenizers` is imported just for the second kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import msgspec

from headrace.workers.errors import ModelUnavailable

Decode = Callable[[list[int], bool], str]
"""(ids, skip special tokens) → text, by the `tokenizers` library."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """The bytes and texts of all token ids. Immutable; a worker has one, shared by all its pipelines.

    `pieces[id]` are the bytes an id adds to the text and `texts[id]` the same as a string, None if they are not whole
    characters; `plain` is `texts` without those of special tokens. All are empty if `decode` must be called. `first` gives the
    bytes of an id that starts the text, for tokenizers that drop the space there.
    """

    pieces: Sequence[bytes] = field(repr=False)
    texts: Sequence[str | None] = field(repr=False)
    special: frozenset[int]
    first: Callable[[bytes], bytes] | None = None
    decode: Decode | None = None
    plain: Sequence[str | None] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        plain = ["" if i in self.special else text for i, text in enumerate(self.texts)]
        object.__setattr__(self, "plain", plain)

    @classmethod
    def load(cls, tokenizer_dir: str | Path) -> Self:
        """Read `tokenizer.json` in a folder. Raises ModelUnavailable if it is missing or damaged."""
        path = Path(tokenizer_dir) / "tokenizer.json"
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise ModelUnavailable(f"no tokenizer: cannot read {path}: {error.strerror}") from error
        try:
            spec = _read(raw)
            special = frozenset(token["id"] for token in spec.added_tokens or () if token["special"])
            piece, first = _piece_rule(spec.decoder)
            if piece is None:
                return cls(pieces=(), texts=(), special=special, decode=_library_decode(raw))
            pieces = [piece(token) for token in _tokens(spec)]
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ModelUnavailable(f"{path} is not a tokenizer: {error!r}") from error
        return cls(pieces=pieces, texts=[_whole(data) for data in pieces], special=special, first=first)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, also of a special one; empty for an id unknown to the tokenizer."""
        if self.decode is not None:
            return self.decode([token_id], False).encode()
        return self.pieces[token_id] if 0 <= token_id < len(self.pieces) else b""


def token_table(tokenizer_dir: str | Path) -> TokenTable:
    """Load the table, once per process for an unchanged file, because engine and runtime need the same one."""
    try:
        state = (Path(tokenizer_dir) / "tokenizer.json").stat()
    except OSError:
        return TokenTable.load(tokenizer_dir)  # Raises ModelUnavailable with the reason.
    return _loaded(str(tokenizer_dir), state.st_ino, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=1)
def _loaded(tokenizer_dir: str, *_state: int) -> TokenTable:
    return TokenTable.load(tokenizer_dir)


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any]


class _File(msgspec.Struct):
    """The needed part of a `tokenizer.json`. The merges, most of the file, are skipped."""

    model: _Model
    decoder: dict[str, Any] | None = None
    added_tokens: list[dict[str, Any]] | None = None


_read = msgspec.json.Decoder(_File).decode


def _library_decode(raw: bytes) -> Decode:
    from tokenizers import Tokenizer

    try:
        decode = Tokenizer.from_buffer(raw).decode
    except ValueError as error:
        raise TypeError(str(error)) from error
    return lambda ids, skip: str(decode(ids, skip_special_tokens=skip))


def _tokens(spec: _File) -> list[str]:
    """Return the token strings by id; "" for an unused id."""
    vocabulary = spec.model.vocab
    if isinstance(vocabulary, list):
        named: Iterable[tuple[str, int]] = ((entry[0], i) for i, entry in enumerate(vocabulary))
    else:
        named = vocabulary.items()
    by_id = {i: token for token, i in named}
    by_id.update((token["id"], token["content"]) for token in spec.added_tokens or ())
    return [by_id.get(i, "") for i in range(max(by_id, default=-1) + 1)]


def _whole(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


# -- the rule of the `decoder` in tokenizer.json for one token -----------------------------------------------

Piece = Callable[[str], bytes]
First = Callable[[bytes], bytes]


def _piece_rule(decoder: Mapping[str, Any] | None) -> tuple[Piece | None, First | None]:
    """Return the rule from token to bytes and the rule for the first token, (None, None) if tokens do not decode singly."""
    steps = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
    edits: list[Callable[[str], str]] = []
    piece: Piece = str.encode
    first: First | None = None
    fused = False
    for step in steps:
        match step:
            case {"type": "ByteLevel"} if len(steps) == 1:
                return piece_bytes, None
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if not fused:
                edits.append(_replacer(old, new))
            case {"type": "Metaspace", "replacement": mark, **rest} if not fused:
                edits.append(_replacer(mark, " "))
                if rest.get("prepend_scheme", "always") != "never" and rest.get("add_prefix_space", True):
                    first = _drop_spaces
            case {"type": "ByteFallback"} if not fused:
                piece = _byte_fallback
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
                first = _stripper(start)
            case _:
                return None, None
    return _edited(edits, piece), first


def _edited(edits: Sequence[Callable[[str], str]], piece: Piece) -> Piece:
    def edited(token: str) -> bytes:
        for edit in edits:
            token = edit(token)
        return piece(token)

    return edited


def _replacer(old: str, new: str) -> Callable[[str], str]:
    return lambda token: token.replace(old, new)


def _drop_spaces(data: bytes) -> bytes:
    return data.replace(b" ", b"")


def _stripper(most: int) -> First:
    return lambda data: data[min(most, len(data) - len(data.lstrip(b" "))) :]


def _byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """Return byte-level BPE's characters for the 256 bytes: printable ones are themselves, the rest start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


_BYTES = _byte_alphabet()


def piece_bytes(token: str) -> bytes:
    """Return the bytes of a token written by byte-level BPE."""
    try:
        return bytes([_BYTES[char] for char in token])
    except KeyError:  # An added token is written as it is.
        return token.encode()
