"""Tokenizers of every kind that can be had without a network: the bundled model's, and small ones of each make."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

BUNDLED = Path(__file__).parents[3] / "workers" / "assets" / "smollm2" / "tokenizer.json"
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|im_start|>user")  # one of them begins another
WORDS = ("a", "b", "ab", "abc", "hello", "world", "e", "é", "1", "12", "\n", "x", "▁", "▁a", "▁hello", "▁world", "▁x")


def bytes_bpe(*, prefix_space: bool = False) -> Tokenizer:
    """As GPT-2, Qwen and Llama 3 have it, with a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "a"), ("Ġ", "hello"), ("Ċ", "Ċ"), ("Ġ", "Ġ")]
    vocab = {piece: i for i, piece in enumerate([*alphabet, *("".join(merge) for merge in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece_bpe(*, scheme: str | None) -> Tokenizer:
    """As Llama 2, Phi-3 and Mistral have it: byte fallback, and a blank that becomes ▁, once or for every piece."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    merges = [("▁", "a"), ("▁", "x"), ("a", "b"), ("ab", "c")]
    for piece in (*"abcehlowrdx1é▁", *("".join(merge) for merge in merges)):
        vocab.setdefault(piece, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    if scheme is None:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def unigram() -> Tokenizer:
    vocab = [("<unk>", 0.0), *((piece, -float(i)) for i, piece in enumerate(WORDS, start=1))]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return tokenizer


def wordpiece() -> Tokenizer:
    vocab = {piece: i for i, piece in enumerate(["[UNK]", "[CLS]", "[SEP]", *WORDS, "##a", "##b", "##c", "##lo"])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def with_bos() -> Tokenizer:
    """One that puts <s> before every text when special tokens are wanted."""
    tokenizer = sentencepiece_bpe(scheme="first")
    tokenizer.add_special_tokens(["<s>"])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


def odd() -> Tokenizer:
    """Added tokens with every flag there is, that overlap, contain each other and begin or end with white space."""
    tokenizer = bytes_bpe()
    tokenizer.add_tokens(
        [
            AddedToken("<l>", lstrip=True, normalized=False),
            AddedToken("<r>", rstrip=True, normalized=False),
            AddedToken("<w>", single_word=True, normalized=False),
            AddedToken("<n>", normalized=True),
            AddedToken("<ab>", normalized=False),
            AddedToken("b><c", normalized=False),
            AddedToken("<c>", normalized=False),
            AddedToken(" <d>", normalized=False),
            AddedToken("<d>", normalized=False),
            AddedToken("  ", normalized=False),
            AddedToken("<f>", normalized=False),
            AddedToken("<f>g", normalized=False, lstrip=True),
            AddedToken("xx", normalized=False),
            AddedToken("<ok>", normalized=False),
        ]
    )
    return tokenizer


MAKES: dict[str, Callable[[], Tokenizer]] = {
    "SmolLM2": lambda: Tokenizer.from_file(str(BUNDLED)),
    "byte BPE": bytes_bpe,
    "byte BPE with prefix space": lambda: bytes_bpe(prefix_space=True),
    "SentencePiece, first": lambda: sentencepiece_bpe(scheme="first"),
    "SentencePiece, always": lambda: sentencepiece_bpe(scheme="always"),
    "SentencePiece, legacy": lambda: sentencepiece_bpe(scheme=None),
    "unigram": unigram,
    "WordPiece": wordpiece,
    "BOS by template": with_bos,
    "odd added tokens": odd,
}


@cache
def make(name: str) -> bytes:
    """tokenizer.json with the special tokens of chats."""
    if name == "SmolLM2":
        return BUNDLED.read_bytes()
    tokenizer = MAKES[name]()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer.to_str().encode()
