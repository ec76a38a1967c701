"""What a run tells of seeds that have moved can be written into the tables."""

from pathlib import Path

from tests.simulation.guard_seeds import moved, rewritten

TOLD = """
============================ seeds that have moved =============================
publish_before_delete: 'twopoison', 88, after 6 runs
a_started_event_is_evidence: '5 of 64 on 6', 4, after 417 runs
=========================== short test summary info ============================
"""


def test_guards_that_a_run_names_get_their_seeds_and_others_keep_theirs() -> None:
    seeds = moved(TOLD.splitlines())
    assert seeds == {"publish_before_delete": ("twopoison", 88), "a_started_event_is_evidence": ("5 of 64 on 6", 4)}
    table = 'WHERE = {\n    "publish_before_delete": ("base", 3),\n    "groups_shrink": ("1 of 64 on 2", 0),\n}\n'
    assert rewritten(table, seeds) == table.replace('("base", 3)', '("twopoison", 88)')


def test_every_table_of_guards_can_be_rewritten() -> None:
    for file in Path(__file__).parent.glob("*/test_guards.py"):
        table = file.read_text()
        name = next(line.strip().split(":")[0].strip('"') for line in table.partition("WHERE")[2].splitlines()[1:])
        assert rewritten(table, {name: ("elsewhere", 12_345)}).count('("elsewhere", 12345)') == 1, file
