"""Lines of a batch per second, and what each process spends on them: CPU, and memory from the start to the end of the batch.

python -m benchmarks.batch_lines --lines 50000
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import openai

from benchmarks.deployment import Deployment
from benchmarks.processes import Usage, processes_of, usage

MIB = 1024 * 1024
FAST = (
    "--engine-arg",
    'timing_overrides={"decode_base_s": 0.0005, "prefill_tokens_per_s": 1000000}',
    "--engine-arg",
    "slots=128",
)
ENDS = ("completed", "failed", "expired", "cancelled")


def write_input(file: Path, lines: int, line_bytes: int, model: str, tokens: int) -> None:
    """Lines with one of ten system prompts each, filled up to about so many bytes."""
    with file.open("wb") as out:
        for number in range(lines):
            system = f"You are helper {number % 10}. " * 20
            request = {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {
                    "model": model,
                    "messages": [{"role": "system", "content": system}, {"role": "user", "content": f"Line {number}."}],
                    "max_tokens": tokens,
                    "user": "",
                },
            }
            request["body"]["user"] = "u" * max(0, line_bytes - len(json.dumps(request)))  # type: ignore[index]
            out.write(json.dumps(request).encode() + b"\n")


def watch(client: openai.OpenAI, batch_id: str, pids: dict[str, int], most: dict[str, int]) -> openai.types.Batch:
    """Wait for the end; `most` gets the largest memory of each process."""
    while True:
        batch = client.batches.retrieve(batch_id)
        for name, pid in pids.items():
            most[name] = max(most.get(name, 0), usage(pid).rss)
        if batch.status in ENDS:
            return batch
        time.sleep(0.5)


def main() -> None:
    """Run one batch and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--line-bytes", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--port", type=int, default=18080)
    wishes = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        deployment = Deployment(Path(folder), wishes.port, wishes.workers, routers=1, arguments=FAST)
        with deployment, openai.OpenAI(base_url=f"http://127.0.0.1:{wishes.port}/v1", api_key="none", timeout=600) as client:
            file = Path(folder) / "in.jsonl"
            write_input(file, wishes.lines, wishes.line_bytes, deployment.model, wishes.tokens)
            began = time.perf_counter()
            with file.open("rb") as data:
                uploaded = client.files.create(file=data, purpose="batch")
            print(f"upload: {file.stat().st_size / MIB:.0f} MiB in {time.perf_counter() - began:.1f} s", flush=True)
            pids = processes_of(Path(folder), deployment.pid)
            before: dict[str, Usage] = {name: usage(pid) for name, pid in pids.items()}
            most: dict[str, int] = {}
            began = time.perf_counter()
            made = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h")
            batch = watch(client, made.id, pids, most)
            seconds = time.perf_counter() - began
            counts = batch.request_counts
            print(f"{batch.status}: {counts}; {seconds:.1f} s, {wishes.lines / seconds:.0f} lines/s", flush=True)
            for name, pid in sorted(pids.items()):
                after = usage(pid)
                cpu_ms = (after.cpu_s - before[name].cpu_s) * 1000 / wishes.lines
                print(
                    f"{name:12} {cpu_ms:.2f} ms of CPU a line, "
                    f"{before[name].rss / MIB:.0f} MiB before, {most[name] / MIB:.0f} at most, {after.rss / MIB:.0f} after"
                )


if __name__ == "__main__":
    main()
