"""More clients at once than there are slots."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.scene import deployed

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]


async def test_a_thousand_clients_at_once_are_all_answered(tmp_path: Path) -> None:
    """Promise: none is refused, cut or answered wrong, and nothing is left behind. There are slots for a tenth of them."""
    engine = ('timing_overrides={"decode_base_s": 0.01, "prefill_tokens_per_s": 200000}', "slots=48")
    async with deployed(tmp_path, engine=engine, workers=2, frontends=2) as scene:
        asked = [
            scene.begin(scene.question(4 + n % 9, stream=n % 3 > 0, prompt=16), frontend=n % 2, deadline_s=120)
            for n in range(1000)
        ]
        await scene.answered(*asked)
        await scene.at_rest()
