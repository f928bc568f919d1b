"""Toy vocabularies in which the texts of a structure can be spelled, and structures over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<end>"


class SpellingTokenizer:
    """Id i is the i-th of some ASCII words; `<...>` among them are special tokens."""

    has_chat_template = False
    bos_token_id = None

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.vocab_size = len(words)
        # Written as a byte-level tokenizer has them; only ASCII, where a byte is its own letter but for white space.
        spelled = [word.replace(" ", "Ġ").replace("\n", "Ċ") for word in words]
        self.backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(spelled)}, merges=[]))
        self.backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self.backend.decoder = decoders.ByteLevel()
        self.backend.add_special_tokens(
            [AddedToken(word, special=True) for word in words if word.startswith("<") and word.endswith(">")]
        )
        added = self.backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)

    def ids(self, *words: str) -> list[int]:
        return [self.words.index(word) for word in words]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.backend.encode(text).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def engine_over_words(words: Sequence[str], rule: Any, **options: Any) -> Any:
    """Return a toy engine whose tokens are these words; `<end>` among them ends an answer."""
    from toys import make_engine

    eos_token_ids = [words.index(END)] if END in words else []
    return make_engine(
        rule, len(words), tokenizer=SpellingTokenizer(words), eos_token_ids=eos_token_ids, **options
    )
