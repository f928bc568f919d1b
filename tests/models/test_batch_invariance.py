"""With the compiled kernels a token's logits are the same to the bit however the batch is made up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import CPU, FAMILIES, make_model, new_cache, random_ids, run

from dspark.models import kernels
from dspark.models.weights import load_decoder

pytestmark = pytest.mark.skipif(not kernels.instruction_set(), reason="no compiled kernels here")
PAGES = [[4, 0, 2, 9, 1, 7], [3, 8, 5, 6, 10, 11]]


@pytest.mark.parametrize("weights", ["auto", "float16", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_depend_on_no_other_row_chunk_or_cache(family: str, weights: str, tmp_path: Path) -> None:
    make_model(family, head_dim=16).save_pretrained(tmp_path)
    decoder = load_decoder(tmp_path, dtype=torch.float32, device=CPU, weights=weights)
    ids, others = random_ids(20, seed=1), random_ids(20, seed=2)
    [whole] = run(decoder, new_cache(decoder), [(ids, 0, PAGES[0])])

    for chunks in ([1] * 20, [3, 9, 8], [13, 7]):
        cache, parts, position = new_cache(decoder), [], 0
        for size in chunks:
            rows = [(ids[position : position + size], position, PAGES[0])]
            if position:  # a neighbour of another length
                rows.insert(size % 2, (others[:size], 0, PAGES[1]))
            results = run(decoder, cache, rows)
            parts.append(results[rows.index((ids[position : position + size], position, PAGES[0]))])
            position += size
        assert torch.equal(torch.cat(parts), whole), chunks
