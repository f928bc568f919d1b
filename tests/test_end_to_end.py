"""The embedded model through the front doors: Python, the command line, and a served process driven by clients."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx
import openai
import pytest

from dspark import LLM, SamplingParams
from dspark.cli import main
from dspark.evaluation.prompts import load_prompts

pytestmark = pytest.mark.embedded
CHAT = [{"role": "user", "content": "Repeat this sentence twice: The quick brown fox jumps over the lazy dog."}]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A `dspark serve` process on a free port, and its URL."""
    command = [sys.executable, "-m", "dspark.cli", "serve", "--port", "0", "--threads", "1", "--log-level", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    watchdog = threading.Timer(60, process.kill)  # a server that never says it is ready ends the wait
    watchdog.start()
    for line in process.stdout:
        if line.startswith("curl "):
            url = line.split()[1].removesuffix("/v1/chat/completions")
            watchdog.cancel()
            yield url, process
            break
    watchdog.cancel()
    process.kill()
    process.wait()


def test_ngram_drafts_do_not_change_what_the_model_says():
    prompts = [r.turns[0] for r in load_prompts("repetitive")[:3]]
    params = SamplingParams(temperature=0, max_tokens=40)
    texts = {}
    for drafter in ("none", "ngram"):
        llm = LLM("smollm2-135m", drafter=drafter)
        conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
        completions = llm.chat(conversations, params, show_progress=False)
        texts[drafter] = [c.token_ids for c in completions]
    assert texts["ngram"] == texts["none"]
    assert sum(c.speculation.num_accepted for c in completions) > 20


def test_the_generate_verb_prints_text_and_speed(capsys):
    assert main(["generate", "--chat", "Say hello.", "--max-tokens", "8", "--drafter", "none"]) == 0
    captured = capsys.readouterr()
    assert captured.out.strip()
    assert "tokens/s, accepted length 1.00" in captured.err


def test_the_openai_client_gets_the_same_text_streamed_and_not(server):
    url, _ = server
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    whole = client.chat.completions.create(model=model, messages=CHAT, temperature=0, max_tokens=32)
    stream = client.chat.completions.create(
        model=model, messages=CHAT, temperature=0, max_tokens=32, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert "quick brown fox" in whole.choices[0].message.content


def test_a_seed_gives_the_same_text_with_and_without_drafts(server):
    url, _ = server
    body = {"model": "smollm2-135m", "messages": CHAT, "temperature": 1.0, "seed": 7, "max_tokens": 32}
    texts = set()
    for num_draft_tokens in (0, 2, 5, 5):
        answer = httpx.post(
            f"{url}/v1/chat/completions",
            json={**body, "speculation": {"num_draft_tokens": num_draft_tokens}},
            timeout=60,
        )
        texts.add(answer.json()["choices"][0]["message"]["content"])
    assert len(texts) == 1


def test_the_metrics_report_acceptance_under_vllms_names(server):
    url, _ = server
    text = httpx.get(f"{url}/metrics").text
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")
    assert all(f"vllm:spec_decode_{name}_total{{" in text for name in names)
    assert 'position="0"' in text
    assert "_created" not in text


def test_sigterm_finishes_what_runs_and_exits_cleanly(server):
    """Keep this test last: it ends the server."""
    url, process = server
    body = {
        "model": "smollm2-135m",
        "messages": CHAT,
        "temperature": 0,
        "max_tokens": 64,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2].replace(" ", "")
    assert process.wait(timeout=20) == 0
