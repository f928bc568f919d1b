"""Real `tokenizers.Tokenizer` objects in which nearly every character spans tokens, in the wrapper tests need."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dspark.errors import RequestError

EOS_ID, BOS_ID, END_OF_TURN_ID, TOOL_ID, SPANNING_ID = 256, 257, 258, 259, 260
VOCAB_SIZE = 264  # larger than the tokenizer's, as padded models have it


class ToyTokenizer:
    """What the engine and the server need of a tokenizer, around a real backend."""

    def __init__(
        self,
        backend: Tokenizer,
        *,
        bos_token_id: int | None = None,
        has_chat_template: bool = True,
        chat_template: str = "",
        prompt_end: str = "assistant:",
    ) -> None:
        """`chat_template` is only what says it knows, and is not rendered; `prompt_end` ends every rendered chat."""
        self.backend = backend
        self.bos_token_id = bos_token_id
        self.has_chat_template = has_chat_template
        self.special_token_ids = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self.vocab_size = backend.get_vocab_size()
        self.chat_template = chat_template
        self.tool_chat_template = chat_template
        self.takes_tools = "tools" in chat_template
        self._prompt_end = prompt_end
        self.chat_calls: list[tuple[list[dict[str, Any]], bool, dict[str, Any] | None]] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        begin = [self.bos_token_id] if add_special_tokens and self.bos_token_id is not None else []
        return begin + self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Render as `role:content` and an end-of-turn token per message; refuse what a template would."""
        self.chat_calls.append((list(messages), add_generation_prompt, template_kwargs))
        if not self.has_chat_template:
            raise RequestError("the model has no chat template; use /v1/completions", param="messages")
        ids: list[int] = []
        for message in messages:
            if message["role"] not in ("system", "user", "assistant", "tool"):
                raise RequestError(f"the chat template knows no role {message['role']!r}", param="messages")
            ids += [*self.encode(f"{message['role']}:{message['content']}", add_special_tokens=False), END_OF_TURN_ID]
        return ids + (self.encode(self._prompt_end, add_special_tokens=False) if add_generation_prompt else [])


def byte_level_backend() -> Tokenizer:
    """Return a byte-level tokenizer in which the id of a byte is the byte, plus a few added tokens.

    `SPANNING_ID` ends one emoji and begins the next: bytes 9F 98 80 F0.
    """
    alphabet = _byte_alphabet()
    vocab = {alphabet[byte]: byte for byte in range(256)}
    spanning = "".join(alphabet[byte] for byte in b"\x9f\x98\x80\xf0")
    vocab |= {"<eos>": EOS_ID, "<bos>": BOS_ID, "<end>": END_OF_TURN_ID, "<tool>": TOOL_ID, spanning: SPANNING_ID}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<eos>", "<bos>", "<end>")])
    backend.add_tokens([AddedToken("<tool>", special=False), AddedToken("two words", special=False)])
    return backend


def byte_level_tokenizer(*, bos_token_id: int | None = None, has_chat_template: bool = True) -> ToyTokenizer:
    return ToyTokenizer(byte_level_backend(), bos_token_id=bos_token_id, has_chat_template=has_chat_template)


def byte_fallback_backend(decoder: Any = None) -> Tokenizer:
    """Return a sentencepiece-style tokenizer: id of a byte token is the byte, then specials and a few words."""
    words = ["</s>", "<s>", "▁", "▁hello", "hello", ",", "▁界", "a", "▁▁", "�"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    backend.decoder = decoder or decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<s>", special=True)])
    return backend


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[int, str]:
    """Read the byte-level alphabet off the library: the pre-tokenizer writes each byte in it."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet: dict[int, str] = {}
    for code in (*range(0x800), *range(0x800, 0x110000, 0x1000)):  # meets every byte of UTF-8
        if not 0xD800 <= code < 0xE000:
            data = chr(code).encode()
            if any(byte not in alphabet for byte in data):
                alphabet |= zip(data, splitter.pre_tokenize_str(chr(code))[0][0], strict=True)
    # Bytes that no UTF-8 text holds take the places that are left, in order (U+0100 and up is not for these).
    unused = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(alphabet.values()))
    return alphabet | dict(zip((b for b in range(256) if b not in alphabet), unused, strict=True))
