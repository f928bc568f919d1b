"""Training data from the target: exact ids, nothing dropped unseen, and the same whatever the batch or the break."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizers import END_OF_TURN_ID, EOS_ID, byte_level_tokenizer
from fake_engine import FakeEngine, says
from training_cases import save_target, write_records

from dspark.config import BatchingConfig, EngineConfig
from dspark.engine.build import load_engine
from dspark.errors import ConfigError, RequestError
from dspark.models.tokenizer import load_tokenizer
from dspark.request import FinishReason, Request, RequestOutput
from dspark.training.dataset import load_dataset
from dspark.training.regenerate import RegenerateResult, regenerate
from dspark.training.regenerate_config import RegenerateConfig

RESPONSE = "the answer"


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def run(tmp_path: Path, target_folder: Path) -> Callable[..., RegenerateResult]:
    """Answer prompts with a fake engine into tmp_path/out.jsonl."""

    def answer_all(
        asked: Sequence[Any] | None,
        engine: FakeEngine | None = None,
        *,
        folder: Path = target_folder,
        **settings: Any,
    ) -> RegenerateResult:
        if asked is not None:
            settings["prompts"] = (str(write_records(tmp_path / "prompts.jsonl", asked)),)
        config = RegenerateConfig(**{"output": str(tmp_path / "out.jsonl"), "max_tokens": 32} | settings)
        return regenerate(config, engine or FakeEngine(says(RESPONSE)), folder)

    return answer_all


def echo(request: Request) -> Iterable[int]:
    """Answer with a number that the seed gives, so that an answer tells which request it belongs to."""
    return [*str(request.sampling.seed).encode(), EOS_ID]


class InterruptedEngine(FakeEngine):
    """Ctrl-C comes at step `interrupt_at`."""

    def __init__(self, *args: Any, interrupt_at: int, **more: Any) -> None:
        super().__init__(*args, **more)
        self.interrupt_at = interrupt_at

    def step(self) -> list[RequestOutput]:
        if self.num_steps + 1 == self.interrupt_at:
            signal.raise_signal(signal.SIGINT)
        return super().step()


def test_ids_and_texts_are_kept_as_they_are(run: Callable[..., RegenerateResult], tmp_path: Path) -> None:
    run([{"turns": ["hello"]}], temperatures=(0.6,))
    (record,) = records(tmp_path / "out.jsonl")
    assert record == {
        "index": 0,
        "turn": 0,
        "prompt_ids": [*b"user:hello", END_OF_TURN_ID, *b"assistant:"],
        "response_ids": [*b"the answer", EOS_ID],
        "temperature": 0.6,
        "finish_reason": "stop",
        "user": "hello",
        "response": "the answer",
    }


def test_raw_prompts_are_continued_as_they_are(run: Callable[..., RegenerateResult], tmp_path: Path) -> None:
    run([{"prompt": "Once upon"}, {"prompt_ids": [104, 105]}])
    text, ids = records(tmp_path / "out.jsonl")
    assert (text["prompt_ids"], text["user"]) == ([*b"Once upon"], "Once upon")
    assert (ids["prompt_ids"], ids["user"]) == ([104, 105], "hi")


def test_prompt_ids_are_those_that_the_server_renders(tmp_path: Path, target_folder: Path) -> None:
    """Case M8, with a conversation whose answers repeat and a template that ends turns with a token of its own."""
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "q"},
        {"role": "user", "content": "q"},
    ]
    prompts = write_records(tmp_path / "prompts.jsonl", [{"messages": messages, "tools": [{"name": "f"}]}])
    config = RegenerateConfig(prompts=(str(prompts),), output=str(tmp_path / "out.jsonl"), max_tokens=32)
    engine = FakeEngine(says("q"), tokenizer=load_tokenizer(target_folder))  # type: ignore[arg-type]
    regenerate(config, engine, target_folder, show_progress=False)
    tools = {"tools": [{"name": "f"}]}
    rendered = [engine.tokenizer.render_chat(messages[:n], template_kwargs=tools) for n in (1, 3)]
    assert [record["prompt_ids"] for record in records(tmp_path / "out.jsonl")] == rendered


def test_a_conversation_goes_on_from_the_new_answers(run: Callable[..., RegenerateResult], tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "old"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "old too"},
    ]
    answers = iter(["one", "two"])
    result = run([{"messages": messages}], FakeEngine(lambda request: [*next(answers).encode(), EOS_ID]))
    first, second = records(tmp_path / "out.jsonl")
    assert [(r["index"], r["turn"], r["user"], r["response"]) for r in (first, second)] == [
        (0, 0, "a", "one"),
        (0, 1, "b", "two"),
    ]
    end = END_OF_TURN_ID
    assert second["prompt_ids"] == [*b"user:a", end, *b"assistant:one", end, *b"user:b", end, *b"assistant:"]
    assert result.num_answers == 2


def test_temperatures_go_by_the_index(run: Callable[..., RegenerateResult], tmp_path: Path) -> None:
    engine = FakeEngine(says(RESPONSE))
    run([{"prompt": "x"}] * 5, engine, temperatures=(0.0, 0.6, 1.0), top_k=7, top_p=0.9)
    assert [r["temperature"] for r in records(tmp_path / "out.jsonl")] == [0.0, 0.6, 1.0, 0.0, 0.6]
    assert {(request.sampling.top_k, request.sampling.top_p) for request in engine.seen} == {(7, 0.9)}


def test_every_request_has_a_seed_of_its_own_that_the_runs_seed_decides(
    run: Callable[..., RegenerateResult], tmp_path: Path
) -> None:
    seeds = []
    for seed in (0, 0, 1):
        engine = FakeEngine(says(RESPONSE))
        run([{"turns": ["a", "b"]}] * 3, engine, seed=seed, output=str(tmp_path / f"out-{len(seeds)}.jsonl"))
        seeds.append({(r.request_id, r.sampling.seed) for r in engine.seen})
    assert len({seed for _, seed in seeds[0]}) == 6
    assert seeds[0] == seeds[1]
    assert not {seed for _, seed in seeds[0]} & {seed for _, seed in seeds[2]}


def test_the_file_is_in_the_order_of_the_prompts_whatever_ends_first(
    run: Callable[..., RegenerateResult], tmp_path: Path
) -> None:
    lengths = iter([30, 3, 20, 1])
    run([{"prompt": str(n)} for n in range(4)], FakeEngine(lambda _: [*b"a" * next(lengths), EOS_ID]))
    assert [(r["index"], r["user"]) for r in records(tmp_path / "out.jsonl")] == [(n, str(n)) for n in range(4)]


@pytest.mark.parametrize("text", ["", " \n "])
def test_empty_answers_are_left_out_and_counted(
    text: str, run: Callable[..., RegenerateResult], tmp_path: Path
) -> None:
    scripts = iter([says("full"), says(text), says("full")])
    result = run([{"prompt": "x"}] * 3, FakeEngine(lambda request: next(scripts)(request)))
    assert [r["index"] for r in records(tmp_path / "out.jsonl")] == [0, 2]
    assert (result.num_answers, result.num_empty) == (2, 1)


def test_a_conversation_ends_at_an_empty_answer(run: Callable[..., RegenerateResult], tmp_path: Path) -> None:
    answers = iter([b"full", b"", b"never asked"])
    result = run([{"turns": ["a", "b", "c"]}], FakeEngine(lambda request: [*next(answers), EOS_ID]))
    assert [r["turn"] for r in records(tmp_path / "out.jsonl")] == [0]
    assert result.num_empty == 1


def test_answers_that_max_tokens_cuts_are_kept_and_say_so(run: Callable[..., RegenerateResult], tmp_path: Path) -> None:
    result = run([{"prompt": "x"}], max_tokens=4)
    (record,) = records(tmp_path / "out.jsonl")
    assert (record["response_ids"], record["finish_reason"]) == ([*b"the "], "length")
    assert (result.num_tokens, result.num_cut) == (4, 1)


def test_the_end_of_the_context_cuts_an_answer_as_max_tokens_does(
    run: Callable[..., RegenerateResult], tmp_path: Path
) -> None:
    run([{"prompt": "x" * 60}], FakeEngine(says(RESPONSE), max_model_len=64), max_tokens=32)
    (record,) = records(tmp_path / "out.jsonl")
    assert (record["response_ids"], record["finish_reason"]) == ([*b"the "], "length")


def test_a_prompt_that_cannot_be_served_is_reported_and_the_others_are_answered(
    run: Callable[..., RegenerateResult], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = [{"role": "critic", "content": "x"}, {"role": "user", "content": "x"}]
    result = run([{"prompt": "x"}, {"prompt": "x" * 64}, {"messages": unknown}])
    assert [r["index"] for r in records(tmp_path / "out.jsonl")] == [0]
    assert result.num_failed == 2
    err = capsys.readouterr().err
    assert "prompts.jsonl, line 2: no answer: the prompt has 64 tokens, the context holds 64" in err
    assert "prompts.jsonl, line 3: no answer: the chat template knows no role 'critic'" in err
    assert "1 answers of 11 tokens" in err


def test_a_request_that_fails_in_the_engine_is_reported_and_tried_again_by_the_next_run(
    run: Callable[..., RegenerateResult], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class FailingEngine(FakeEngine):
        def step(self) -> list[RequestOutput]:
            outputs = super().step()
            for output in outputs:
                if output.finish_reason is not None and output.request_id == "answer-1-0":
                    output.finish_reason, output.error = FinishReason.ERROR, "logits are not finite"
            return outputs

    prompts = [{"prompt": "x"}] * 3
    assert run(prompts, FailingEngine(says(RESPONSE))).num_failed == 1
    assert "line 2: no answer: logits are not finite" in capsys.readouterr().err
    assert [r["index"] for r in records(tmp_path / "out.jsonl")] == [0, 2]
    engine = FakeEngine(says(RESPONSE))
    assert run(prompts, engine).num_failed == 0
    assert [request.request_id for request in engine.seen] == ["answer-1-0"]
    assert [r["index"] for r in records(tmp_path / "out.jsonl")] == [0, 1, 2]


PROMPTS = [{"turns": ["a", "b"]}, {"prompt": "x" * 20}, *({"prompt": str(n)} for n in range(8)), {"turns": ["c", "d"]}]


def echo_late(request: Request) -> Iterable[int]:
    """Like `echo`; some answers take much longer than others."""
    seed = request.sampling.seed
    assert seed is not None
    return [*b"." * (seed % 40), *str(seed)[:6].encode(), EOS_ID]


@pytest.mark.parametrize("interrupt_at", [1, 4, 9])
def test_an_interrupted_run_goes_on_and_gives_what_one_run_gives(
    interrupt_at: int, run: Callable[..., RegenerateResult], tmp_path: Path
) -> None:
    settings = {"max_tokens": 60}
    run(PROMPTS, FakeEngine(echo_late, max_model_len=256), **settings)
    whole = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").unlink()
    first = InterruptedEngine(echo_late, max_model_len=256, interrupt_at=interrupt_at)
    assert run(PROMPTS, first, **settings).is_interrupted
    kept = (tmp_path / "out.jsonl").read_bytes()
    assert not first.has_unfinished()
    assert set(kept.splitlines()) < set(whole.splitlines())
    done = {json.loads(line)["index"] for line in kept.splitlines()}
    second = FakeEngine(echo_late, max_model_len=256)
    assert not run(PROMPTS, second, **settings).is_interrupted
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    assert {int(request.request_id.split("-")[1]) for request in second.seen} == set(range(len(PROMPTS))) - done


@pytest.mark.parametrize("cut", [1, 30, 400])
def test_a_process_that_was_killed_in_mid_line_loses_that_conversation_only(
    cut: int, run: Callable[..., RegenerateResult], tmp_path: Path
) -> None:
    """The last conversation has two lines; 400 bytes cut away all of the second and the end of the first."""
    run(PROMPTS, FakeEngine(echo))
    whole = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").write_bytes(whole[:-cut])
    engine = FakeEngine(echo)
    run(PROMPTS, engine)
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    assert [request.request_id for request in engine.seen] == ["answer-10-0", "answer-10-1"]


def test_a_finished_run_asks_nothing_more(run: Callable[..., RegenerateResult]) -> None:
    first = run(PROMPTS, FakeEngine(echo))
    engine = FakeEngine(echo)
    assert run(PROMPTS, engine) == first
    assert not engine.seen


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "seed: 0 then, 1 now"),
        ({"temperatures": (0.0,)}, "temperatures"),
        ({"top_k": 0}, "top_k: 200 then, 0 now"),
        ({"max_tokens": 31}, "max_tokens: 32 then, 31 now"),
        ({"prompts": [{"prompt": "other"}]}, "data"),
        ({"template": "{{ messages[0].content }}"}, "chat template"),
    ],
)
def test_another_run_does_not_go_on_with_the_file(
    changes: dict[str, Any], named: str, run: Callable[..., RegenerateResult], tmp_path: Path, target_folder: Path
) -> None:
    prompts = [{"prompt": "x"}]
    run(prompts)
    before = (tmp_path / "out.jsonl").read_bytes()
    changes = dict(changes)
    prompts = changes.pop("prompts", prompts)
    folder = target_folder
    if "template" in changes:
        folder = save_target(tmp_path / "target", template=changes.pop("template"))
    with pytest.raises(ConfigError, match=rf"out\.jsonl was made with other values of .*{named}"):
        run(prompts, folder=folder, **changes)
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_the_prompts_file_may_have_moved(run: Callable[..., RegenerateResult], tmp_path: Path) -> None:
    run([{"prompt": "x"}])
    moved = (tmp_path / "prompts.jsonl").rename(tmp_path / "moved.jsonl")
    assert run(None, prompts=(str(moved),)).num_answers == 1


def test_a_file_of_unknown_origin_is_not_touched(run: Callable[..., RegenerateResult], tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text('{"index": 0}\n')
    with pytest.raises(
        ConfigError, match=r"out\.jsonl exists already, but out\.run\.json, .*does not; .*another output"
    ):
        run([{"prompt": "x"}])
    assert (tmp_path / "out.jsonl").read_text() == '{"index": 0}\n'


def test_a_record_whose_output_is_gone_is_no_obstacle(run: Callable[..., RegenerateResult], tmp_path: Path) -> None:
    run([{"prompt": "x"}])
    (tmp_path / "out.jsonl").unlink()
    assert run([{"prompt": "x"}], seed=5).num_answers == 1


def test_the_record_says_how_the_data_was_made(run: Callable[..., RegenerateResult], tmp_path: Path) -> None:
    scripts = iter([says("short"), says("not so short")])
    prompts = [{"prompt": "x"}, {"prompt": "y"}]
    run(prompts, InterruptedEngine(lambda request: next(scripts)(request), interrupt_at=3), seed=4)
    run(prompts, seed=4)
    record = json.loads((tmp_path / "out.run.json").read_text())
    assert record["seed"] == 4
    assert [command["first_step"] for command in record["commands"]] == [0, 1]
    assert {"argv", "git_sha"} < record["commands"][0].keys()
    assert record["versions"].keys() == {"dspark", "python", "torch", "transformers"}
    assert len(record["data_hash"]) == 64
    assert record["settings"]["temperatures"] == [0.0, 0.6, 1.0]
    assert record["result"]["num_answers"] == 2
    assert record["result"]["is_interrupted"] is False


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "neither given"),
        ({"prompts": ("p",), "self_prompt": 1}, "both given"),
        ({"self_prompt": 0}, r"self_prompt \(0\) must be at least 1"),
        ({"self_prompt": 1, "temperatures": ()}, r"temperatures \(\) is empty"),
        ({"self_prompt": 1, "temperatures": (0.0, -1.0)}, r"temperature \(-1\.0\)"),
        ({"self_prompt": 1, "top_p": 0.0}, r"top_p \(0\)"),
        ({"self_prompt": 1, "max_tokens": 0}, r"max_tokens \(0\)"),
        ({"self_prompt": 1, "max_user_tokens": 0}, r"max_user_tokens \(0\) must be at least 1"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, RequestError), match=message):
        RegenerateConfig(output="out.jsonl", **settings)


def user_turns(*turns: str) -> Callable[[Request], Iterable[int]]:
    """Write these user turns in turn, each ended by the template's end of a turn, and answer each the same."""
    remaining = itertools.cycle(turns)

    def script(request: Request) -> Iterable[int]:
        if request.request_id.startswith("user-"):
            assert bytes(request.prompt_token_ids) == b"user:"
            return [*next(remaining).encode(), END_OF_TURN_ID]
        return [*RESPONSE.encode(), EOS_ID]

    return script


def test_the_target_writes_the_users_turns_and_answers_them(
    run: Callable[..., RegenerateResult], tmp_path: Path
) -> None:
    engine = FakeEngine(user_turns(" Why? ", "Tell me"), max_model_len=256)
    result = run(None, engine, self_prompt=2)
    answered = records(tmp_path / "out.jsonl")
    assert [(r["index"], r["user"], r["response"]) for r in answered] == [
        (0, "Why?", RESPONSE),
        (1, "Tell me", RESPONSE),
    ]
    assert answered[0]["prompt_ids"] == [*b"user:Why?", END_OF_TURN_ID, *b"assistant:"]
    turns = [request.sampling for request in engine.seen if request.request_id.startswith("user-")]
    assert {(s.temperature, s.top_k, s.max_tokens, s.stop_token_ids) for s in turns} == {
        (1.0, 200, 128, (END_OF_TURN_ID,))
    }
    assert (result.num_answers, result.num_turns_dropped) == (2, {})


def test_user_turns_that_are_short_cut_or_duplicates_are_dropped_and_counted(
    run: Callable[..., RegenerateResult], tmp_path: Path
) -> None:
    """Of two equal turns the one of the lower index stays, also when the other one is there first."""
    engine = FakeEngine(user_turns("Tell me" + " " * 10, "", "   \n ", "Hi", " tell  ME ", "x" * 21, "Why not?"))
    result = run(None, engine, self_prompt=7, max_user_tokens=20)
    assert [(r["index"], r["user"]) for r in records(tmp_path / "out.jsonl")] == [(0, "Tell me"), (6, "Why not?")]
    assert result.num_turns_dropped == {"cut": 1, "duplicate": 1, "short": 3}
    assert "1 cut user turns left out, 1 duplicate user turns left out, 3 short user turns left out" in result.summary


@pytest.mark.parametrize("interrupt_at", [1, 4, 8, 12])
def test_self_prompting_goes_on_where_it_was(
    interrupt_at: int, run: Callable[..., RegenerateResult], tmp_path: Path
) -> None:
    """At steps 1 and 4 in the users' turns, at 8 and 12 in the answers; turns 0, 6, 12 are one and the same."""

    def script(request: Request) -> Iterable[int]:
        kind, index = request.request_id.split("-")[:2]
        return [*f"{kind} {int(index) % 6} ".encode(), *b"." * (3 * int(index) % 14), EOS_ID]

    settings = {"self_prompt": 14, "max_user_tokens": 40}
    first = run(None, FakeEngine(script), **settings)
    files = [tmp_path / "out.jsonl", tmp_path / "out.turns.jsonl"]
    whole = [path.read_bytes() for path in files]
    for path in files:
        path.unlink()
    assert run(None, InterruptedEngine(script, interrupt_at=interrupt_at), **settings).is_interrupted
    again = run(None, FakeEngine(script), **settings)
    assert [path.read_bytes() for path in files] == whole
    assert again == first


def test_self_prompting_needs_a_template(run: Callable[..., RegenerateResult]) -> None:
    engine = FakeEngine(tokenizer=byte_level_tokenizer(has_chat_template=False))
    with pytest.raises(ConfigError, match="no chat template"):
        run(None, engine, self_prompt=1)


def test_user_turns_that_do_not_fit_the_context_end_the_run(run: Callable[..., RegenerateResult]) -> None:
    with pytest.raises(RequestError, match="max_tokens"):
        run(None, FakeEngine(max_model_len=64), self_prompt=1, max_user_tokens=64)


def test_our_engine_gives_the_same_data_in_any_batch_and_with_any_drafter(tmp_path: Path, target_folder: Path) -> None:
    """Also while other conversations come and go. The random target rarely ends a turn, so that most are cut."""
    chats = [{"turns": [f"question {n}", "and then?"]} for n in range(6)]
    prompts = (str(write_records(tmp_path / "prompts.jsonl", chats)),)
    outputs = []
    for max_size, drafter in ((1, "none"), (4, "ngram")):
        engine = load_engine(
            EngineConfig(
                model=str(target_folder), drafter=drafter, max_model_len=256, batching=BatchingConfig(max_size=max_size)
            )
        )
        texts = []
        for name, source in (("chats", {"prompts": prompts}), ("own", {"self_prompt": 8})):
            output = tmp_path / f"{name}-{max_size}.jsonl"
            config = RegenerateConfig(output=str(output), max_user_tokens=24, max_tokens=16, top_k=20, seed=2, **source)
            regenerate(config, engine, target_folder, show_progress=False)
            texts.append(output.read_text())
        outputs.append([*texts, (tmp_path / f"own-{max_size}.turns.jsonl").read_text()])
    assert outputs[0] == outputs[1]
    assert [outputs[0][0].count("\n"), outputs[0][2].count("\n")] == [12, 8]


def test_what_is_written_is_what_training_reads(tmp_path: Path, target_folder: Path) -> None:
    engine = load_engine(EngineConfig(model=str(target_folder), drafter="ngram", max_model_len=256))
    prompts = write_records(tmp_path / "prompts.jsonl", [{"turns": [f"question {n}"]} for n in range(4)])
    config = RegenerateConfig(output=str(tmp_path / "out.jsonl"), prompts=(str(prompts),), max_tokens=16)
    result = regenerate(config, engine, target_folder, show_progress=False)
    tokenizer = load_tokenizer(target_folder)
    data = load_dataset(
        [result.output], tokenizer, vocab_size=264, eos_token_ids=(), max_length=256, hold_out_fraction=0.0
    )
    assert len(data.conversations) == result.num_answers == 4
    for number, conversation in enumerate(data.conversations):
        prompt = tokenizer.render_chat([{"role": "user", "content": f"question {number}"}])
        assert conversation.token_ids[: len(prompt)].tolist() == prompt
        assert conversation.is_supervised.sum() == len(conversation.token_ids) - len(prompt) == 16
