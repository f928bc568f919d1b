"""The server on a real socket: official clients, broken clients, signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from byte_tokenizers import EOS_ID
from fake_engine import FakeEngine, says

from dspark.errors import ConfigError
from dspark.serving.app import create_app
from dspark.serving.bridge import EngineBridge
from dspark.serving.server import bind_socket, run_server

TEXT = "é 世界 😀👨‍👩‍👧 end"
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


@contextmanager
def serving(engine: FakeEngine) -> Iterator[int]:
    """Serve `engine` from a thread; yield the port."""
    sock = bind_socket("127.0.0.1", 0)
    app = create_app(EngineBridge(engine))  # type: ignore[arg-type]
    server = uvicorn.Server(uvicorn.Config(app, lifespan="on", log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        until(lambda: server.started)
        yield sock.getsockname()[1]
    finally:
        engine.gate.set()
        server.should_exit = True
        thread.join(10)


def until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def talker() -> Iterator[int]:
    with serving(FakeEngine(says(TEXT), block_len=5)) as port:
        yield port


# -- the official client -----------------------------------------------------------------------------------


def options(port: int) -> dict[str, Any]:
    return {"base_url": f"http://127.0.0.1:{port}/v1", "api_key": "none", "max_retries": 0}


def test_official_client_gets_chats_and_completions(talker: int) -> None:
    with openai.OpenAI(**options(talker)) as client:
        assert [model.id for model in client.models.list()] == ["toy"]
        chat = client.chat.completions.create(model="toy", messages=MESSAGES, seed=1, temperature=0)
        assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == (TEXT, "stop")
        assert chat.usage is not None
        assert chat.usage.completion_tokens == len(TEXT.encode()) + 1
        completion = client.completions.create(model="toy", prompt="hi", max_tokens=60, n=2)
        assert [choice.text for choice in completion.choices] == [TEXT, TEXT]


def test_official_client_streams_chats_and_completions(talker: int) -> None:
    with openai.OpenAI(**options(talker)) as client:
        chunks = list(
            client.chat.completions.create(
                model="toy", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
            )
        )
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(TEXT.encode()) + 1
        stream = client.completions.create(model="toy", prompt="hi", max_tokens=60, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == TEXT


def test_official_async_client_streams_many_at_once(talker: int) -> None:
    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model="toy", messages=MESSAGES, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(**options(talker)) as client:
            whole = await client.chat.completions.create(model="toy", messages=MESSAGES)
            return [whole.choices[0].message.content or "", *await asyncio.gather(*(one(client) for _ in range(16)))]

    assert asyncio.run(main()) == [TEXT] * 17


def test_official_client_raises_the_right_errors(talker: int) -> None:
    with openai.OpenAI(**options(talker)) as client:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model="gpt", prompt="hi")
        with pytest.raises(openai.BadRequestError, match="temperature") as caught:
            client.completions.create(model="toy", prompt="hi", temperature=-1)
        assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")


def test_official_client_raises_a_fault_in_the_stream() -> None:
    engine = FakeEngine()
    engine.num_failing_steps = 1
    with serving(engine) as port, openai.OpenAI(**options(port)) as client:
        stream = client.completions.create(model="toy", prompt="hi", stream=True)
        with pytest.raises(openai.APIError, match="the scripted fault"):
            list(stream)


# -- broken clients ----------------------------------------------------------------------------------------


def post_bytes(port: int, body: dict[str, Any]) -> bytes:
    content = json.dumps({"model": "toy", "prompt": "hi", **body}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(content), content)


@pytest.mark.parametrize("is_reset", [True, False])
def test_client_that_leaves_a_stream_frees_its_request_within_two_steps(is_reset: bool) -> None:
    engine = FakeEngine(max_model_len=10**6, step_s=0.1)
    with serving(engine) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(post_bytes(port, {"stream": True, "max_tokens": 10**5}))
            received = b""
            while received.count(b"data: ") < 2:
                received += client.recv(4096)
            if is_reset:  # a reset instead of an orderly close
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        num_steps = engine.num_steps
        until(lambda: engine.num_running == 0)
        assert engine.num_steps - num_steps <= 2
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"model": "toy", "prompt": "hi"}).json()
        assert answer["choices"][0]["text"] == "abcdefghijklmnop"


def test_client_that_leaves_before_the_whole_answer_frees_its_request() -> None:
    engine = FakeEngine(max_model_len=10**6, step_s=0.1)
    with serving(engine) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            client.sendall(post_bytes(port, {"max_tokens": 10**5, "n": 2}))
            until(lambda: engine.num_running == 2)
        num_steps = engine.num_steps
        until(lambda: engine.num_running == 0)
        assert engine.num_steps - num_steps <= 2


def test_client_that_never_reads_does_not_hold_up_the_others() -> None:
    engine = FakeEngine(max_model_len=10**6, block_len=50)
    with serving(engine) as port, socket.create_connection(("127.0.0.1", port), timeout=10) as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.sendall(post_bytes(port, {"stream": True, "max_tokens": 200_000, "return_token_ids": True}))
        until(lambda: engine.num_running == 1)
        for _ in range(3):
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"model": "toy", "prompt": "hi"})
            assert answer.status_code == 200
        until(lambda: engine.num_running == 0)  # ran to its end although nobody reads


@pytest.mark.parametrize(
    "data",
    [
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: nonsense\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{",
    ],
)
def test_server_survives_broken_http(talker: int, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", talker), timeout=10) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)
        received = client.recv(4096)
        assert received == b"" or received.startswith((b"HTTP/1.1 4", b"HTTP/1.1 499"))
    assert httpx.get(f"http://127.0.0.1:{talker}/health").status_code == 200


def test_body_over_the_limit_is_refused_before_it_is_sent(talker: int) -> None:
    with socket.create_connection(("127.0.0.1", talker), timeout=10) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 413")


# -- start and end -----------------------------------------------------------------------------------------


def test_taken_port_is_named_with_the_flag_to_use() -> None:
    with bind_socket("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1 port {port}: Address already in use.*--port"):
            bind_socket("127.0.0.1", port)


def test_accepted_connections_send_small_events_at_once() -> None:
    """Without TCP_NODELAY an event waits for the acknowledgement of the one before, up to 40 ms."""
    with bind_socket("127.0.0.1", 0) as sock, socket.create_connection(sock.getsockname(), timeout=10):
        accepted, _ = sock.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_taken_port_shows_before_the_engine_is_loaded() -> None:
    def load_engine() -> Any:
        raise AssertionError("loaded")

    with bind_socket("127.0.0.1", 0) as sock, pytest.raises(ConfigError):
        run_server(load_engine, port=sock.getsockname()[1])


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70000), ("127.0.0.1", -1), ("host..invalid", 8000)])
def test_address_that_cannot_be_is_refused(host: str, port: int) -> None:
    with pytest.raises(ConfigError):
        bind_socket(host, port)


PROGRAM = f"""
import sys
from types import SimpleNamespace
from fake_engine import FakeEngine, says
from dspark.serving.server import run_server
engine = FakeEngine(lambda request: [*b"abcdefghij" * request.sampling.max_tokens][: request.sampling.max_tokens - 1]
                    + [{EOS_ID}], block_len=1, max_model_len=10**6, step_s=0.02)
class State:
    num_taken = 0
    def take(self, engine):
        self.num_taken += 1
        return {{"taken": self.num_taken}} if self.num_taken != 2 else None
    def write(self, state):
        print(state["taken"], flush=True)
def load():
    if "--wait" in sys.argv:
        sys.stdin.readline()
    return SimpleNamespace(engine=engine, saved_state=State() if "--keep" in sys.argv else None)
run_server(load, port=int(sys.argv[2]), shutdown_timeout_s=float(sys.argv[1]), save_interval_s=0.05,
           on_ready=lambda url: print(url, flush=True))
print("ended", flush=True)
"""


@contextmanager
def process_of(shutdown_timeout_s: float, *options: str, port: int = 0) -> Iterator[subprocess.Popen[str]]:
    tests = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, str(Path(tests).parent)])}
    command = [sys.executable, "-c", PROGRAM, str(shutdown_timeout_s), str(port), *options]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def program(shutdown_timeout_s: float, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with process_of(shutdown_timeout_s, *options) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()


def start_call(url: str, max_tokens: int) -> tuple[threading.Thread, dict[str, Any]]:
    result: dict[str, Any] = {}

    def call() -> None:
        body = {"model": "toy", "prompt": "hi", "max_tokens": max_tokens}
        result.update(httpx.post(f"{url}/v1/completions", json=body, timeout=20).json())

    thread = threading.Thread(target=call)
    thread.start()
    deadline = time.monotonic() + 20
    while 'vllm:num_requests_running{model_name="toy"} 1.0' not in (metrics := httpx.get(f"{url}/metrics").text):
        assert time.monotonic() < deadline, metrics
        time.sleep(0.01)
    return thread, result


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_lets_running_answers_end_refuses_new_ones_and_exits_with_0(number: signal.Signals) -> None:
    with program(shutdown_timeout_s=20) as (process, url):
        thread, result = start_call(url, max_tokens=100)
        process.send_signal(number)
        time.sleep(0.2)
        assert httpx.post(f"{url}/v1/completions", json={"model": "toy", "prompt": "hi"}).status_code == 503
        assert httpx.get(f"{url}/health").json() == {"status": "draining"}
        thread.join(20)
        assert result["choices"][0]["finish_reason"] == "stop"
        assert result["usage"]["completion_tokens"] == 100
        assert process.wait(10) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "ended\n"


def test_drain_timeout_aborts_what_is_left() -> None:
    with program(shutdown_timeout_s=0.2) as (process, url):
        thread, result = start_call(url, max_tokens=10**5)
        process.send_signal(signal.SIGTERM)
        thread.join(20)
        assert result["choices"][0]["finish_reason"] == "abort"
        assert process.wait(10) == 0


def test_second_signal_cuts_the_drain_short() -> None:
    with program(shutdown_timeout_s=1000) as (process, url):
        thread, result = start_call(url, max_tokens=10**5)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        thread.join(20)
        assert result["choices"][0]["finish_reason"] == "abort"
        assert process.wait(10) == 0


def test_what_was_learned_is_written_now_and_then_and_in_the_end() -> None:
    """The second time there is nothing new."""
    with program(20, "--keep") as (process, url):
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["1\n", "3\n"]
        thread, result = start_call(url, max_tokens=30)
        process.send_signal(signal.SIGTERM)
        thread.join(20)
        assert result["choices"][0]["finish_reason"] == "stop"
        assert process.wait(10) == 0
        *written, last_line = process.stdout.read().split()
        assert last_line == "ended"
        assert [int(taken) for taken in written] == list(range(4, 4 + len(written)))
        assert written


def test_who_connects_before_the_engine_is_ready_waits_for_it() -> None:
    with bind_socket("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
    with process_of(1, "--wait", port=port) as process:
        assert process.stdin is not None
        deadline = time.monotonic() + 20
        while True:
            try:
                client = socket.create_connection(("127.0.0.1", port), timeout=20)
                break
            except ConnectionRefusedError:  # Python is still starting
                assert time.monotonic() < deadline
                time.sleep(0.02)
        with client:
            client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            client.settimeout(0.2)
            with pytest.raises(TimeoutError):
                client.recv(4096)
            process.stdin.write("go\n")
            process.stdin.flush()
            client.settimeout(20)
            received = b""
            while part := client.recv(4096):
                received += part
        assert received.startswith(b"HTTP/1.1 200")
        assert received.endswith(b'{"status":"ok"}')
