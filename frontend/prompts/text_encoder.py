"""Encodes text into token ids with two libraries: a fast one if it agrees with the one that defines the ids.

`tokenizers` defines the meaning of a model's `tokenizer.json`, at a microsecond per token. `fastokens` reads the same file and
takes a tenth to a fiftieth of that time, but it does not support every kind of tokenizer and refuses some texts. Tokenizers
that it cannot load, and texts for which it raises, are left to `tokenizers`. When a tokenizer is loaded, both libraries have to
give the same ids for texts chosen to reveal differences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import structlog
from tokenizers import AddedToken, Tokenizer

from headrace.broker.codec import pack_u32, unpack_u64
from headrace.frontend.errors import ModelUnusable

try:
    import fastokens
except ImportError:  # no wheel for this platform
    fastokens = None

log = structlog.get_logger()

# Tokenizers differ in contractions, runs of digits and blanks, line ends, scripts, combining marks, and unusual bytes.
TRIALS = (
    "Hello, world! It's what they'd say: WE'LL see, I'm sure.",
    "  two  blanks\tand\ttabs \n\n lines\r\n end  ",
    "1 12 123 1234 12345 3.14159 2026-11-22 0x1F Ⅷ ² ١٢٣",
    "naïve café e\u0301 ﬁ ſ K ı İ ǅ ß straße",
    "日本語のテキスト 한국어 텍스트 中文文本 ไทย हिन्दी العربية עברית",
    "👩‍👩‍👧 👍🏽 🇩🇪 \u200b\u00a0\u2028\x85\x0b\x1c",
    "def f(x):\n    return {'a': [x**2 for _ in range(10)]}  # comment\n",
    "<s>a</s> <|im_start|>user\nhi<|im_end|>\n<|endoftext|> ▁ ▁▁a",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa !!!??? ---___=== //// \\\\ \"'`",
    " ",
    "\n",
    "a",
)


class _Fast(Protocol):
    def encode_batch_flat(self, inputs: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]: ...


class TextEncoder:
    """The tokenizer of a model. Threads may share it."""

    def __init__(self, tokenizer_json: bytes, *, name: str, special_tokens: Sequence[str] = ()) -> None:
        """`special_tokens` are those of the model's configuration; they are added to the tokenizer as special tokens.

        Uses `tokenizers` alone at first. Raises ModelUnusable if the bytes are no tokenizer. Takes 0.1 s and more.
        """
        try:
            self.reference = Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # the library raises plain Exception
            raise ModelUnusable(f"the tokenizer of {name!r} cannot be loaded: {error}") from None
        self.reference.no_truncation()
        self.reference.no_padding()
        self.added = _add_special_tokens(self.reference, special_tokens)
        self.on_refused: Callable[[], None] = lambda: None  # called for each text that the fast library refuses
        self._json = tokenizer_json
        self._name = name
        self._fast: _Fast | None = None

    @property
    def fast(self) -> bool:
        """Return True if the fast library is in use."""
        return self._fast is not None

    def use_fast_tokenizer(self) -> None:
        """Use the fast library from now on if it agrees. Takes half a second, mostly without the interpreter's lock."""
        if fastokens is None:
            log.warning("tokenizer.slow", model=self._name, reason="fastokens is not installed")
            return
        try:
            fast = fastokens.Tokenizer.from_json_str(self._json.decode())
            fast.no_truncation()
            fast.no_padding()
            if self.added:
                fast.add_tokens([AddedToken(content, special=True) for content in self.added])
        except Exception as error:  # kinds of tokenizers that it does not support
            log.info("tokenizer.slow", model=self._name, reason=str(error))
            return
        if (text := self._disagreement(fast)) is not None:
            log.warning("tokenizer.slow", model=self._name, reason=f"fastokens has other ids for {text!r}")
            return
        self._fast = fast

    def _disagreement(self, fast: _Fast) -> str | None:
        """Return a text for which the libraries give different ids. Texts that `fast` refuses do not count."""
        markers = [token.content for token in self.reference.get_added_tokens_decoder().values()][:64]
        for text in (*TRIALS, "".join(markers), " a ".join(markers)):
            for special in (False, True):
                try:
                    ids, _ = fast.encode_batch_flat([text], special)
                except Exception:  # noqa: S112  # in a prompt it would be refused as well
                    continue
                if ids != self._by_reference([text], special)[0]:
                    return text
        return None

    def encode(self, texts: list[str], *, special: bool) -> list[bytes]:
        """Return the ids of each text as little-endian u32. Raises UnicodeEncodeError."""
        fast = self._fast
        if fast is not None:
            try:
                packed, ends = fast.encode_batch_flat(texts, special)
            except UnicodeEncodeError:
                raise
            except Exception:  # a byte the vocabulary lacks, a limit of its pattern matcher
                self.on_refused()
            else:
                return [packed] if len(texts) == 1 else _split(packed, unpack_u64(ends))
        return self._by_reference(texts, special)

    def _by_reference(self, texts: list[str], special: bool) -> list[bytes]:
        # a batch, even of one text, is a quarter cheaper than `encode`, because it keeps no offsets
        return [pack_u32(e.ids) for e in self.reference.encode_batch_fast(texts, add_special_tokens=special)]


def _split(packed: bytes, bounds: Sequence[int]) -> list[bytes]:
    return [packed[start * 4 : end * 4] for start, end in pairwise(bounds)]


def _add_special_tokens(tokenizer: Tokenizer, names: Sequence[str]) -> list[str]:
    """Add the configuration's special tokens, so that they are found whole in texts, as in transformers."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    wanted = [name for name in dict.fromkeys(names) if name not in known and tokenizer.token_to_id(name) is not None]
    if wanted:
        tokenizer.add_tokens([AddedToken(name, special=True) for name in wanted])
    return wanted
