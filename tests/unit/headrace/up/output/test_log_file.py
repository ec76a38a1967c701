"""The log beside the short terminal: bounded, and never a reason to end."""

from __future__ import annotations

from pathlib import Path

from headrace.up.output.log_file import LogFile


def test_lines_are_appended_over_runs(tmp_path: Path) -> None:
    for line in ("one", "two"):
        log = LogFile(tmp_path / "run" / "up.log")
        assert log.write(line)
        log.close()
    assert (tmp_path / "run" / "up.log").read_text() == "one\ntwo\n"


def test_a_full_file_makes_room_for_a_new_one_and_is_kept_once(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "up.log", most_bytes=8)
    for number in range(6):
        assert log.write(f"line {number}")
    log.close()
    assert (tmp_path / "up.log").read_text() == "line 4\nline 5\n"
    assert (tmp_path / "up.log.1").read_text() == "line 2\nline 3\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["up.log", "up.log.1"]


def test_what_cannot_be_written_is_counted_and_later_lines_are_tried_again(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    log = LogFile(tmp_path / "run" / "up.log")
    assert not log.write("lost")
    assert (log.lost, log.error) == (1, "File exists")
    (tmp_path / "run").unlink()
    assert log.write("kept")
    log.close()
    assert (tmp_path / "run" / "up.log").read_text() == "kept\n"
