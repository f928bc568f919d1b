"""Makes training data: the target answers prompts, its own or a file's, and its token ids are kept exactly.

The engine is handed in. Draws are keyed by conversation and turn, so neither batches nor interruptions change a text,
near-ties of floating-point numbers aside.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark.errors import ConfigError, RequestError
from dspark.request import FinishReason, Request, SamplingParams
from dspark.training.identity import check_same, text_identity
from dspark.training.interrupt import interrupt_flag
from dspark.training.prompt_source import (
    ConversationPlan,
    Message,
    UserHeader,
    find_user_header,
    load_plans,
    self_prompted,
)
from dspark.training.record_file import RecordFile
from dspark.training.regenerate_config import RegenerateConfig
from dspark.training.request_tasks import Answer, AnswerEngine, Task, TaskProgress, work_off
from dspark.training.run_log import add_to_run_record, write_run_record

MIN_USER_TOKENS = 3  # a shorter user turn asks nothing


@dataclass(frozen=True, kw_only=True)
class RegenerateResult:
    """What the output holds, and what was kept out of it by this command."""

    output: Path
    num_answers: int  # lines of the output
    num_tokens: int  # of these answers, end tokens included
    num_cut: int  # of these answers, ended by max_tokens or the context
    num_empty: int  # answers without text, left out
    num_failed: int  # conversations and user turns that the engine could not finish
    num_turns_dropped: Mapping[str, int]  # self-written user turns, by reason: short, cut, duplicate
    is_interrupted: bool  # by Ctrl-C

    @property
    def summary(self) -> str:
        """The counts in words."""
        dropped = "".join(f", {count} {why} user turns left out" for why, count in self.num_turns_dropped.items())
        return (
            f"{self.num_answers} answers of {self.num_tokens} tokens in {self.output}, {self.num_cut} of them cut; "
            f"{self.num_empty} empty answers left out, {self.num_failed} failures{dropped}"
        )


def regenerate(
    config: RegenerateConfig,
    engine: AnswerEngine,
    target_folder: Path,
    *,
    facts: Mapping[str, Any] | None = None,  # more for the run record
    show_progress: bool = True,
) -> RegenerateResult:
    """Let the target in `target_folder`, which `engine` serves, answer the prompts of `config`.

    Each answer is a line of the output: index, turn, prompt_ids, response_ids, temperature, finish_reason, user,
    response. Beside it stand OUTPUT.run.json and, for self-written prompts, OUTPUT.turns.jsonl. A run that was ended in
    any way goes on when it is started again, and the output is then that of a run without a break (but for near-ties,
    which other neighbours in the batch may round the other way). Ctrl-C keeps what is finished. Raises `ConfigError`
    or `CheckpointError` for what the user can correct.
    """
    header = None if config.self_prompt is None else find_user_header(engine.tokenizer)
    paths = [Path(path) for path in config.prompts]
    plans = load_plans(paths, has_chat_template=engine.tokenizer.has_chat_template)
    num_answers = {plan.index: plan.num_answers for plan in plans}
    output = Path(config.output)
    turns_path, record = output.with_suffix(".turns.jsonl"), output.with_suffix(".run.json")
    identity = text_identity(paths, target_folder)
    _check_same_run(record, [output, turns_path], identity, config)
    with (
        TaskProgress(is_shown=show_progress) as progress,
        interrupt_flag() as interrupted,
        RecordFile(output, lambda index: num_answers.get(index, 1)) as answers,
    ):
        facts = {"num_prompts": config.self_prompt or len(plans), **(facts or {})}
        write_run_record(output.parent, config, identity, facts, first_step=len(answers.done), name=record.name)
        run = _Run(config, engine, progress, interrupted.is_set)
        if header is not None:
            plans = run.self_prompted_plans(header, turns_path)
        run.answer(plans, answers)
        answers.finish()
        result = run.result(answers)
        add_to_run_record(record, {"result": asdict(result) | {"output": str(output)}})
        progress.say(result.summary)
    return result


def _check_same_run(
    record: Path, outputs: Sequence[Path], identity: Mapping[str, str], config: RegenerateConfig
) -> None:
    """Refuse to go on with what another run wrote to `outputs`, or something unknown."""
    written = [path for path in outputs if path.exists() and path.stat().st_size > 0]
    advice = "restore it, or choose another output file"
    if not written:
        record.unlink(missing_ok=True)
        return
    if not record.exists():
        raise ConfigError(f"{written[0]} exists already, but {record.name}, the record of its run, does not; {advice}")
    try:
        stored = json.loads(record.read_text(encoding="utf-8"))
        stored_identity, stored_settings = dict(stored["identity"]), dict(stored["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{record} is no record of a run: {error}; {advice}") from error
    settings = config.compared_settings()
    check_same(stored_identity, identity, what=str(outputs[0]), advice=advice)
    check_same(
        {key: value for key, value in stored_settings.items() if key in settings},
        settings,
        what=str(outputs[0]),
        advice=advice,
    )


class _Run:
    """One command's part of a run."""

    def __init__(
        self, config: RegenerateConfig, engine: AnswerEngine, progress: TaskProgress, wants_to_stop: Callable[[], bool]
    ) -> None:
        self.config = config
        self.engine = engine
        self.progress = progress
        self.wants_to_stop = wants_to_stop
        self.is_interrupted = False
        self.num_empty = self.num_failed = 0
        self.turns_dropped: Counter[str] = Counter()

    def self_prompted_plans(self, header: UserHeader, path: Path) -> list[ConversationPlan]:
        """Let the target write what `path` lacks of the user turns, and return the conversations they begin.

        None for turns that are short, cut or duplicates, and none at all after an interruption.
        """
        count = self.config.self_prompt or 0
        with RecordFile(path, lambda _: 1) as turns:
            missing = [index for index in range(count) if index not in turns.done]
            self.progress.begin("user turns", num_tasks=count, num_done=count - len(missing))
            self._work_off(self._user_turn(index, header, turns) for index in missing)
            turns.finish()
            return [] if self.is_interrupted else self._plans_of(turns)

    def answer(self, plans: Sequence[ConversationPlan], answers: RecordFile) -> None:
        """Let the target answer the conversations that `answers` lacks."""
        missing = [plan for plan in plans if plan.index not in answers.done]
        self.progress.begin("conversations", num_tasks=len(plans), num_done=len(plans) - len(missing))
        self._work_off(self._conversation(plan, answers) for plan in missing)

    def result(self, answers: RecordFile) -> RegenerateResult:
        """Count what is there."""
        num_answers = num_tokens = num_cut = 0
        for record in answers.records():
            num_answers += 1
            num_tokens += len(record["response_ids"])
            num_cut += record["finish_reason"] == FinishReason.LENGTH
        return RegenerateResult(
            output=answers.path,
            num_answers=num_answers,
            num_tokens=num_tokens,
            num_cut=num_cut,
            num_empty=self.num_empty,
            num_failed=self.num_failed,
            num_turns_dropped=dict(sorted(self.turns_dropped.items())),
            is_interrupted=self.is_interrupted,
        )

    def _work_off(self, tasks: Iterable[Task]) -> None:
        if not work_off(self.engine, tasks, self.progress, wants_to_stop=self.wants_to_stop):
            self.is_interrupted = True

    def _user_turn(self, index: int, header: UserHeader, turns: RecordFile) -> Task:
        config = self.config
        sampling = SamplingParams(
            temperature=1.0,
            top_k=config.top_k,
            top_p=config.top_p,
            seed=_draw_seed(config.seed, "user", index, 0),
            max_tokens=config.max_user_tokens,
            stop_token_ids=header.stop_token_ids,
        )
        request = Request(request_id=f"user-{index}", prompt_token_ids=header.token_ids, sampling=sampling)
        self.engine.validate(request)  # all are alike: one that cannot be served ends the run
        answer = yield request
        if answer.error is not None:  # the next run tries again
            self._count_failure(f"user turn {index}", answer.error)
            return
        special = self.engine.tokenizer.special_token_ids
        user, dropped = answer.text.strip(), None
        if not user or sum(token_id not in special for token_id in answer.token_ids) < MIN_USER_TOKENS:
            dropped = "short"
        elif answer.finish_reason is FinishReason.LENGTH:
            dropped = "cut"
        turns.append(index, [{"user": user, "dropped": dropped}])

    def _plans_of(self, turns: RecordFile) -> list[ConversationPlan]:
        # In the order of their indices, so that it does not depend on the batch which of two equals stays.
        seen: set[str] = set()
        plans = []
        for record in turns.records():
            words = " ".join(record["user"].split()).casefold()
            reason = record["dropped"] or ("duplicate" if words in seen else None)
            if reason is not None:
                self.turns_dropped[reason] += 1
                continue
            seen.add(words)
            plans.append(self_prompted(record["index"], record["user"]))
        return plans

    def _conversation(self, plan: ConversationPlan, answers: RecordFile) -> Task:
        """Answer a conversation turn by turn and write all its records at once."""
        messages: list[Message] = []
        records: list[dict[str, Any]] = []
        for step in plan.steps or (None,):
            if step is not None:
                messages.append(step)
                continue
            try:
                request = self._request(plan, messages, turn=len(records))
                self.engine.validate(request)
            except RequestError as error:
                self._count_failure(plan.place, str(error))
                break
            answer = yield request
            if answer.error is not None:
                self._count_failure(plan.place, answer.error)
                break
            if not answer.text.strip():  # nothing to learn from, and nothing to go on from
                self.num_empty += 1
                break
            user = _text_of(messages[-1]) if messages else self._raw_text(plan)
            records.append(_record(request, answer, turn=len(records), user=user))
            messages.append({"role": "assistant", "content": answer.text})
        if records:  # a conversation without any is tried again by the next run
            answers.append(plan.index, records)

    def _request(self, plan: ConversationPlan, messages: Sequence[Message], *, turn: int) -> Request:
        tokenizer, config = self.engine.tokenizer, self.config
        if plan.prompt_ids is not None:
            prompt_ids = list(plan.prompt_ids)
        elif plan.prompt is not None:
            prompt_ids = tokenizer.encode(plan.prompt)
        else:
            prompt_ids = tokenizer.render_chat(messages, template_kwargs=plan.template_kwargs)
        # An answer that the context's end cuts is marked like one that max_tokens cuts.
        room = max(1, self.engine.max_model_len - len(prompt_ids))
        sampling = config.sampling(
            plan.index,
            seed=_draw_seed(config.seed, "answer", plan.index, turn),
            max_tokens=min(config.max_tokens, room),
        )
        return Request(request_id=f"answer-{plan.index}-{turn}", prompt_token_ids=prompt_ids, sampling=sampling)

    def _raw_text(self, plan: ConversationPlan) -> str:
        if plan.prompt is not None:
            return plan.prompt
        return self.engine.tokenizer.decode(plan.prompt_ids or ()) if plan.user is None else plan.user

    def _count_failure(self, place: str, error: str) -> None:
        self.num_failed += 1
        self.progress.say(f"{place}: no answer: {error}")


def _record(request: Request, answer: Answer, *, turn: int, user: str) -> dict[str, Any]:
    return {
        "turn": turn,
        "prompt_ids": list(request.prompt_token_ids),
        "response_ids": answer.token_ids,
        "temperature": request.sampling.temperature,
        "finish_reason": answer.finish_reason.value,
        "user": user,
        "response": answer.text,
    }


def _text_of(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(content)


def _draw_seed(seed: int, purpose: str, index: int, turn: int) -> int:
    """Return the seed of one request: 63 bits that no other request of the run shares."""
    digest = hashlib.sha256(f"{seed} {purpose} {index} {turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
