"""Archives of adapters: the two files and nothing else come out, within a limit."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from headrace.workers.adapter_files.archive import pack, unpack
from headrace.workers.errors import AdapterFilesError
from tests.support.adapter_folders import adapter_folder

BOTH = ["adapter_config.json", "adapter_model.safetensors"]
MIB = 1024 * 1024


def archive(tmp_path: Path, *entries: tuple[str, bytes | tarfile.TarInfo], mode: str = "w") -> Path:
    path = tmp_path / "made.tar"
    with tarfile.open(path, mode) as made:  # type: ignore[call-overload]
        for name, content in entries:
            if isinstance(content, tarfile.TarInfo):
                made.addfile(content)
                continue
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            made.addfile(entry, io.BytesIO(content))
    return path


def link(name: str, target: str) -> tuple[str, tarfile.TarInfo]:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    return name, entry


def refused(path: Path, into: Path, *, most_bytes: int = MIB) -> str:
    into.mkdir(exist_ok=True)
    with pytest.raises(AdapterFilesError) as told:
        unpack(path, into, most_bytes=most_bytes)
    return str(told.value)


def test_what_was_packed_comes_out_and_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "a")
    made = []
    for number in range(2):
        (folder / BOTH[0]).touch()  # another time
        path = tmp_path / f"{number}.tar"
        with path.open("wb") as out:
            pack(folder, out)
        made.append(path.read_bytes())
    assert made[0] == made[1]
    into = tmp_path / "b"
    into.mkdir()
    unpack(tmp_path / "0.tar", into, most_bytes=MIB)
    assert sorted(path.name for path in into.iterdir()) == BOTH
    assert all((into / name).read_bytes() == (folder / name).read_bytes() for name in BOTH)


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_compressed_archives_with_a_folder_in_them_are_read(tmp_path: Path, mode: str) -> None:
    path = archive(tmp_path, ("sql/README.md", b"x"), *((f"sql/{name}", b"{}") for name in BOTH), mode=mode)
    into = tmp_path / "b"
    into.mkdir()
    unpack(path, into, most_bytes=MIB)
    assert sorted(found.name for found in into.iterdir()) == BOTH


def test_other_files_stay_in_the_archive_wherever_they_would_go(tmp_path: Path) -> None:
    escape = ("../../escaped", b"x")
    path = archive(tmp_path, escape, link("aside", "/etc/passwd"), *((f"../{name}", b"{}") for name in BOTH))
    into = tmp_path / "in" / "b"
    into.mkdir(parents=True)
    unpack(path, into, most_bytes=MIB)
    assert sorted(str(found.relative_to(tmp_path)) for found in tmp_path.rglob("*") if found.is_file()) == sorted(
        ["made.tar", *(f"in/b/{name}" for name in BOTH)]
    )


def test_a_link_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path, link(BOTH[0], "/etc/passwd"), (BOTH[1], b"{}"))
    assert "not as a plain file" in refused(path, tmp_path / "b")


def test_a_file_twice_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path, (BOTH[0], b"{}"), (f"again/{BOTH[0]}", b"{}"))
    assert "twice" in refused(path, tmp_path / "b")


def test_a_small_archive_of_very_much_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path, ("padding", bytes(8 * MIB)), (BOTH[0], b"{}"), (BOTH[1], b"{}"), mode="w:gz")
    assert path.stat().st_size < MIB
    assert f"more than {MIB} bytes" in refused(path, tmp_path / "b")


def test_what_is_no_archive_or_lacks_a_file_is_refused(tmp_path: Path) -> None:
    assert "has no adapter_model.safetensors" in refused(archive(tmp_path, (BOTH[0], b"{}")), tmp_path / "b")
    plain = tmp_path / "plain"
    plain.write_bytes(b"no archive")
    assert "cannot be read" in refused(plain, tmp_path / "b")
    cut = tmp_path / "cut"
    cut.write_bytes(archive(tmp_path, (BOTH[0], b"{}"), (BOTH[1], bytes(MIB // 2))).read_bytes()[:2000])
    assert "cannot be read" in refused(cut, tmp_path / "c")
