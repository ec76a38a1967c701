"""Drives a headless Chromium by its DevTools protocol over a pipe: no driver, no package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ANSWER_S = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str:
    """Return the program. Skips the test where there is none."""
    for name in NAMES:
        if found := shutil.which(name):
            return found
    pytest.skip("Chromium is not installed: `make browser` installs it (Debian's package chromium)")


class BrowserError(AssertionError):
    """The browser answered with an error, or a script of the page threw one."""


class Page:
    """A tab."""

    def __init__(self, send: Any, session: str) -> None:
        self._send = send
        self._session = session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        found: dict[str, Any] = self._send(method, params, self._session)
        return found

    def goto(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Return the value of an expression, awaited if it is a promise."""
        told = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True)
        if "exceptionDetails" in told:
            raise BrowserError(json.dumps(told["exceptionDetails"])[:2000])
        return told["result"].get("value")

    def until(self, condition: str, timeout_s: float = ANSWER_S) -> Any:
        """Wait until an expression is true, and return its value."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if found := self.run(condition):
                    return found
            except BrowserError:
                if time.monotonic() > deadline:
                    raise
            if time.monotonic() > deadline:
                raise BrowserError(f"not in time: {condition}; the page shows:\n{self.text()[:3000]}")
            time.sleep(0.05)

    def text(self) -> str:
        return str(self.run("document.body.innerText"))

    def see(self, text: str, timeout_s: float = ANSWER_S) -> None:
        self.until(f"document.body.innerText.includes({json.dumps(text)})", timeout_s)

    def press(self, key: str, *, shift: bool = False) -> None:
        codes = {"Tab": 9, "Enter": 13, " ": 32}
        more = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code="Space" if key == " " else key,
                windowsVirtualKeyCode=codes[key],
                modifiers=8 if shift else 0,
                **(more if kind == "keyDown" else {}),
            )

    def click(self, selector: str) -> None:
        self.until(f"document.querySelector({json.dumps(selector)})")
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def press_button(self, text: str) -> None:
        """Press the first button that can be pressed and has this text."""
        wanted = f"(b) => !b.disabled && b.innerText.trim() === {json.dumps(text)}"
        found = f"[...document.querySelectorAll('button')].find({wanted})"
        self.until(found + " != null")
        self.run(found + ".click()")

    def scheme(self, name: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


class Browser:
    """A running Chromium. `problems` are what its pages wrote to the console as errors, and scripts that threw."""

    def __init__(self, process: subprocess.Popen[bytes], into: int, out: int) -> None:
        self._process = process
        self._into = into
        self._out = out
        self._rest = b""
        self._count = 0
        self.problems: list[str] = []

    def page(self) -> Page:
        target = self._send("Target.createTarget", {"url": "about:blank"}, "")["targetId"]
        session = self._send("Target.attachToTarget", {"targetId": target, "flatten": True}, "")["sessionId"]
        page = Page(self._send, session)
        for domain in ("Page", "Runtime", "Log", "Network", "Performance"):
            page.call(f"{domain}.enable")
        return page

    def _send(self, method: str, params: dict[str, Any], session: str) -> dict[str, Any]:
        self._count += 1
        wanted = self._count
        told = {"id": wanted, "method": method, "params": params, **({"sessionId": session} if session else {})}
        os.write(self._into, json.dumps(told).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_S
        while True:
            message = self._message(deadline)
            if message.get("id") == wanted:
                if "error" in message:
                    raise BrowserError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._out], [], [], left)[0]:
                raise BrowserError("Chromium does not answer")
            read = os.read(self._out, 1 << 20)
            if not read:
                raise BrowserError(f"Chromium has ended: {self._process.poll()}")
            self._rest += read
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(message["params"])[:1000])
            case "Log.entryAdded" if message["params"]["entry"]["level"] == "error":
                self.problems.append(json.dumps(message["params"]["entry"])[:1000])


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Start a Chromium, and end it. Skips the test where there is none."""
    program = chromium()
    to_read, into = os.pipe()
    out, to_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # The protocol wants the descriptors 3 and 4.
        command = (
            f'exec "$0" "$@" 3<&{to_read} 4>&{to_write} {to_read}<&- {to_write}>&-'
            if {to_read, to_write}.isdisjoint({3, 4})
            else f'exec "$0" "$@" 8<&{to_read} 9>&{to_write} 3<&8 4>&9'
        )
        process = subprocess.Popen(
            [
                *("bash", "-c", command, program, "--headless=new", "--no-sandbox", "--disable-gpu"),
                *("--disable-dev-shm-usage", "--no-first-run", "--disable-extensions", "--remote-debugging-pipe"),
                *(f"--user-data-dir={folder}", "--window-size=1360,900"),
            ],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        try:
            yield Browser(process, into, out)
        finally:
            process.kill()
            process.wait()
            os.close(into)
            os.close(out)
