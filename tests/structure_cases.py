"""Toy vocabularies in which the texts of a structure can be spelled, and engines over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from toys import Rule, make_engine

from dspark.engine.engine import Engine
from dspark.request import SamplingParams
from dspark.speculation.structure_matching import StructureCompiler, StructureMatcher
from dspark.structure import Structure

END = "<end>"


class SpellingTokenizer:
    """Id i is the i-th of some ASCII words; those in angle brackets are special tokens."""

    has_chat_template = False
    chat_template = tool_chat_template = None
    takes_tools = False
    bos_token_id = None

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.vocab_size = len(words)
        # As byte-level tokenizers spell ASCII: white space is moved, the rest is itself.
        spelled = [word.replace(" ", "Ġ").replace("\n", "Ċ") for word in words]
        # Splits a text into any of the words, the longest preferred: forced text is masked to the tokens of its split.
        pieces = [*((word, -1.0 - 1.0 / len(word)) for word in spelled), ("unknown", -99.0)]
        self.backend = Tokenizer(models.Unigram(pieces, unk_id=len(words)))
        self.backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self.backend.decoder = decoders.ByteLevel()
        special = [word for word in words if len(word) > 2 and word.startswith("<") and word.endswith(">")]
        self.backend.add_special_tokens([AddedToken(word, special=True) for word in special])
        self.special_token_ids = frozenset(self.words.index(word) for word in special)

    def ids(self, *words: str) -> list[int]:
        return [self.words.index(word) for word in words]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.backend.encode(text).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def end_ids(words: Sequence[str]) -> list[int]:
    return [i for i, word in enumerate(words) if word == END]


def compiler_of(words: Sequence[str], *, vocab_size: int | None = None) -> StructureCompiler:
    return StructureCompiler(
        SpellingTokenizer(words), vocab_size=vocab_size or len(words), eos_token_ids=end_ids(words)
    )


def matcher_of(words: Sequence[str], structure: Structure, **sampling: Any) -> StructureMatcher:
    """Return a matcher at the beginning of an answer."""
    matcher = compiler_of(words).matcher_for(SamplingParams(structure=structure, **sampling))
    assert matcher is not None
    return matcher


def engine_over_words(words: Sequence[str], rule: Rule, **options: Any) -> Engine:
    """Return a toy engine whose tokens are these words; `<end>` among them ends an answer."""
    tokenizer = SpellingTokenizer(words)
    return make_engine(rule, len(words), tokenizer=tokenizer, eos_token_ids=end_ids(words), **options)
