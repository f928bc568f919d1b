"""Text to token ids and back, chat templates, and what a model folder recommends for generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dspark.errors import CheckpointError, RequestError, first_line
from dspark.models.model_config import read_json_object, reraise_interrupt

# What the chat template gets from us; a request may not replace it.
_RESERVED_TEMPLATE_NAMES = frozenset(
    {"messages", "conversations", "chat_template", "add_generation_prompt", "continue_final_message"}
    | {"return_assistant_tokens_mask"}
)
# Files other than tokenizer.json from which transformers can build a fast tokenizer.
_CONVERTIBLE_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "tokenizer.tiktoken", "spiece.model")


class Tokenizer:
    """A fast tokenizer with its special tokens and chat template. Build it with `load_tokenizer`."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        tool_chat_template: str | None = None,
    ) -> None:
        """`special_tokens`: by role, as in "bos_token"; templates: jinja source, a second one for chats with tools."""
        self.backend = backend
        self.chat_template = chat_template
        self.tool_chat_template = tool_chat_template or chat_template
        self._special_tokens = dict(special_tokens)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included; the model's embedding may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def vocabulary(self) -> dict[str, int]:
        """Return every token with its id, added tokens included."""
        return self.backend.get_vocab(with_added_tokens=True)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out by default."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def bos_token_id(self) -> int | None:
        return self._special_token_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_token_id("eos_token")

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    @cached_property
    def takes_tools(self) -> bool:
        """Whether a chat template reads the variable `tools`."""
        template = _template_environment().parse(self.tool_chat_template or "")
        return "tools" in meta.find_undeclared_variables(template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`; special tokens written in it become their ids.

        Raises `RequestError` for text that is not valid Unicode (a lone surrogate).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds a lone surrogate (U+{ord(text[error.start]):04X} at character {error.start}), which "
                "is not valid Unicode; send well-formed UTF-8"
            ) from None
        # Unlike `encode`, a batch of one lets other threads run while a long text is split.
        return self.backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; ids without a token (padding rows of the embedding) are left out."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the prompt ids of a conversation, rendered by the model's chat template.

        `template_kwargs` are further variables of the template, `tools` among them. The beginning-of-sequence token
        comes from the template alone. Raises `RequestError` when there is no template or it refuses the messages.
        """
        if self.chat_template is None:
            raise RequestError(
                "the model has no chat template; use text completion (/v1/completions) instead", param="messages"
            )
        variables = dict(template_kwargs or {})
        reserved = sorted(_RESERVED_TEMPLATE_NAMES & variables.keys())
        if reserved:
            raise RequestError(
                f"chat_template_kwargs may not set {reserved[0]}; remove it", param="chat_template_kwargs"
            )
        from transformers.utils.chat_template_utils import render_jinja_template  # takes most of a second to import

        try:
            rendered: Any = render_jinja_template(  # annotated as text, returns texts with their spans
                conversations=[[dict(message) for message in messages]],
                chat_template=self.tool_chat_template if variables.get("tools") else self.chat_template,
                add_generation_prompt=add_generation_prompt,
                **(self._special_tokens | variables),
            )
        except Exception as error:  # a template is a program: refusals and type errors of any kind are about the input
            raise RequestError(
                f"the model's chat template refuses these messages: {error}; change their roles or content",
                param="messages",
            ) from error
        return self.encode(rendered[0][0], add_special_tokens=False)

    def _special_token_id(self, role: str) -> int | None:
        token = self._special_tokens.get(role)
        return None if token is None else self.backend.token_to_id(token)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a model folder. Raises `CheckpointError` naming the file that is missing or damaged."""
    path = folder / "tokenizer.json"
    if path.exists():
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{path} is damaged: {error}; download it again") from error
    else:
        backend = _converted_backend(folder)
    # Some files carry the settings of their training run.
    backend.no_truncation()
    backend.no_padding()
    config_path = folder / "tokenizer_config.json"
    config = read_json_object(config_path) if config_path.exists() else {}
    templates = _chat_templates(folder, config)
    return Tokenizer(
        backend,
        special_tokens=_special_tokens(folder, config),
        chat_template=templates.get("default"),
        tool_chat_template=templates.get("tool_use"),
    )


def compare_vocabularies(target: Tokenizer, drafter: Tokenizer) -> None:
    """Raise `CheckpointError` unless both give the same meaning to the ids they share.

    Sizes may differ by special tokens, and a special token may be spelled differently: padding and unused entries
    differ between models that otherwise fit.
    """
    target_tokens = _tokens_by_id(target)
    drafter_tokens = _tokens_by_id(drafter)
    if target_tokens == drafter_tokens:
        return
    for token_id in sorted(target_tokens.keys() | drafter_tokens.keys()):
        in_target, in_drafter = target_tokens.get(token_id), drafter_tokens.get(token_id)
        if in_target == in_drafter:
            continue
        is_special_in_target = in_target is None or token_id in target.special_token_ids
        is_special_in_drafter = in_drafter is None or token_id in drafter.special_token_ids
        if not (is_special_in_target and is_special_in_drafter):
            raise CheckpointError(
                f"the drafter's vocabulary ({drafter.vocab_size} tokens) is not the target's ({target.vocab_size} "
                f"tokens): token id {token_id} is {in_target!r} for the target and {in_drafter!r} for the drafter; "
                "use a drafter with the target's tokenizer"
            )


def _tokens_by_id(tokenizer: Tokenizer) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.vocabulary().items()}


def _converted_backend(folder: Path) -> tokenizers.Tokenizer:
    if not any((folder / name).exists() for name in _CONVERTIBLE_FILES):
        raise CheckpointError(
            f"{folder} has no tokenizer.json nor {', '.join(_CONVERTIBLE_FILES)}; add the model's tokenizer files"
        )
    from transformers import AutoTokenizer

    try:
        backend = AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
    except Exception as error:  # transformers raises many kinds, each about the files
        reraise_interrupt(error)
        raise CheckpointError(
            f"the tokenizer files in {folder} cannot be converted: {first_line(error)}; add the model's tokenizer.json"
        ) from error
    assert isinstance(backend, tokenizers.Tokenizer), type(backend)
    return backend


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by role; older folders keep them in special_tokens_map.json."""
    map_path = folder / "special_tokens_map.json"
    merged = (read_json_object(map_path) if map_path.exists() else {}) | dict(config)
    tokens: dict[str, str] = {}
    for role, token in merged.items():
        if not role.endswith("_token"):
            continue
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            tokens[role] = content
    return tokens


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return chat templates by name from where savers have put them: jinja files, a JSON file or the config."""
    templates = {}
    files = {"default": folder / "chat_template.jinja", "tool_use": folder / "additional_chat_templates/tool_use.jinja"}
    for name, path in files.items():
        if path.exists():
            try:
                templates[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}; download it again") from error
            _check_template(templates[name], path)
    if "default" in templates:
        return templates
    path = folder / "chat_template.json"
    if path.exists():
        config = read_json_object(path)
    else:
        path = folder / "tokenizer_config.json"
    value = config.get("chat_template")
    if isinstance(value, list):  # several templates by name
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    else:
        named = {"default": value}
    for name in ("default", "tool_use"):
        template = named.get(name)
        if template is None:
            continue
        if not isinstance(template, str):
            raise CheckpointError(f"chat_template in {path} must be text, not {type(template).__name__}; correct it")
        _check_template(template, path)
        templates[name] = template
    return templates


class _GenerationBlocks(Extension):
    """Lets through `{% generation %}` blocks, which transformers adds to jinja."""

    tags = {"generation"}  # noqa: RUF012 (an instance variable by jinja's annotation)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _template_environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(extensions=[_GenerationBlocks, loopcontrols])


def _check_template(template: str, path: Path) -> None:
    """Raise `CheckpointError` for a template that jinja cannot compile as transformers will; it is not run."""
    try:
        _template_environment().compile(template)
    except Exception as error:  # jinja raises its own kinds, and those of Python's compiler
        line = getattr(error, "lineno", None)
        where = "" if line is None else f" in line {line}"
        raise CheckpointError(
            f"the chat template in {path} has an error{where}: {first_line(error)}; correct it or download it again"
        ) from error


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """End-of-sequence tokens, and sampling values where the model names them (None: it does not)."""

    eos_token_ids: frozenset[int]
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def sampling_values(self) -> dict[str, Any]:
        """Return the sampling values that the model names, by the names of `SamplingParams`."""
        values = asdict(self)
        del values["eos_token_ids"]
        return {name: value for name, value in values.items() if value is not None}


def load_generation_defaults(folder: Path) -> GenerationDefaults:
    """Read the recommendations of a model folder. Raises `CheckpointError` for a damaged file or value.

    End-of-sequence tokens come from generation_config.json, else config.json, else the tokenizer.
    """
    path = folder / "generation_config.json"
    generation = read_json_object(path) if path.exists() else {}
    eos_token_ids = _eos_token_ids(generation, path)
    if not eos_token_ids:
        config_path = folder / "config.json"
        config = read_json_object(config_path)
        eos_token_ids = _eos_token_ids(config, config_path) or _eos_token_ids(
            config.get("text_config") or {}, config_path
        )
    if not eos_token_ids:
        eos_token_id = load_tokenizer(folder).eos_token_id
        eos_token_ids = frozenset() if eos_token_id is None else frozenset({eos_token_id})
    return GenerationDefaults(
        eos_token_ids=eos_token_ids,
        temperature=_number(generation, "temperature", path),
        top_p=_number(generation, "top_p", path),
        top_k=_integer(generation, "top_k", path),
        min_p=_number(generation, "min_p", path),
        repetition_penalty=_number(generation, "repetition_penalty", path),
    )


def _eos_token_ids(config: Mapping[str, Any], path: Path) -> frozenset[int]:
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise CheckpointError(f"eos_token_id ({value!r}) in {path} must be token ids; correct it")
    return frozenset(ids)


def _number(config: Mapping[str, Any], name: str, path: Path) -> float | None:
    value = config.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
        raise CheckpointError(f"{name} ({value!r}) in {path} must be a number; correct it")
    return None if value is None else float(value)


def _integer(config: Mapping[str, Any], name: str, path: Path) -> int | None:
    value = config.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
        raise CheckpointError(f"{name} ({value!r}) in {path} must be an integer; correct it")
    return None if value is None else int(value)
