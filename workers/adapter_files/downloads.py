"""Downloads an adapter's files from Hugging Face hubs, S3 and web servers. Each function blocks: call it in a thread.

Every source has two steps.  The first names what the files hold now, cheaply: a commit, entity tags, a digest.  Equal names are
equal files, so that what is in the cache is not downloaded again.  The second writes the files into a folder.
"""

from __future__ import annotations

import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.workers.adapter_files.archive import PIECE, unpack
from headrace.workers.adapter_files.safe_files import FILES
from headrace.workers.adapter_files.source import AdapterSource, AllowedSources, parse_source
from headrace.workers.errors import AdapterFilesError

SILENCE_S = 30.0  # of a server in the middle of a download


def hub_version(source: AdapterSource, *, most_bytes: int) -> str:
    """Return the commit of a hub's repository. Raises AdapterFilesError for one without the files, or too large."""
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise AdapterFilesError("hf:// needs the package huggingface_hub, which comes with vLLM and SGLang") from None
    try:
        about = HfApi().model_info(source.place, revision=source.revision or None, files_metadata=True, timeout=SILENCE_S)
    except Exception as error:
        raise AdapterFilesError(f"the hub does not give {source.place}: {error}") from error
    sizes = {file.rfilename: file.size or 0 for file in about.siblings or ()}
    _check_sizes(source, sizes, most_bytes)
    if about.sha is None:
        raise AdapterFilesError(f"the hub names no commit of {source.place}")
    return str(about.sha)


def from_hub(source: AdapterSource, commit: str, folder: Path) -> None:
    """Download the adapter's files as they were at this commit. Raises AdapterFilesError."""
    from huggingface_hub import hf_hub_download

    try:
        for name in FILES:
            hf_hub_download(source.place, name, revision=commit, local_dir=folder)
    except Exception as error:
        raise AdapterFilesError(f"the hub does not give {source.place}: {error}") from error


def objects_version(source: AdapterSource, *, most_bytes: int) -> str:
    """Return the entity tags of the two objects. Raises AdapterFilesError for missing ones, or too large."""
    bucket, _, prefix = source.place.partition("/")
    client = _s3()
    tags, sizes = [], {}
    for name in FILES:
        try:
            about = client.head_object(Bucket=bucket, Key=f"{prefix}/{name}")
        except Exception as error:
            raise AdapterFilesError(f"s3://{bucket}/{prefix}/{name} cannot be read: {error}") from error
        sizes[name] = about["ContentLength"]
        tags.append(about["ETag"])
    _check_sizes(source, sizes, most_bytes)
    return " ".join(tags)


def from_objects(source: AdapterSource, tags: str, folder: Path) -> None:
    """Download the two objects, if they still have these entity tags. Raises AdapterFilesError."""
    bucket, _, prefix = source.place.partition("/")
    client = _s3()
    for name, tag in zip(FILES, tags.split(" "), strict=True):
        try:
            body = client.get_object(Bucket=bucket, Key=f"{prefix}/{name}", IfMatch=tag)["Body"]
            with (folder / name).open("wb") as out:
                for piece in body.iter_chunks(PIECE):
                    out.write(piece)
        except Exception as error:
            raise AdapterFilesError(f"s3://{bucket}/{prefix}/{name} cannot be read: {error}") from error


def _s3() -> Any:
    """Return a client with the credentials and the region of the environment; `AWS_ENDPOINT_URL` names another store."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise AdapterFilesError("s3:// needs the package boto3: install the extra headrace[s3]") from None
    return boto3.client("s3", config=Config(connect_timeout=10, read_timeout=SILENCE_S, retries={"total_max_attempts": 3}))


class _CheckedRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects only to where adapters may come from."""

    def __init__(self, allowed: AllowedSources, sha256: str) -> None:
        self._allowed = allowed
        self._sha256 = sha256

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        self._allowed.check(parse_source(f"{newurl.partition('#')[0]}#sha256={self._sha256}"))
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def from_web(source: AdapterSource, folder: Path, *, allowed: AllowedSources, most_bytes: int) -> None:
    """Download an archive, check its digest and unpack it. Raises AdapterFilesError."""
    archive = folder / "archive"
    digest, size = hashlib.sha256(), 0
    opener = urllib.request.build_opener(_CheckedRedirects(allowed, source.sha256))
    try:
        with opener.open(source.place, timeout=SILENCE_S) as answer, archive.open("wb") as out:
            while piece := answer.read(PIECE):
                size += len(piece)
                if size > most_bytes:
                    raise AdapterFilesError(f"{source.address} has more than {most_bytes} bytes (worker.adapter_max_bytes)")
                digest.update(piece)
                out.write(piece)
    except (urllib.error.URLError, TimeoutError, ValueError, OSError) as error:
        raise AdapterFilesError(f"{source.address} cannot be downloaded: {error}") from None
    if digest.hexdigest() != source.sha256:
        raise AdapterFilesError(f"{source.address} has the digest {digest.hexdigest()}, not {source.sha256}")
    unpack(archive, folder, most_bytes=most_bytes)
    os.unlink(archive)


def _check_sizes(source: AdapterSource, sizes: Mapping[str, int], most_bytes: int) -> None:
    missing = [name for name in FILES if name not in sizes]
    if missing:
        raise AdapterFilesError(f"{source.address} has no {', '.join(missing)}")
    size = sum(sizes[name] for name in FILES)
    if size > most_bytes:
        raise AdapterFilesError(f"{source.address} has {size} bytes, more than {most_bytes} (worker.adapter_max_bytes)")
