"""Takes all snapshots anew: python -m tests.unit.snapshots"""

from tests.unit.snapshots.photographs import FILES, SNAPSHOTS, taken

FILES.mkdir(exist_ok=True)
for name in SNAPSHOTS:
    (FILES / name).write_text(taken(name), encoding="utf-8")
