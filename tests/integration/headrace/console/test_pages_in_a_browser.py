"""The console in a headless Chromium over a simulated deployment: every page, by keyboard, for all eyes, and at full size."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Browser, Page, running_browser
from tests.support.simulated_console import KEY, SimulatedDeployment, served

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(400)]

PAGES = {
    "": "Tokens per second",
    "workers": "worker-0001",
    "requests": "Foreseen TTFT",
    "requests/" + "a" * 26: "What happened",
    "queues": "tenant-59",
    "routers": "router-1",
    "cache": "First block",
    "streams": "REQ_pool-0_std",
    "letters": "poison",
    "batches": "batch_1",
    "models": "model-0",
    "playground": "Most tokens",
}
AXE = Path(".venv/browser/node_modules/axe-core/axe.min.js")
SHOTS = os.environ.get("HEADRACE_SHOTS")  # a folder for pictures of all pages


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as found:
        yield found


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(SimulatedDeployment(workers=1000, requests=100_000)) as url:
        yield url


def opened(browser: Browser, address: str, *, key: bool = True) -> Page:
    page = browser.page()
    page.size(1360, 900)
    page.goto(f"{address}/console{f'#key={KEY}' if key else ''}")
    page.see("Workers serving")
    return page


def go(page: Page, path: str) -> None:
    page.run(f"location.hash = '#/{path}'")
    page.see(PAGES[path])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_shown_without_an_error_and_without_a_barrier(browser: Browser, address: str, scheme: str) -> None:
    if not AXE.exists():
        pytest.skip("axe-core is not installed: `make browser` installs it (npm's package axe-core)")
    page = opened(browser, address)
    page.scheme(scheme)
    page.run(AXE.read_text() + "; true")
    rules = "{}" if scheme == "light" else "{runOnly: ['color-contrast']}"  # nothing else depends on it
    for path in PAGES:
        go(page, path)
        violations = "told.violations.map((v) => [v.id, v.nodes.map((n) => n.html)])"
        found = page.run(f"axe.run(document, {rules}).then((told) => JSON.stringify({violations}))")
        assert json.loads(found) == [], (path, scheme)
        if SHOTS:
            name = "story" if "/" in path else path or "overview"
            page.screenshot(Path(SHOTS) / f"{name}-{scheme}.png")
    assert browser.problems == []


def test_the_key_goes_from_the_address_at_once_and_is_forgotten_on_demand(browser: Browser, address: str) -> None:
    page = opened(browser, address)
    assert "key" not in page.run("location.href")
    page.press_button("Forget the key")
    page.see("Read-only: enter key")
    go(page, "workers")
    assert page.run("[...document.querySelectorAll('button')].every((b) => !['Drain', 'Kill'].includes(b.innerText.trim()))")


def test_fleets_are_seen_in_pools_workers_placements_and_the_reasons_of_one(browser: Browser, address: str) -> None:
    page = opened(browser, address)
    page.see("of 167 serving")  # of the fleet cheap in pool-1
    go(page, "workers")
    page.see("dear")
    go(page, "requests")
    page.see("cheap (cheapest)")
    go(page, "requests/" + "a" * 26)
    page.see("asked for: first token within 300 ms, each next one within 40 ms")
    rows = "[...document.querySelectorAll('[aria-label=Fleets] tbody tr')]"
    table = rows + ".map((row) => row.innerText.replace(/\\s+/g, ' ').trim())"
    assert page.run(table) == [
        "1 cheap ← chosen met 120 ms 20 ms 0 ms 1",
        "2 dear met 50 ms 10 ms 0 ms 4",
        "3 slow missed 900 ms 20 ms 600 ms –",
    ]


def test_requests_that_are_held_and_the_worker_that_starts_for_them_are_shown(browser: Browser, address: str) -> None:
    page = opened(browser, address)
    page.until("document.body.innerText.match(/Starting: worker-cold \\(for \\d+ s: engine 'sim' is starting\\)/)")
    page.until("document.body.innerText.match(/2 standard held for \\d+ s: no worker serves/)")


def test_without_the_key_nothing_can_be_changed(browser: Browser, address: str) -> None:
    page = opened(browser, address, key=False)
    go(page, "letters")
    page.see("needs the admin key")
    assert page.run("[...document.querySelectorAll('td button')].length") == 0


def test_a_private_console_shows_nothing_without_the_key(browser: Browser) -> None:
    with served(SimulatedDeployment(workers=3, requests=10), private=True) as url:
        page = browser.page()
        page.goto(f"{url}/console")
        page.see("This console shows nothing without its key")
        page.goto(f"{url}/console?again#key={KEY}")
        page.see("Workers serving")
    browser.problems.clear()  # the refusals


def test_all_is_reached_with_the_keyboard(browser: Browser, address: str) -> None:
    page = opened(browser, address, key=False)
    page.run("document.activeElement.blur()")
    page.press("Tab")
    assert page.run("document.activeElement.innerText") == "To the content"
    page.press("Tab")
    page.press("Tab")
    assert page.run("document.activeElement.innerText") == "Workers"
    page.press("Enter")
    page.see("worker-0001")
    assert page.run("document.activeElement.id") == "main", "the page that was opened is read next"


def test_a_thousand_workers_are_pages_of_a_hundred_and_found_by_name(browser: Browser, address: str) -> None:
    page = opened(browser, address)
    go(page, "workers")
    page.see("1,000 of 1,000")
    assert page.run("document.querySelectorAll('tbody tr').length") == 100
    page.run(
        "(() => { const field = document.querySelector('input[type=search]'); field.value = 'worker-0999';"
        " field.dispatchEvent(new Event('input', { bubbles: true })); return true; })()"
    )
    page.see("1 of 1,000")
    assert page.run("document.querySelectorAll('tbody tr').length") == 1


def test_a_hundred_thousand_requests_are_read_page_by_page(browser: Browser, address: str) -> None:
    page = opened(browser, address)
    go(page, "requests")
    page.see(f"{100_000:026x}")
    page.press_button("Older")
    page.see(f"{100_000 - 50:026x}")
    assert page.run("document.querySelectorAll('tbody tr').length") == 50


def test_memory_stays_flat_while_a_thousand_workers_change_every_second(browser: Browser, address: str) -> None:
    page = opened(browser, address)
    go(page, "workers")

    def held(seconds: int) -> int:
        page.run(f"new Promise((then) => setTimeout(then, {seconds * 1000}))")
        found = []
        for _ in range(5):  # an update that is being taken when it is looked is no growth
            page.run("new Promise((then) => setTimeout(then, 300))")
            page.call("HeapProfiler.collectGarbage")
            found.append(int(page.call("Runtime.getHeapUsage")["usedSize"]))
        return min(found)

    first = held(5)
    last = held(15)
    assert last < first + 1_000_000, "a state of a thousand workers that is kept each second would be twice that"


def test_a_hidden_tab_asks_for_nothing(browser: Browser) -> None:
    deployment = SimulatedDeployment(workers=10, requests=10)
    with served(deployment) as url:
        page = opened(browser, url)
        page.until("document.body.innerText.includes('● live')")
        page.run("Object.defineProperty(document, 'hidden', { value: true, configurable: true }); true")
        page.run("document.dispatchEvent(new Event('visibilitychange')); true")
        page.see("paused")
        page.run("new Promise((then) => setTimeout(then, 1500))")
        looks = deployment.looks
        page.run("new Promise((then) => setTimeout(then, 3000))")
        assert deployment.looks == looks
        page.run("Object.defineProperty(document, 'hidden', { value: false, configurable: true }); true")
        page.run("document.dispatchEvent(new Event('visibilitychange')); true")
        page.see("● live")
        assert deployment.looks > looks
