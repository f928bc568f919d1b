"""A headless Chromium through chromedriver's HTTP protocol, for tests of pages; nothing is installed for it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

DRIVER = shutil.which("chromedriver")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run", "--disable-dev-shm-usage"),
)


class Page:
    """One window."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http = http
        self._session = session

    def open(self, url: str) -> None:
        self._call("url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Return what a script returns."""
        return self._call("execute/sync", {"script": script, "args": arguments})

    def until(self, script: str, timeout_s: float = 20) -> Any:
        """Return what a script returns once that is true."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, f"not true: {script}"
            time.sleep(0.05)
        return value

    def complaints(self) -> list[str]:
        """Return the warnings and errors of the console so far: failed loads, broken policies, exceptions."""
        entries = self._call("se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]

    def _call(self, path: str, body: dict[str, Any]) -> Any:
        response = self._http.post(f"/session/{self._session}/{path}", json=body)
        assert response.status_code == 200, response.text
        return response.json()["value"]


@contextmanager
def headless_page(profile: Path) -> Iterator[Page]:
    """Open a window of a fresh browser, with its files in the empty folder `profile`."""
    assert DRIVER is not None and BROWSER is not None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
            _until_up(lambda: http.get("/status"))
            options = {"binary": BROWSER, "args": [*FLAGS, f"--user-data-dir={profile}", "--window-size=1280,1000"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            answer = http.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
            session = answer["sessionId"]
            yield Page(http, session)
            http.delete(f"/session/{session}")
    finally:
        driver.terminate()
        driver.wait(10)


def _until_up(call: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            call()
            return
        except httpx.TransportError:
            assert time.monotonic() < deadline, "chromedriver did not start"
            time.sleep(0.05)
