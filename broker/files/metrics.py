"""Declares the metrics of files."""

from __future__ import annotations

from headrace.base.metrics import Counter

WRITTEN = Counter(
    "headrace_files_written_total", "Files by purpose and outcome: stored, left, or an error", ["purpose", "outcome"]
)
WRITTEN_BYTES = Counter("headrace_files_written_bytes_total", "Bytes of files taken from clients and makers")
READ_BYTES = Counter("headrace_files_read_bytes_total", "Bytes of files read from the store")
UPLOADS = Counter("headrace_files_uploads_total", "Uploads in parts by what was done with them", ["what"])
SWEPT = Counter("headrace_files_swept_total", "Leftovers removed: chunks of dead writers, contents without a record", ["what"])
