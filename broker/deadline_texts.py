"""Words the errors of missed deadlines: clients read whether the request waited for nothing or was being answered."""

from __future__ import annotations


def never_started(waited_s: float) -> str:
    """Return the text for a request that no worker began."""
    return f"the deadline passed: the request waited {waited_s:.1f} s in the queue and never started"


def unfinished(after_s: float, tokens: int) -> str:
    """Return the text for a request that had begun, `after_s` after its arrival. `tokens` counts those of all choices."""
    return f"the deadline passed after {after_s:.1f} s: the request had started and produced {tokens} tokens"


def waiting_again(after_s: float) -> str:
    """Return the text for a request that had lost its worker and waited for another one."""
    return f"the deadline passed after {after_s:.1f} s: the request had been moved and waited for another worker"


def missed(after_s: float, attempt: int) -> str:
    """Return the text for a request in a queue. Copies with an attempt above 1 were moved there."""
    return never_started(after_s) if attempt == 1 else waiting_again(after_s)
