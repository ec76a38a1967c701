"""Describes a hook for SGLang's `HookRegistry`, so that the modules of this folder import nothing of SGLang."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Hook:
    """A function to put in front of, around or in place of `target`, a dotted path."""

    target: str
    function: Callable[..., Any]
    kind: Literal["before", "after", "around", "replace"]
