"""A label of metrics whose values come over the wire: the first ones have a series each, all later ones share one."""

from __future__ import annotations

OTHER = "(other)"


class BoundedLabel:
    """The values that have a series of their own."""

    def __init__(self, most: int) -> None:
        """Give at most `most` values a series, beside the shared one."""
        self._most = most
        self._values: set[str] = set()

    def of(self, value: str) -> str:
        """Return the label of a value: itself or, once there are too many, `OTHER`."""
        if value in self._values:
            return value
        if len(self._values) >= self._most:
            return OTHER
        self._values.add(value)
        return value
