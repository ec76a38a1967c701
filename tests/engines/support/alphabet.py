"""Tokenizers without a model: the 256 bytes, or common words, and the special tokens that a family needs."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any

from headrace.workers.sim.tokens import BUNDLED_TOKENIZER
from headrace.workers.tokens import piece_bytes


def words_with(special: Sequence[str]) -> Any:
    """The bundled tokenizer with the special tokens of another family: tokens of several characters."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(BUNDLED_TOKENIZER / "tokenizer.json"), eos_token="<|im_end|>")
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in dict.fromkeys(special)])
    return tokenizer


def tokenizer_with(special: Sequence[str], *, bos: str | None = None, eos: str = "<|end|>") -> Any:
    """As `transformers` has them; ids 0 to 255 are bytes, the rest are special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = dict.fromkeys([*special, eos, *([bos] if bos else [])])
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, clean_up_tokenization_spaces=False)


def pieces_of(tokenizer: Any, text: str, *, skip_special_tokens: bool) -> list[tuple[int, str]]:
    """The ids of `text`, each with the characters it completes."""
    decode = getincrementaldecoder("utf-8")("replace").decode
    skipped = set(tokenizer.all_special_ids) if skip_special_tokens else set()
    ids = tokenizer.encode(text, add_special_tokens=False)
    tokens = tokenizer.convert_ids_to_tokens(ids)
    return [(i, "" if i in skipped else decode(piece_bytes(token))) for i, token in zip(ids, tokens, strict=True)]
