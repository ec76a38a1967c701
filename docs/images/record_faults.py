"""Makes the pictures of a fault run: a worker, the router and nats-server are killed under load, seen in the console and `top`.

    python docs/images/record_faults.py

It needs Chromium. A deployment of its own is started on this machine and ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import httpx  # noqa: E402

from tests.support.browser import BrowserError, Page, running_browser  # noqa: E402
from tests.support.up_process import RunningUp  # noqa: E402

HERE = Path(__file__).parent
STREAMS = 24
SIZE = (1240, 470)


class Load:
    """Streams that follow each other. `ended` counts answers by how they ended."""

    def __init__(self, url: str) -> None:
        self.ended = {"whole": 0, "broken": 0}
        self.errors: list[str] = []
        self._url = url
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(STREAMS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)

    def _ask(self, number: int) -> None:
        body = {"model": "sim", "max_tokens": 300, "stream": True}
        body["messages"] = [{"role": "user", "content": f"Tell me about river {number % 4} at length. " * 8}]
        while not self._stopping.is_set():
            whole = False
            try:
                with httpx.stream("POST", f"{self._url}/v1/chat/completions", json=body, timeout=60) as answer:
                    for line in answer.iter_lines():
                        if line.startswith("data: {") and "error" in (event := json.loads(line[6:])):
                            self.errors.append(json.dumps(event["error"]))
                        whole = whole or line == "data: [DONE]"
            except httpx.HTTPError:
                whole = False
            self.ended["whole" if whole else "broken"] += 1


def show(page: Page, path: str, text: str) -> None:
    """Open a page of the console, and wait until it shows a text."""
    page.run(f"location.hash = '#/{path}'")
    page.see(text)


def picture(page: Page, name: str) -> None:
    """Write what the page shows beside this file."""
    page.screenshot(HERE / f"faults-{name}.png")


def top(folder: Path) -> str:
    """Return what `headrace top` shows now."""
    command = [sys.executable, "-P", "-m", "headrace", "top", "--once"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False).stdout


def pid_of(up: RunningUp, kind: str, at: int = 0) -> int:
    """Return the process id of a part by the run file."""
    part: Any = up.state()[kind]
    return int((part if isinstance(part, dict) else part[at])["pid"])


def record(folder: Path) -> None:
    """Run the deployment, kill its parts one after the other, and write the pictures."""
    slow = ("--engine-arg", 'timing_overrides={"decode_base_s": 0.02}')
    up = RunningUp(folder, "--console", "--workers", "3", "--routers", "1", *slow)
    try:
        up.until_ready()
        up.until("the link", lambda: "/console#key=" in up.out_file.read_text())
        found = re.search(r"(http://\S+/console#key=\S+)", up.out_file.read_text())
        if found is None:
            raise RuntimeError("`headrace up` has printed no link")
        load = Load(up.state()["url"])
        with running_browser() as browser:
            time.sleep(4)
            page = browser.page()
            page.size(*SIZE)
            page.goto(found[1])
            page.see("Workers serving")
            time.sleep(25)
            os.kill(pid_of(up, "workers"), signal.SIGKILL)
            page.until("document.body.innerText.includes('2 of 2') || document.body.innerText.includes('2 of 3')")
            time.sleep(1)
            picture(page, "worker")
            sys.stdout.write(f"{top(folder)}\n")
            show(page, "requests", "Placed")
            page.until("[...document.querySelectorAll('tbody tr')].length > 3")
            moved = page.run(
                "fetch('/console/api/requests').then((a) => a.json()).then((told) =>"
                " (told.placements.find((one) => one.attempt > 1) || {}).id || '')"
            )
            if moved:
                show(page, f"requests/{moved}", "moved")
                time.sleep(1)
                picture(page, "story")
            show(page, "routers", "router-1")
            gone = pid_of(up, "routers")
            os.kill(gone, signal.SIGKILL)
            page.until(f"!document.body.innerText.includes('pid {gone}')")
            sys.stdout.write(f"{top(folder)}\n")
            up.until("a new router", lambda: bool(up.state()["routers"][0]["pid"]))
            show(page, "", "Workers serving")
            time.sleep(20)
            gone = pid_of(up, "nats")
            os.kill(gone, signal.SIGKILL)
            with contextlib.suppress(BrowserError):  # it may be back before the next look
                page.see("Not current", 5)
                picture(page, "broker")
            up.until("a new nats-server", lambda: up.state()["nats"]["pid"] not in (None, gone))
            page.see(f"{STREAMS} of ")
            time.sleep(15)
            picture(page, "after")
            sys.stdout.write(f"{top(folder)}\n")
        load.stop()
        sys.stdout.write(f"{load.ended} {load.errors}\n")
    finally:
        up.stop()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        record(Path(made))
