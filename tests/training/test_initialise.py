"""A new drafter: taps, draft ids, mask token, weights taken from the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_cases import CPU, conversation, settings

from dspark.errors import ConfigError
from dspark.models.decoder import Decoder
from dspark.models.drafter_checkpoint import save_drafter
from dspark.models.drafter_formats import SPECULATORS
from dspark.training.config import TrainConfig
from dspark.training.dataset import Dataset
from dspark.training.initialise import choose_draft_ids, choose_mask_token, new_drafter, spread_taps
from dspark.training.schedule import items_of_step, learning_rate, num_steps
from dspark.training.setup import Target, load_target

DATA = Dataset(conversations=(conversation([1, 2, 3, 3, 2, 3], 2), ), num_unanswered=0, num_cut=0)  # fmt: skip


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Target:
    return load_target(str(target_folder), CPU)


def make(target_folder: Path, target: Target, **changes: Any) -> Any:
    config: TrainConfig = settings(target_folder, Path("d"), Path("o"), **changes)
    return new_drafter(config, target, DATA, (0, 2))


def test_taps_are_spread_as_in_the_paper() -> None:
    assert spread_taps(5, 36) == (1, 9, 17, 25, 33)
    assert spread_taps(3, 30) == (1, 14, 27)
    assert spread_taps(3, 3) == (0, 1, 2)


def test_more_taps_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_taps \(5\) exceeds the target's number of layers \(4\)"):
        spread_taps(5, 4)


def test_the_most_frequent_ids_are_kept_and_the_lower_among_equals() -> None:
    assert choose_draft_ids(np.array([0, 5, 0, 7, 5, 5]), 3).tolist() == [1, 3, 4]


def test_the_mask_token_is_a_special_one_that_no_text_uses() -> None:
    assert choose_mask_token(DATA, {2, 5, 6}, 10) == 6
    assert choose_mask_token(DATA, {2, 3}, 10) == 9
    with pytest.raises(ConfigError, match="none is free as mask"):
        choose_mask_token(Dataset(conversations=(conversation([0, 1], 1),), num_unanswered=0, num_cut=0), {1}, 2)


def test_draft_layers_begin_as_the_targets_last_ones(target_folder: Path, target: Target) -> None:
    state = make(target_folder, target).state_dict()
    stored = load_file(target_folder / "model.safetensors")
    for index, source in ((0, 2), (1, 3)):
        for part in ("self_attn.q_proj", "mlp.down_proj", "input_layernorm"):
            expected = stored[f"model.layers.{source}.{part}.weight"]
            assert torch.equal(state[f"layers.{index}.{part}.weight"], expected)
    assert torch.equal(state["norm.weight"], stored["model.norm.weight"])
    taps = torch.arange(64.0)[None]
    assert (taps @ state["fc.weight"].T).tolist() == [list(range(32, 64))]  # the higher tap as it is
    assert torch.equal(state["hidden_norm.weight"], stored["model.layers.2.input_layernorm.weight"])


def test_draft_layers_can_begin_from_nothing(target_folder: Path, target: Target) -> None:
    state = make(target_folder, target, init_from_target=False).state_dict()
    stored = load_file(target_folder / "model.safetensors")
    assert not torch.equal(state["layers.0.mlp.down_proj.weight"], stored["model.layers.2.mlp.down_proj.weight"])
    assert bool((state["norm.weight"] == 1).all())


def test_a_pruned_head_holds_the_rows_of_the_kept_ids(target_folder: Path, target: Target, decoder: Decoder) -> None:
    module = make(target_folder, target, draft_vocab_size=2)
    assert module.target_ids.tolist() == [2, 3]
    assert torch.equal(module.lm_head.weight, decoder.head_weight()[[2, 3]])


def test_more_draft_layers_than_the_target_has_cannot_be_copies(target_folder: Path, target: Target) -> None:
    with pytest.raises(ConfigError, match="5 draft layers cannot begin as layers of this target"):
        make(target_folder, target, num_layers=5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_vocab_size": 1000}, r"draft_vocab_size \(1000\) exceeds the target's vocabulary \(264\)"),
        ({"markov_head_type": "other"}, r"markov_head_type \('other'\) must be one of vanilla, gated, rnn"),
    ],
)
def test_settings_that_do_not_fit_the_target_are_refused(
    target_folder: Path, target: Target, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(target_folder, target, **changes)


def test_a_run_can_go_on_from_a_drafter_of_the_same_shape(target_folder: Path, target: Target, tmp_path: Path) -> None:
    first = make(target_folder, target, seed=5, draft_vocab_size=4)
    save_drafter(tmp_path / "first", first.config, first.state_dict(), layout=SPECULATORS)

    second = make(target_folder, target, seed=6, draft_vocab_size=4, init_from=str(tmp_path / "first"))

    assert second.config.mask_token_id == first.config.mask_token_id
    for name, tensor in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor), name


def test_a_drafter_of_another_shape_is_not_gone_on_from(target_folder: Path, target: Target, tmp_path: Path) -> None:
    first = make(target_folder, target, draft_vocab_size=4)
    save_drafter(tmp_path / "first", first.config, first.state_dict(), layout=SPECULATORS)

    with pytest.raises(ConfigError, match=f"block_size is {first.config.block_size}, asked for is 5"):
        make(target_folder, target, draft_vocab_size=4, block_size=5, init_from=str(tmp_path / "first"))


def test_taps_outside_the_target_are_refused(target_folder: Path, target: Target) -> None:
    with pytest.raises(ConfigError, match=r"tap_ids \(0, 4\) must be distinct layers from -1"):
        new_drafter(settings(target_folder, Path("d"), Path("o")), target, DATA, (0, 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_anchors": 0}, r"num_anchors \(0\) must be at least 1"),
        ({"seed": -1}, r"seed \(-1\) must not be negative"),
        ({"learning_rate": 0.0}, r"learning_rate \(0.0\) must be above 0"),
        ({"hold_out_fraction": 1.0}, r"hold_out_fraction \(1.0\) must be at least 0 and below 1"),
        ({"ce_weight": 0, "l1_weight": 0}, "leave nothing to learn"),
        ({"cache_dtype": "float8"}, r"cache_dtype \('float8'\) must be float16 or bfloat16"),
        ({"data": ()}, "names no file"),
    ],
)
def test_wrong_settings_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**{"data": ("d",), "output": "o"} | changes)


def test_every_epoch_takes_every_conversation_once_in_its_own_order() -> None:
    items = [item for step in range(5) for item in items_of_step(step, 10, batch_size=4, seed=0)]
    first, second = ([place for epoch, place in items if epoch == number] for number in (0, 1))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


def test_the_rate_rises_over_the_warm_up_and_falls_as_a_cosine() -> None:
    rates = [learning_rate(step, 100, peak=1.0, warmup_fraction=0.04) for step in (0, 3, 4, 52, 99)]
    assert rates == pytest.approx([0.25, 1.0, 1.0, 0.5, 0.000268], abs=1e-6)


def test_the_number_of_steps_comes_from_the_epochs_unless_it_is_given() -> None:
    assert num_steps(10, batch_size=4, num_epochs=2.0, max_steps=None) == 5
    assert num_steps(10, batch_size=4, num_epochs=2.0, max_steps=7) == 7
