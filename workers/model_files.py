"""Reads an operator's chat template and tries it, so that a wrong one stops the start and not the first chat."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from headrace.workers.errors import EngineStartFailed
from headrace.workers.settings import WorkerSettings

MOST_BYTES = 1 << 20
SAID = "a-message-to-try-the-template"
_MARKS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")  # mark text for training alone


def read_template(path: str) -> bytes:
    """Return the template in a file. Raises EngineStartFailed if it cannot be read, does not compile, or loses a message.

    It renders a short chat, so call it in a thread.
    """
    try:
        data = Path(path).expanduser().read_bytes()
        source = data.decode()
    except OSError as error:
        raise EngineStartFailed(f"the chat template {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise EngineStartFailed(f"the chat template {path} is not UTF-8: {error}") from None
    if len(data) > MOST_BYTES:
        raise EngineStartFailed(f"the chat template {path} has {len(data)} bytes; {MOST_BYTES} are the most")
    _try(source, path)
    return data


def _try(source: str, path: str) -> None:
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": lambda _pattern: "today"}
    try:
        template = environment.from_string(_MARKS.sub("", source))
    except jinja2.TemplateSyntaxError as error:
        raise EngineStartFailed(f"the chat template {path} does not compile: {error.message} (line {error.lineno})") from None
    # Templates take a message as text, or as parts; one of the two is enough.
    contents: tuple[Any, ...] = (SAID, [{"type": "text", "text": SAID}])
    why = "it leaves the message out"
    for content in contents:
        chat = {"messages": [{"role": "user", "content": content}], "add_generation_prompt": True}
        try:
            if SAID in template.render(**chat, bos_token="", eos_token="", tools=None):
                return
        except Exception as error:  # of the template's own code: anything may be raised
            why = f"{type(error).__name__}: {error}"
    raise EngineStartFailed(f"the chat template {path} cannot render a chat of one message: {why}")


def _raise_exception(message: str) -> None:
    raise ValueError(message)


# Writes a GGUF model out as a plain Hugging Face folder: `python -m headrace.workers.model_files MODEL.gguf FOLDER`.
#
# The conversion is a program of its own because it needs torch, transformers and a gigabyte of memory for some seconds, which
# its caller should not keep.


def dequantize(gguf: Path, folder: Path) -> None:
    """Convert `gguf` into `folder`: bf16 safetensors, tokenizer, chat template and generation config."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
    )
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def main(arguments: list[str]) -> int:
    """Convert the model and return the exit code."""
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m headrace.workers.model_files MODEL.gguf FOLDER\n")
        return 2
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    gguf, folder = Path(arguments[0]), Path(arguments[1])
    dequantize(gguf, folder)
    for path in folder.iterdir():
        path.chmod(0o644)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


HUB = "https://huggingface.co"

_PATH_STARTS = ("/", "./", "../", "~")
_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(:[\w.-]+)?\Z")  # the last part names a file type of GGUF
_CONFIGURED_BY = ("config.json", "params.json")
_ON = frozenset({"1", "on", "true", "yes"})
_OTHER_HUBS = ("VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE")  # the engine does not ask Hugging Face then
_TIMEOUT_S = 5.0


def architectures(model: str) -> tuple[str, ...]:
    """Return the architectures that the files of a model name; none for a model that is no folder, or says nothing."""
    try:
        named = json.loads((Path(model) / "config.json").read_bytes())["architectures"]
        return tuple(str(name) for name in named or ())
    except (OSError, LookupError, TypeError, ValueError):
        return ()


def check_model_path(model: str) -> None:
    """Raise EngineStartFailed for a folder that is not there or holds no model, and for what can be neither folder nor id."""
    path = Path(model)
    if path.is_dir():
        if not any((path / name).is_file() for name in _CONFIGURED_BY) and not any(path.glob("*.gguf")):
            raise EngineStartFailed(f"the folder {path.resolve()} holds no model: it has no config.json")
    elif path.exists() or "://" in model:
        return
    elif model.startswith(_PATH_STARTS):
        raise EngineStartFailed(f"there is no folder {path.resolve()}")
    elif not _ID.match(model):
        raise EngineStartFailed(f"this is no Hugging Face id (organisation/name), and there is no folder {path.resolve()}")


def check_hub_model(model: str, args: Mapping[str, Any], environ: Mapping[str, str], *, timeout_s: float = _TIMEOUT_S) -> None:
    """Raise EngineStartFailed for a Hugging Face id that is not in the cache and that the hub does not have or give.

    Any other answer of the hub, and a certificate that cannot be verified here, is left to the engine.
    """
    if Path(model).exists() or "://" in model or any(environ.get(name, "").lower() in _ON for name in _OTHER_HUBS):
        return
    name = model.partition(":")[0]
    cache = _cache(environ)
    if any(_cached_check(folder, name) for folder in (cache, Path(str(args.get("download_dir") or cache)))):
        return
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if environ.get(variable, "").lower() in _ON:
            raise EngineStartFailed(f"it is not in the cache {cache}, and {variable} is set")
    hub = environ.get("HF_ENDPOINT", HUB).rstrip("/")
    token = _token(environ)
    request = urllib.request.Request(  # noqa: S310  # the operator's own address, or the hub's
        f"{hub}/api/models/{name}", headers={"Authorization": f"Bearer {token}"} if token else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310  # the same
            about = json.load(answer)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (401, 404):
            hint = "the token given does not open it" if token else "it is private, and HF_TOKEN is needed"
            raise EngineStartFailed(f"{hub} has no such model, or {hint}") from None
        return
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        if isinstance(why, ConnectionError | TimeoutError | socket.gaierror):
            text = getattr(why, "strerror", None) or str(why) or "no answer"
            raise EngineStartFailed(f"it is not in the cache {cache}, and {hub} cannot be reached: {text}") from None
        return
    if isinstance(about, dict) and about.get("gated") and not token:
        raise EngineStartFailed(f"it is gated: accept its terms at {hub}/{name}, and give HF_TOKEN")


def hub_folder(model: str, args: Mapping[str, Any], environ: Mapping[str, str]) -> Path | None:
    """Return where the files of a Hugging Face id are kept, None for a model that is no such id."""
    if Path(model).exists() or "://" in model:
        return None
    return _folder(Path(str(args.get("download_dir") or _cache(environ))), model.partition(":")[0])


def _folder(cache: Path, name: str) -> Path:
    return cache / f"models--{name.replace('/', '--')}"


def _cached_check(cache: Path, name: str) -> bool:
    snapshots = _folder(cache, name) / "snapshots"
    return any((folder / file).exists() for folder in snapshots.glob("*") for file in _CONFIGURED_BY) or any(
        snapshots.glob("*/*.gguf")
    )


def _cache(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("HF_HUB_CACHE") or _home(environ) / "hub").expanduser()


def _home(environ: Mapping[str, str]) -> Path:
    root = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environ.get("HF_HOME") or Path(root) / "huggingface").expanduser()


def _token(environ: Mapping[str, str]) -> str:
    given = environ.get("HF_TOKEN")
    if given is not None:
        return given.strip()
    try:
        return Path(environ.get("HF_TOKEN_PATH") or _home(environ) / "token").expanduser().read_text().strip()
    except (OSError, ValueError):
        return ""


def served_name(settings: WorkerSettings) -> str:
    """Return the name that clients use: the setting, else the model's name, for a folder its last part."""
    if settings.served_name:
        return settings.served_name
    return settings.model.rstrip("/").rsplit("/", 1)[-1] if settings.model.startswith(("/", ".")) else settings.model


# Finds the folder with a model's `tokenizer.json`, by which frontends tokenise, or writes that file for a model without one.
#
# Models with a vocabulary of another kind (`vocab.json` with `merges.txt`, of tiktoken, of sentencepiece) have no such file.
# Their engine's own tokenizer is then most often one of the same library, which transformers has built from that vocabulary.
# It is written as it is, so the engine and all frontends have the same ids.

log = structlog.get_logger(__name__)

FILE = "tokenizer.json"
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.*", "additional_chat_templates/*.jinja")


def tokenizer_folder(
    name: str, revision: str | None, own: Callable[[], Any], *, environ: Mapping[str, str] = os.environ
) -> Path:
    """Return the folder with the tokenizer of a model. `name` is a folder, or an id of a hub whose files are here.

    `own` gives the engine's tokenizer. What is written lies in the user's cache, under a name that follows from the content.
    Raises EngineStartFailed if the model has no file and that cannot be written as one.
    """
    folder = Path(name) if Path(name).is_dir() else _cached(name, revision)
    if folder is not None and (folder / FILE).is_file():
        return folder
    tokenizer = own()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise EngineStartFailed(
            f"{name} has no {FILE}, and Headrace needs a tokenizer in that form: requests come as token ids. The engine's own "
            f"({type(tokenizer).__name__}) cannot be written as one"
        )
    try:
        return _write(str(backend.to_str()), folder, environ)
    except OSError as error:
        raise EngineStartFailed(f"{name} has no {FILE}, and one cannot be written: {error}") from None


def _cached(name: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    for file in (FILE, "tokenizer_config.json", "config.json"):
        if isinstance(found := try_to_load_from_cache(name, file, revision=revision), str):
            return Path(found).parent
    return None


def _write(tokenizer: str, folder: Path | None, environ: Mapping[str, str]) -> Path:
    files = {FILE: tokenizer.encode()}
    if folder is not None:
        for path in sorted(path for pattern in _BESIDE for path in folder.glob(pattern)):
            files[path.relative_to(folder).as_posix()] = path.read_bytes()
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    place = Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "headrace" / "tokenizers"
    made = place / digest.hexdigest()[:32]
    if not (made / FILE).is_file():
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f"{made.name}.", suffix=".part", dir=place))
        try:
            for name, data in files.items():
                (part / name).parent.mkdir(exist_ok=True)
                (part / name).write_bytes(data)
            _put(part, made)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        log.info("tokenizer.written", folder=str(made), model=str(folder or ""))
    return made


def _put(part: Path, made: Path) -> None:
    try:
        part.rename(made)
    except OSError:
        if not (made / FILE).is_file():  # else another worker was there first, with the same content
            raise


# Chooses the format in which an engine reads a model's weights: safetensors, unless the operator says otherwise.
#
# Left alone, engines read `*.bin` and `*.pt` where there are no safetensors. Those are pickles, which can hold code.

SETTING = "load_format"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def weight_format(model: str, args: Mapping[str, Any]) -> dict[str, str]:
    """Return the engine setting that lets only safetensors be read, empty where the operator has given it, and for GGUF.

    Raises EngineStartFailed for a folder whose weights are pickles.
    """
    path = Path(model).expanduser()
    if args.get(SETTING) is not None or "://" in model or path.is_file() or (":" in model and not path.is_dir()):
        return {}
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return {SETTING: "mistral" if any(path.glob("consolidated*.safetensors")) else "safetensors"}
    if any(path.glob("*.gguf")):
        return {}
    if pickled := sorted(file.name for pattern in _PICKLES for file in path.glob(pattern)):
        raise EngineStartFailed(
            f"the weights in {path.resolve()} are pickles ({pickled[0]}), which can hold code: convert them to safetensors, or "
            f"say that they may be read with --engine-arg {SETTING}=auto"
        )
    return {SETTING: "safetensors"}
