"""The progress of a download, told in steps."""

from __future__ import annotations

import threading
from pathlib import Path

from headrace.workers.models.download_progress import folder_bytes, growth_reported, reported


def arrive(path: Path) -> None:
    """Put a MB there at once: what reads the folder never sees half of it."""
    arriving = path.parent.with_name("arriving")
    arriving.write_bytes(bytes(1_000_000))
    arriving.replace(path)


def test_what_has_arrived_is_told_once_per_step(tmp_path: Path) -> None:
    told: list[str] = []
    heard = threading.Event()

    def progress(line: str) -> None:
        told.append(line)
        heard.set()

    folder = tmp_path / "folder"
    folder.mkdir()
    with reported(folder, progress, what="downloading it", total_mb=2, every_s=0.001):
        for number in (1, 2):
            heard.clear()
            arrive(folder / f"part-{number}")
            assert heard.wait(10)
    assert told == ["downloading it, 1 of 2 MB …", "downloading it, 2 of 2 MB …"]


def test_a_download_of_unknown_size_tells_what_it_has_and_that_it_stopped(tmp_path: Path) -> None:
    told: list[float | None] = []
    heard = threading.Event()

    def tell(arrived_mb: float | None) -> None:
        told.append(arrived_mb)
        heard.set()

    folder = tmp_path / "comes later"
    with growth_reported(folder, tell, step_mb=1, every_s=0.001):
        folder.mkdir()
        arrive(folder / "part")
        while None not in told:
            assert heard.wait(10)
            heard.clear()
    assert told == [1.0, None]


def test_folders_below_count_and_links_do_not(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(bytes(10))
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    (tmp_path / "dead").symlink_to(tmp_path / "nowhere")
    assert folder_bytes(tmp_path) == 10
    assert folder_bytes(tmp_path / "nowhere") == 0
