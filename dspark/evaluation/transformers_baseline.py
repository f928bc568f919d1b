"""`transformers.generate` on the same weights, prompts and token counts: the baseline people know."""

from __future__ import annotations

import time
from typing import Any

import torch

from dspark.engine.build import LoadedModel


class TransformersBaseline:
    """Loads the folder of `model` with transformers (float32 like the CPU default) and decodes one prompt at a time."""

    def __init__(self, model: LoadedModel) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model.folder.path, dtype=model.decoder.dtype)
        self._model.eval()
        self._eos = sorted(model.generation_defaults.eos_token_ids)

    @torch.inference_mode()
    def run(self, prompt_ids: list[list[int]], max_tokens: int, temperature: float) -> dict[str, Any]:
        """Decode every prompt in turn and return the fields of a `PassResult`."""
        tokens, ttft_s, tpot_s = [], [], []
        start = time.perf_counter()
        for ids in prompt_ids:
            clock = _TokenClock()
            begun = time.perf_counter()
            sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
            output = self._model.generate(
                torch.tensor([ids], device=self._model.device),
                max_new_tokens=max_tokens,
                eos_token_id=self._eos or None,
                pad_token_id=self._eos[0] if self._eos else 0,
                streamer=clock,
                **sampling,
            )
            answer = output[0, len(ids) :].tolist()
            tokens.append(answer)
            ttft_s.append(clock.times[1] - begun)
            if len(answer) > 1:
                tpot_s.append((clock.times[-1] - clock.times[1]) / (len(answer) - 1))
        return {"wall_s": time.perf_counter() - start, "token_ids": tokens, "ttft_s": ttft_s, "tpot_s": tpot_s}


class _TokenClock:
    """A streamer that only notes when the prompt and each token arrive."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is buffered."""
