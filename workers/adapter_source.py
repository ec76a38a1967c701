"""Checks the files of an adapter before an engine reads them: weights as safetensors only, nothing that could run code.

The format: a little-endian 8-byte length, a JSON header of that length, then the tensors' bytes.  Read here and not by the
`safetensors` package, because a worker without an engine of its own, the simulator, does not have it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import unquote, urlsplit

from headrace.workers.errors import AdapterFilesError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
FILES = (CONFIG, WEIGHTS)

MOST_CONFIG = 1024 * 1024  # bytes
MOST_HEADER = 100 * 1024 * 1024  # bytes; the format's own limit
_LENGTH = 8
_RUNS_CODE = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".py")


def check_adapter_folder(folder: Path) -> None:
    """Raise AdapterFilesError if this folder holds no adapter, or one that an engine must not read."""
    if not folder.is_dir():
        raise AdapterFilesError(f"there is no folder {folder}")
    for path in sorted(folder.iterdir()):
        if path.suffix in _RUNS_CODE:
            raise AdapterFilesError(f"{path} may hold code: adapters are read as safetensors only")
    _check_config(folder / CONFIG)
    _check_weights(folder / WEIGHTS)


def _check_config(path: Path) -> None:
    try:
        if path.stat().st_size > MOST_CONFIG:
            raise AdapterFilesError(f"{path} has {path.stat().st_size} bytes, more than {MOST_CONFIG}")
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise AdapterFilesError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise AdapterFilesError(f"{path} is no JSON: {error}") from None
    kind = config.get("peft_type", "LORA") if isinstance(config, dict) else None
    if kind != "LORA":
        raise AdapterFilesError(f"{path} does not describe a LoRA adapter: peft_type is {kind!r}")


def _check_weights(path: Path) -> None:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH), "little")
            if size < _LENGTH or not 2 <= length <= min(MOST_HEADER, size - _LENGTH):
                raise AdapterFilesError(f"{path} is no safetensors file: its header would have {length} of {size} bytes")
            header = json.loads(file.read(length))
    except OSError as error:
        raise AdapterFilesError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise AdapterFilesError(f"{path} is no safetensors file: {error}") from None
    data = size - _LENGTH - length
    if not isinstance(header, dict) or not all(_fits(value, data) for name, value in header.items() if name != "__metadata__"):
        raise AdapterFilesError(f"{path} is no safetensors file: a tensor lies outside of its {data} bytes")


def _fits(tensor: Any, size: int) -> bool:
    match tensor:
        case {"data_offsets": [int(begin), int(end)]}:
            return 0 <= begin <= end <= size
        case _:
            return False


# Parses where an adapter's files are, and checks that against what the operator allows.
#
# | source | what it is |
# |---|---|
# | `/adapters/sql`, `file:///adapters/sql` | a folder on the worker's machine |
# | `store://sql` | pushed into the deployment's object store by `headrace adapter push` |
# | `hf://org/name`, `hf://org/name@revision` | a repository of a Hugging Face hub |
# | `s3://bucket/prefix` | objects below a prefix, of S3 or a store that speaks its protocol |
# | `https://host/sql.tar.gz#sha256=…` | a tar archive, whose digest the source names |

Kind = Literal["folder", "store", "hf", "s3", "https", "http"]
KINDS: tuple[Kind, ...] = get_args(Kind)
DEFAULT_ALLOWED: tuple[str, ...] = ("folder", "store")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}\Z", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,127}\Z", re.ASCII)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]\Z")
_DIGEST = re.compile(r"sha256=([0-9a-f]{64})\Z")


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """The place of an adapter's files. `place`: folder, name in the store, repository, bucket/prefix or address."""

    kind: Kind
    place: str
    revision: str = ""  # of a hub
    sha256: str = ""  # of an archive

    @property
    def address(self) -> str:
        """The source as rules and logs name it: without revision, digest and query."""
        match self.kind:
            case "folder":
                return self.place
            case "http" | "https":
                return self.place.partition("?")[0]
            case kind:
                return f"{kind}://{self.place}"


def is_remote(text: str) -> bool:
    """Return whether this names more than a folder."""
    return "://" in text and not text.startswith("file://")


def check_adapter_name(name: str) -> str:
    """Return the name under which an adapter is pushed. Raises AdapterFilesError for one that no source could name."""
    if not _NAME.match(name):
        raise AdapterFilesError(f"an adapter's name has letters, digits, '.', '_' and '-', at most 128, got {name!r}")
    return name


def parse_source(text: str) -> AdapterSource:
    """Parse a source. Raises AdapterFilesError naming it and what is wrong."""
    if not text:
        raise AdapterFilesError("an adapter's source is empty: say where its files are")
    if not is_remote(text):
        return _folder(text)
    kind, _, rest = text.partition("://")
    if kind not in KINDS or kind == "folder":
        raise AdapterFilesError(f"{text!r} begins with {kind!r}; an adapter comes from a folder, {', '.join(KINDS[1:])}")
    if any(part in (".", "..") for part in unquote(rest.partition("?")[0]).replace("\\", "/").split("/")):
        raise AdapterFilesError(f"{text!r}: no part of a source may be '.' or '..'")
    if kind == "store":
        return AdapterSource("store", check_adapter_name(rest))
    if kind == "hf":
        return _repository(text, rest)
    if kind == "s3":
        return _objects(text, rest)
    return _archive(text, "https" if kind == "https" else "http")


def _folder(text: str) -> AdapterSource:
    if not text.startswith("file://"):
        return AdapterSource("folder", text)
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost"):
        raise AdapterFilesError(f"{text!r} names a file of another machine, {parts.netloc!r}")
    return AdapterSource("folder", unquote(parts.path))


def _repository(text: str, rest: str) -> AdapterSource:
    name, _, revision = rest.partition("@")
    if not _REPOSITORY.match(name) or ("@" in rest and not _REVISION.match(revision)):
        raise AdapterFilesError(f"{text!r} is not hf://organisation/name or hf://organisation/name@revision")
    return AdapterSource("hf", name, revision=revision)


def _objects(text: str, rest: str) -> AdapterSource:
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.strip("/")
    if not _BUCKET.match(bucket) or not prefix:
        raise AdapterFilesError(f"{text!r} is not s3://bucket/prefix")
    return AdapterSource("s3", f"{bucket}/{prefix}")


def _archive(text: str, kind: Literal["https", "http"]) -> AdapterSource:
    parts = urlsplit(text)
    digest = _DIGEST.match(parts.fragment)
    if digest is None:
        raise AdapterFilesError(f"{text!r} must end with the archive's digest, #sha256= and 64 hexadecimal digits")
    if not parts.hostname or parts.username is not None or parts.password is not None:
        raise AdapterFilesError(f"{parts.scheme}://…: an address needs a host, and may have no user or password")
    return AdapterSource(kind, parts._replace(fragment="").geturl(), sha256=digest[1])


@dataclass(frozen=True, slots=True)
class AllowedSources:
    """The sources that the operator allows: kinds of sources (`folder`, `hf`), and places with all that lies below them."""

    rules: Sequence[str] = DEFAULT_ALLOWED

    def __post_init__(self) -> None:
        for rule in self.rules:
            if "://" in rule:
                if rule.partition("://")[0] not in KINDS[1:]:
                    raise ValueError(f"adapter_sources: {rule!r} begins with no kind of source: {', '.join(KINDS[1:])}")
            elif rule not in KINDS and not rule.startswith("/"):
                raise ValueError(f"adapter_sources: {rule!r} is neither a kind ({', '.join(KINDS)}) nor a place")

    def check(self, source: AdapterSource) -> None:
        if not any(allows(rule, source.kind, source.address) for rule in self.rules):
            allowed = ", ".join(self.rules) or "nothing"
            raise AdapterFilesError(
                f"adapters from {source.address} are not allowed here; worker.adapter_sources allows: {allowed}"
            )


def allows(rule: str, kind: str, address: str) -> bool:
    """Return whether a rule, a kind of sources or a place, allows a source; the address of a folder is its path."""
    if rule == kind:
        return True
    if kind == "folder":
        # Links are followed first: a link below an allowed folder may lead out of it.
        return rule.startswith("/") and Path(address).resolve().is_relative_to(Path(rule).resolve())
    return "://" in rule and (address == rule or address.startswith(rule.rstrip("/") + "/"))
