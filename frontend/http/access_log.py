"""Writes the log's line of each request.

structlog's methods take the fields of a line as keywords, and copy them from call to call: that was half of what a line cost.
Here the fields go through the configured processors as the dict that they are.
"""

from __future__ import annotations

import logging
from typing import Any

import structlog
from structlog.typing import EventDict

log = structlog.get_logger()


class AccessLog:
    """The lines of a frontend's requests. The configuration of the log is looked at when the first one comes."""

    def __init__(self) -> None:
        self._logger: Any = None
        self._processors: Any = ()
        self._output: Any = None

    def takes(self, level: int) -> bool:
        """Return True if lines of this level are written."""
        if self._logger is None:
            configured = structlog.get_config()
            self._logger = log.bind()
            self._processors, self._output = configured["processors"], configured["logger_factory"]()
        return bool(self._logger.is_enabled_for(level))

    def write(self, level: int, event: EventDict) -> None:
        """Write a line of a level that is taken. `event` belongs to the log from now on."""
        method = "debug" if level == logging.DEBUG else "info"
        event["event"] = "request.answered"
        line: Any = event
        try:
            for processor in self._processors:
                line = processor(self._output, method, line)
        except structlog.DropEvent:
            return
        getattr(self._output, method)(line)
