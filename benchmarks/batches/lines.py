"""Lines of a batch per second, and what each process spends on them: CPU, and memory from the start to the end of the batch.

With `--compare` the same requests are chats over HTTP, too: the difference in CPU is what a line costs beyond serving it. With
`--same-pace` the chats take as long as the lines did, so that what each process spends per second, busy or not, is in both;
`--gather-s 0.01` sends those of 10 ms at once, as a carrier starts lines, so that as many share a frame and an engine step.

python -m benchmarks.batches.lines --lines 50000 --line-bytes 4000
python -m benchmarks.batches.lines --lines 10000 --compare
python -m benchmarks.batches.lines --lines 10000 --compare --same-pace --gather-s 0.01
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import openai

from benchmarks.deployment import Deployment
from benchmarks.serving import parts_of
from headrace.tools.bench.serve import Usage, usage

MIB = 1024 * 1024
PATH = "/v1/chat/completions"
ENDS = ("completed", "failed", "expired", "cancelled")
WARM_LINES = 1500  # before anything is measured: more than are ever out at once
CONNECTIONS = 256  # as many as the workers have slots


def engine_of(step_s: float) -> list[str]:
    """Return the arguments for a fast engine with steps of this length."""
    timing = json.dumps({"decode_base_s": step_s, "prefill_tokens_per_s": 1_000_000})
    return ["--engine-arg", f"timing_overrides={timing}", "--engine-arg", "slots=128"]


def bodies(first: int, lines: int, line_bytes: int, model: str, tokens: int) -> Iterator[dict[str, Any]]:
    """Requests with one of ten system prompts each, filled up to about so many bytes a line."""
    for number in range(first, first + lines):
        system = f"You are helper {number % 10}. " * 20
        body = {
            "model": model,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": f"Line {number}."}],
            "max_tokens": tokens,
            "user": "",
        }
        body["user"] = "u" * max(0, line_bytes - 100 - len(json.dumps(body)))
        yield body


def write_input(file: Path, requests: Iterator[dict[str, Any]]) -> None:
    """Write requests as the lines of a batch."""
    with file.open("wb") as out:
        for number, body in enumerate(requests):
            request = {"custom_id": f"line-{number}", "method": "POST", "url": PATH, "body": body}
            out.write(json.dumps(request).encode() + b"\n")


def watch(client: openai.OpenAI, batch_id: str, pids: dict[str, int], most: dict[str, int]) -> openai.types.Batch:
    """Wait for the end; `most` gets the largest memory of each process."""
    while True:
        batch = client.batches.retrieve(batch_id)
        for name, pid in pids.items():
            most[name] = max(most.get(name, 0), usage(pid).rss)
        if batch.status in ENDS:
            return batch
        time.sleep(0.2)


def run_batch(client: openai.OpenAI, file: Path, pids: dict[str, int], most: dict[str, int]) -> openai.types.Batch:
    """Upload a file, run it as a batch and read its output to the end."""
    with file.open("rb") as data:
        uploaded = client.files.create(file=data, purpose="batch")
    made = client.batches.create(input_file_id=uploaded.id, endpoint=PATH, completion_window="24h")
    return watch(client, made.id, pids, most)


async def run_chats(port: int, requests: Iterator[dict[str, Any]], *, per_s: float = 0.0, gather_s: float = 0.0) -> int:
    """Send requests as chats, each connection its next one when its last was answered. Returns how many had status 200.

    `per_s`: how many are sent per second, 0 = as many as can be. `gather_s`: those of so long are sent at once.
    """
    at_once = max(1, round(per_s * gather_s))
    answered, loop, numbers = 0, asyncio.get_running_loop(), count()
    began = loop.time()

    async def connection() -> None:
        nonlocal answered
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for body in requests:
            if per_s:
                await asyncio.sleep(began + next(numbers) // at_once * at_once / per_s - loop.time())
            data = json.dumps(body).encode()
            head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(data)}\r\n\r\n"
            writer.write(head.encode() + data)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(answer.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            await reader.readexactly(length)
            answered += b" 200 " in answer.split(b"\r\n", 1)[0]
        writer.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(CONNECTIONS):
            group.create_task(connection())
    return answered


def snapshot(pids: dict[str, int]) -> dict[str, Usage]:
    """Return what each process has used so far."""
    return {name: usage(pid) for name, pid in pids.items()}


def cpu_ms(before: dict[str, Usage], after: dict[str, Usage], lines: int) -> dict[str, float]:
    """Return the CPU of each process per line, in milliseconds."""
    return {name: (after[name].cpu_s - before[name].cpu_s) * 1000 / lines for name in sorted(before)}


def show_cpu(what: str, cost: dict[str, float]) -> None:
    """Print the CPU per line of all processes."""
    each = ", ".join(f"{name} {ms:.3f}" for name, ms in cost.items())
    print(f"{what}: {sum(cost.values()):.3f} ms of CPU each ({each})", flush=True)


def cancel_one(client: openai.OpenAI, file: Path, lines: int) -> None:
    """Cancel a batch once a tenth of its lines have a result, and print how long it takes to end."""
    with file.open("rb") as data:
        uploaded = client.files.create(file=data, purpose="batch")
    batch = client.batches.create(input_file_id=uploaded.id, endpoint=PATH, completion_window="24h")
    while batch.request_counts is None or batch.request_counts.completed < lines // 10:
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    began = time.perf_counter()
    client.batches.cancel(batch.id)
    while batch.status != "cancelled":
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    print(f"cancelled in {time.perf_counter() - began:.1f} s: {batch.request_counts}")


def main() -> None:
    """Run one batch and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--line-bytes", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--step-s", type=float, default=0.002, help="time of an engine step")
    parser.add_argument("--port", type=int, default=18080)
    parser.add_argument("--compare", action="store_true", help="measure the same requests as chats over HTTP, too")
    parser.add_argument("--same-pace", action="store_true", help="with --compare: the chats take as long as the lines")
    parser.add_argument("--gather-s", type=float, default=0.0, help="with --same-pace: send the chats of so long at once")
    parser.add_argument("--cancel", action="store_true", help="cancel the batch, and measure how long that takes")
    wishes = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        deployment = Deployment(Path(folder), wishes.port, wishes.workers, routers=1, arguments=engine_of(wishes.step_s))
        with deployment, openai.OpenAI(base_url=f"http://127.0.0.1:{wishes.port}/v1", api_key="none", timeout=600) as client:
            measure(deployment, client, wishes)


def measure(deployment: Deployment, client: openai.OpenAI, wishes: argparse.Namespace) -> None:
    """Measure a batch in a deployment that runs and is warm."""
    pids = parts_of(deployment.data_dir, deployment.pid, routers=1)
    file, most = deployment.data_dir / "in.jsonl", dict[str, int]()

    def requests(first: int, lines: int) -> Iterator[dict[str, Any]]:
        return bodies(first, lines, wishes.line_bytes, deployment.model, wishes.tokens)

    print(f"load before: {os.getloadavg()[0]:.1f}", flush=True)
    write_input(file, requests(10_000_000, WARM_LINES))
    run_batch(client, file, pids, most)

    def measure_chats(*, per_s: float = 0.0) -> dict[str, float]:
        asyncio.run(run_chats(wishes.port, requests(20_000_000, WARM_LINES)))
        before, began = snapshot(pids), time.perf_counter()
        answered = asyncio.run(
            run_chats(wishes.port, requests(30_000_000, wishes.lines), per_s=per_s, gather_s=wishes.gather_s)
        )
        seconds = time.perf_counter() - began
        found = cpu_ms(before, snapshot(pids), wishes.lines)
        show_cpu(f"{answered} of {wishes.lines} chats answered, {wishes.lines / seconds:.0f}/s", found)
        return found

    chats = measure_chats() if wishes.compare and not wishes.same_pace else {}
    write_input(file, requests(0, wishes.lines))
    if wishes.cancel:
        cancel_one(client, file, wishes.lines)
        return
    before, most, began = snapshot(pids), {}, time.perf_counter()
    batch = run_batch(client, file, pids, most)
    seconds, after = time.perf_counter() - began, snapshot(pids)
    cost = cpu_ms(before, after, wishes.lines)
    print(f"{batch.status}: {batch.request_counts}; {file.stat().st_size / MIB:.0f} MiB with its upload in {seconds:.1f} s")
    show_cpu(f"{wishes.lines / seconds:.0f} lines/s", cost)
    if wishes.compare and wishes.same_pace:
        chats = measure_chats(per_s=wishes.lines / seconds)
    if chats:
        print(f"a line costs {sum(cost.values()) - sum(chats.values()):.3f} ms more than a chat")
    for name in sorted(pids):
        rss = before[name].rss, most[name], after[name].rss
        print("{:12} {:.0f} MiB before, {:.0f} at most, {:.0f} after".format(name, *(value / MIB for value in rss)))


if __name__ == "__main__":
    main()
