"""Wishes for the scheduling of a request (1.2; 1.3 adds `agent_hierarchy`)."""

from dataclasses import dataclass
from typing import Any

from .version import IS_1_3

if IS_1_3:

    @dataclass(slots=True, kw_only=True)
    class SchedulingParams:
        attention_dp_rank: int | None = None
        attention_dp_relax: bool = True
        agent_hierarchy: list[Any] | None = None

else:

    @dataclass(slots=True, kw_only=True)
    class SchedulingParams:  # type: ignore[no-redef]
        attention_dp_rank: int | None = None
        attention_dp_relax: bool = True
