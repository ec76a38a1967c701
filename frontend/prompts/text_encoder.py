"""Encodes text into token ids with two libraries: a fast one if it agrees with the one that defines the ids.

`tokenizers` defines the meaning of a model's `tokenizer.json`, at a microsecond per token. `fastokens` reads the same file and
takes a tenth to a fiftieth of that time, but it does not support every kind of tokenizer and refuses some texts. Tokenizers
that it cannot load, and texts for which it raises, are left to `tokenizers`. When a tokenizer is loaded, both libraries have to
give the same ids for texts chosen to reveal differences.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Protocol, TypeVar

import structlog
from tokenizers import AddedToken, Tokenizer

from headrace.broker.codec import pack_u32, unpack_u64
from headrace.frontend.errors import ModelUnusable

# Finds the points where a prompt can be split so that the pieces, tokenised one by one, give the ids of the whole.
#
# A tokenizer first takes the tokens added to its vocabulary (special tokens above all) out of the raw text. The text between
# them goes through normaliser, pre-tokenizer and model piece by piece. So a cut right before such a token changes nothing, if
# the tokenizer is sure to find the token there. That holds for an added token
#
# - that is searched in the raw text (not normalised), at any position (not only as a single word), - that includes no white
# space before it, and does not begin with any, - that no other added token searched in the raw text can overlap from the
# left, - and if all longer added tokens that begin with it have these properties as well.
#
# The cut is before the token, never behind it, because a piece that begins the text may be treated differently.

_WINDOW = 1 << 16  # characters searched at a time, because the search holds the interpreter's lock


def cut_tokens(tokenizer: Tokenizer) -> list[str]:
    """Return the added tokens before which every text can be cut, longest first."""
    if tokenizer.encode_special_tokens:  # special tokens are treated as ordinary text
        return []
    raw = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content and not token.normalized]
    overlaps = _Overlaps([token.content for token in raw])
    greedy = [token.content for token in raw if token.lstrip or token.single_word]
    safe = [
        token.content
        for token in raw
        if not token.content[0].isspace()
        and not any(other.startswith(token.content) for other in greedy)
        and not overlaps.into(token.content)
    ]
    return sorted(safe, key=lambda content: (-len(content), content))


class _Overlaps:
    """Finds tokens that another one can overlap from the left. Some models have thousands, so pairs are not compared."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._ends = {token[k:] for token in tokens for k in range(1, len(token))}
        self._insides = "\0".join(token[1:] for token in tokens)

    def into(self, token: str) -> bool:
        """Return True if a token ends with a beginning of this one, or contains it."""
        return token in self._insides or any(token[:k] in self._ends for k in range(1, len(token) + 1))


class SplitPoints:
    """Splits texts for one tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokens = cut_tokens(tokenizer)
        self._pattern = re.compile("|".join(map(re.escape, tokens))) if tokens else None
        self._longest = max(map(len, tokens), default=0)

    def split(self, text: str) -> list[str]:
        """Split a text into pieces that join to it. All but the first begin with an added token."""
        cuts = [0, *(at for at in self._cuts(text) if at), len(text)]
        return [text[start:end] for start, end in pairwise(cuts)]

    def _cuts(self, text: str) -> Iterator[int]:
        if self._pattern is None:
            return
        for start in range(0, len(text), _WINDOW):
            end = start + _WINDOW
            for found in self._pattern.finditer(text, start, min(end + self._longest, len(text))):
                if found.start() >= end:
                    break  # the next window finds it again
                yield found.start()


# Refuses texts that are far too long before they are tokenised as a whole.
#
# A tokenizer keeps some 150 bytes per token while it works, so a text of 30 MB can take gigabytes before it is refused. Long
# texts are therefore counted piece by piece until they exceed the limit, and many texts are tokenised a few at a time.

T = TypeVar("T", bound="str | tuple[str, str]")

LONG = 1 << 20  # characters; the tokens of a text up to this length fit into some hundred megabytes
SUSPICIOUS = 8  # characters per token of the context; ordinary text has three to five
PIECE = 256 * 1024  # characters
_CUT = 16  # tokens that cutting a text in two may add


def is_suspicious(text: str, context_length: int) -> bool:
    """Return True if only an unusual text of this length would fit into the context."""
    size = len(text)
    return size > PIECE and size > SUSPICIOUS * context_length


def least_tokens(tokenizer: Tokenizer, text: str, *, enough: int) -> int:
    """Return a lower bound of the number of tokens. Counting stops a little above `enough`."""
    tokens = 0
    for at in range(0, len(text), PIECE):
        piece = tokenizer.encode_batch_fast([text[at : at + PIECE]], add_special_tokens=False)[0]
        tokens += max(0, len(piece) - _CUT)
        if tokens > enough:
            break
    return tokens


def in_groups(texts: Sequence[T]) -> Iterator[list[T]]:
    """Yield texts, or pairs of them, in order, in groups of at most `LONG` characters or of a single one."""
    group: list[T] = []
    size = 0
    for text in texts:
        more = len(text) if isinstance(text, str) else sum(map(len, text))
        if group and size + more > LONG:
            yield group
            group, size = [], 0
        group.append(text)
        size += more
    if group:
        yield group


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
