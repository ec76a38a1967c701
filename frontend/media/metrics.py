"""Metrics of media in requests, in the registry of the process."""

from __future__ import annotations

from headrace.base.metrics import Counter, Histogram

ITEMS = Counter("headrace_frontend_media_items", "Media items of requests by kind and where they came from", ["kind", "source"])
BYTES = Counter("headrace_frontend_media_bytes", "Bytes of media items by kind", ["kind"])
REFUSED = Counter("headrace_frontend_media_refused", "Media items that were refused, by error code", ["code"])
DECODED = Counter(
    "headrace_frontend_media_decoded", "Images with frontend.media_decode: decoded, or left to the worker", ["outcome"]
)
FETCH_S = Histogram(
    "headrace_frontend_media_fetch_seconds",
    "From a media URL to its bytes, waiting for a free place included",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
)
