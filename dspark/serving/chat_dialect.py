"""What a model's chat template says of its answers, and how one answer is read: reasoning, content, tool calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dspark.config import ChatConfig
from dspark.engine.detokenizer import HasBackend
from dspark.errors import RequestError
from dspark.request import FinishReason
from dspark.serving.answer_grammars import AnswerGrammar, content_rule
from dspark.serving.chat_messages import ChatMessage
from dspark.serving.protocol import ChatCompletionRequest
from dspark.serving.reasoning import (
    REASONING_END,
    REASONING_START,
    Content,
    Reasoning,
    ReasoningCounter,
    ReasoningSplitter,
)
from dspark.serving.tool_calls import CallPart, ToolCallParser
from dspark.serving.tool_choice import callable_tools
from dspark.serving.tool_formats import TOOL_FORMATS, ToolFormat, detect_tool_format
from dspark.structure import Structure

ChatPart = Reasoning | CallPart
_REASONING_MARKS: tuple[str, ...] = (REASONING_START, REASONING_END)
_MAX_OPENING_TOKENS = 16  # at a prompt's end, among which a reasoning mark and the white space after it are


class ChatTokenizer(HasBackend, Protocol):
    """What reading answers needs of a tokenizer."""

    chat_template: str | None
    tool_chat_template: str | None

    @property
    def takes_tools(self) -> bool: ...
    @property
    def special_token_ids(self) -> Collection[int]: ...
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, kw_only=True)
class ChatDialect:
    """How one model's answers are read. Make it with `chat_dialect`."""

    tokenizer: ChatTokenizer
    tool_format: ToolFormat | None  # None: not known, or tools are refused
    has_reasoning: bool
    mark_token_ids: Mapping[str, int] = field(default_factory=dict)  # of the marks that are tokens of their own

    def check(self, call: ChatCompletionRequest) -> None:
        """Raise `RequestError` for what the model's chat template would leave out or cannot express."""
        has_tools = bool(callable_tools(call.tools, call.tool_choice))
        template = self.tokenizer.tool_chat_template if has_tools else self.tokenizer.chat_template
        for index, message in enumerate(call.messages):
            _check_message(message, f"messages[{index}]", template or "")
        if not has_tools:
            return
        if not self.tokenizer.takes_tools:
            raise RequestError(
                "tools are not supported: the model's chat template has no place for them; leave them out or use a "
                "model that was trained with tools",
                param="tools",
            )
        if self.tool_format is None:
            raise RequestError(
                "tools are not supported: it is not known how this model writes calls; leave them out, or choose a "
                "--tool-call-format for the server",
                param="tools",
            )
        if "tools" in (call.chat_template_kwargs or {}):
            raise RequestError(
                "tools and chat_template_kwargs.tools exclude each other; send tools alone",
                param="chat_template_kwargs",
            )

    def template_variables(self, call: ChatCompletionRequest) -> dict[str, Any]:
        """Return what the chat template gets beside the messages; tools that may not be called are not shown to it."""
        variables = dict(call.chat_template_kwargs or {})
        if callable_tools(call.tools, call.tool_choice):
            variables["tools"] = [tool.as_template_input() for tool in call.tools]
        return variables

    def is_reasoning_open(self, prompt_token_ids: Sequence[int]) -> bool:
        """Return whether the prompt itself begins the answer's reasoning section."""
        if not self.has_reasoning:
            return False
        end = self.tokenizer.decode(prompt_token_ids[-_MAX_OPENING_TOKENS:], skip_special_tokens=False)
        return end.rstrip().endswith(REASONING_START)

    def kept_token_ids(self, call: ChatCompletionRequest) -> tuple[int, ...]:
        """Return the special tokens without which the answers to a call could not be read."""
        marks = _REASONING_MARKS if self.has_reasoning else ()
        if self.tool_format is not None and callable_tools(call.tools, call.tool_choice):
            marks += self.tool_format.marks
        ids = (self.mark_token_ids[mark] for mark in marks if mark in self.mark_token_ids)
        return tuple(token_id for token_id in ids if token_id in self.tokenizer.special_token_ids)

    def reader(self, call: ChatCompletionRequest, prompt_token_ids: Sequence[int]) -> AnswerReader | None:
        """Return what reads one choice of a call; None: the text is the content."""
        tools = callable_tools(call.tools, call.tool_choice)
        if not tools and not self.has_reasoning:
            return None
        parser = None
        if tools:
            assert self.tool_format is not None
            max_calls = None if call.parallel_tool_calls else 1
            parser = ToolCallParser(self.tool_format, [tool.function.name for tool in tools], max_calls=max_calls)
        if not self.has_reasoning:
            return AnswerReader(parser=parser)
        is_open = self.is_reasoning_open(prompt_token_ids)
        return AnswerReader(
            parser=parser,
            splitter=ReasoningSplitter(is_open=is_open),
            counter=ReasoningCounter(self.tokenizer, is_open=is_open),
            hides_reasoning=not call.include_reasoning,
        )

    def structure(self, call: ChatCompletionRequest, prompt_token_ids: Sequence[int]) -> Structure | None:
        """Return the form of an answer's text, its reasoning and calls included; None: any text is allowed.

        Raises `RequestError` for what cannot be had together.
        """
        asked, tools = call.structure(), callable_tools(call.tools, call.tool_choice)
        is_required = bool(tools) and call.tool_choice not in (None, "auto")
        is_open = self.is_reasoning_open(prompt_token_ids)
        content = None if asked is None or is_required else content_rule(asked)
        if asked is not None and content is None and tools and not is_required:
            raise RequestError(
                f"tools and {call.structure_name} exclude each other; leave one of them out", param=call.structure_name
            )
        has_schemas = is_required or any(tool.function.strict for tool in tools)
        if not has_schemas and (content is None or not (tools or self.has_reasoning)):
            return replace(asked, after=REASONING_END) if asked is not None and is_open else asked
        parameters = {
            tool.function.name: tool.function.parameters if is_required or tool.function.strict else {"type": "object"}
            for tool in tools
        }
        grammar = AnswerGrammar(
            tool_format=self.tool_format if tools else None,
            parameters=parameters,
            is_required=is_required,
            is_parallel=call.parallel_tool_calls,
            content=content,
            mark_token_ids=self.mark_token_ids,
            has_reasoning=self.has_reasoning,
            is_reasoning_open=is_open,
        )
        return Structure.grammar(grammar.text)


def chat_dialect(tokenizer: ChatTokenizer, config: ChatConfig) -> ChatDialect:
    """Return how the answers of a model with this tokenizer are read."""
    template = tokenizer.tool_chat_template or ""
    if config.tool_call_format == "auto":
        tool_format = detect_tool_format(template)
    else:
        tool_format = TOOL_FORMATS.get(config.tool_call_format)
    has_reasoning = config.reasoning_format == "think"
    if config.reasoning_format == "auto":
        has_reasoning = REASONING_END in template
    marks = _REASONING_MARKS if has_reasoning else ()
    marks += tool_format.marks if tool_format is not None else ()
    added = {token.content: token_id for token_id, token in tokenizer.backend.get_added_tokens_decoder().items()}
    return ChatDialect(
        tokenizer=tokenizer,
        tool_format=tool_format,
        has_reasoning=has_reasoning,
        mark_token_ids={mark: added[mark] for mark in marks if mark in added},
    )


def _check_message(message: ChatMessage, where: str, template: str) -> None:
    if message.tool_calls and "tool_calls" not in template:
        raise RequestError(
            f"{where}.tool_calls are not supported: the model's chat template would leave them out; send their text",
            param=f"{where}.tool_calls",
        )
    if message.role == "tool" and "tool" not in template:
        raise RequestError(
            f'{where}.role ("tool") is not supported: the model\'s chat template does not know it; use another role',
            param=f"{where}.role",
        )


class AnswerReader:
    """Reads one choice while its text comes."""

    def __init__(
        self,
        *,
        parser: ToolCallParser | None = None,
        splitter: ReasoningSplitter | None = None,
        counter: ReasoningCounter | None = None,
        hides_reasoning: bool = False,
    ) -> None:
        self._parser = parser
        self._splitter = splitter
        self._counter = counter
        self._hides_reasoning = hides_reasoning

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Tokens of the reasoning section so far; None: there is none to count."""
        return None if self._counter is None else self._counter.num_tokens

    def push(self, text: str, token_ids: Sequence[int], *, is_last: bool) -> list[ChatPart]:
        """Take what an output adds and return what it settles; the last one settles everything."""
        if self._counter is not None:
            self._counter.push(token_ids)
        pieces: list[Reasoning | Content] = [Content(text)]
        if self._splitter is not None:
            pieces = self._splitter.push(text)
            pieces += self._splitter.finish() if is_last else []
        parts: list[ChatPart] = []
        for piece in pieces:
            if isinstance(piece, Content):
                parts += [piece] if self._parser is None else self._parser.push(piece.text)
            elif not self._hides_reasoning:
                parts.append(piece)
        if is_last and self._parser is not None:
            parts += self._parser.finish()
        return parts

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """Return why the choice ended: an answer that ends with whole calls ended for them."""
        calls = self._parser
        if reason is FinishReason.STOP and calls is not None and calls.num_calls and not calls.is_cut:
            return "tool_calls"
        return reason
