"""Reads the limits on files from the settings of a frontend."""

from __future__ import annotations

from headrace.broker.files.quota import FileLimits
from headrace.frontend.settings import FrontendSettings


def file_limits(settings: FrontendSettings) -> FileLimits:
    """Return the limits that the operator has set."""
    return FileLimits(
        file_bytes=settings.file_max_bytes,
        batch_bytes=min(settings.batch_file_max_bytes, settings.file_max_bytes),
        tenant_files=settings.tenant_files,
        tenant_bytes=settings.tenant_file_bytes,
    )
