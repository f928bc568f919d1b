"""A server in a process of its own, for measurements from outside: started, waited for, and ended as users end it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

import dspark
from dspark.errors import DsparkError
from dspark.evaluation.http_call import OVERLOAD_STATUSES

START_TIMEOUT_S = 300.0  # the machine may have to be measured first
STOP_TIMEOUT_S = 60.0
POLL_S = 0.1
CALL_TIMEOUT_S = 300.0
LOG_LINES = 15  # shown of a server that failed
REHEARSED_IDS = 50  # token ids that any vocabulary has
REHEARSED_TOKENS = 256  # of the largest target pass, unless a server is told otherwise


@dataclass(kw_only=True)
class ServerProcess:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes] = field(repr=False)
    log_path: Path

    def stop(self) -> int:
        """End the server with SIGTERM and return its exit status; one that does not end is killed (-9)."""
        self.process.terminate()
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def log_tail(self) -> str:
        """Return the last lines of the server's log."""
        return _tail(self.log_path)


@contextmanager
def running_server(arguments: Sequence[str]) -> Iterator[ServerProcess]:
    """Yield a server (`dspark.measured_server`) started with these flags when it is ready; none is left in the end.

    Raises `DsparkError` with the end of its log when it does not get ready.
    """
    command = [sys.executable, "-m", "dspark.measured_server", "--port", "0", *arguments]
    folder = str(Path(dspark.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryDirectory(prefix="dspark-") as logs:
        log_path, out_path = Path(logs) / "log", Path(logs) / "out"
        with log_path.open("wb") as log, out_path.open("wb") as out:
            # A session of its own, so that a Ctrl-C is ours alone.
            process = subprocess.Popen(command, stdout=out, stderr=log, env=environment, start_new_session=True)
        try:
            yield ServerProcess(url=_wait_ready(process, out_path, log_path), process=process, log_path=log_path)
        finally:
            process.kill()  # harmless when it has ended
            process.wait()


def served_model(server: ServerProcess) -> tuple[str, int]:
    """Return the name of the model that a server has, and the length of its context."""
    (model,) = httpx.get(f"{server.url}/v1/models", timeout=CALL_TIMEOUT_S).raise_for_status().json()["data"]
    return model["id"], model["max_model_len"]


def rehearse(server: ServerProcess, num_tokens: int) -> None:
    """Let a server run a pass of 1 token, of 2, and so on up to `num_tokens`, so that its memory can be compared later.

    On CPU torch makes a kernel for each number of rows that a product gets and keeps it: some hundred megabytes that
    come with use and then stay. So many prompts of one token make a pass in which all products have so many rows.
    """
    model, _ = served_model(server)
    with httpx.Client(base_url=server.url, timeout=CALL_TIMEOUT_S) as client:
        for size in range(1, num_tokens + 1):
            prompts = [[1 + i % REHEARSED_IDS] for i in range(size)]
            body = {"model": model, "prompt": prompts, "max_tokens": 1, "temperature": 0}
            response = client.post("/v1/completions", json=body)
            if response.status_code not in (200, *OVERLOAD_STATUSES):  # a short queue does not hold the larger ones
                raise DsparkError(
                    f"{size} prompts of a token are answered with {response.status_code}: {response.text}"
                )


def _wait_ready(process: subprocess.Popen[bytes], out_path: Path, log_path: Path) -> str:
    """Return the URL that the server says, when it answers there."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        words = out_path.read_text(encoding="utf-8").split()
        urls = [word.rstrip(".") for word in words if word.startswith("http://")]
        if urls:
            _check_health(urls[0])
            return urls[0]
        time.sleep(POLL_S)
    state = "did not get ready" if process.poll() is None else f"ended with status {process.returncode}"
    raise DsparkError(f"the server {state}; correct the flags after -- or what its log says:\n{_tail(log_path)}")


def _check_health(url: str) -> None:
    status = httpx.get(f"{url}/health", timeout=START_TIMEOUT_S).status_code
    if status != 200:
        raise DsparkError(f"the server at {url} answers /health with {status}, not 200; its log says more")


def _tail(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LOG_LINES:])
