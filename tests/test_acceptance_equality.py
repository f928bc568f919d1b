"""Served acceptance equals offline simulated acceptance (case M4), and the trainer's features equal the engine's.

A tiny target and a drafter trained on half of the prompts, so that rounds of all lengths occur.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from byte_tokenizers import END_OF_TURN_ID
from drafter_cases import draft_with_module
from safetensors.torch import load_file, save_file
from training_cases import CPU, answer, conversation, save_target, settings, write_records

import dspark.engine.engine
from dspark.config import BatchingConfig, CacheConfig, EngineConfig, SpeculationConfig
from dspark.engine.build import load_engine
from dspark.evaluation.acceptance import Round, ServedAcceptance, ServedText, serve_texts
from dspark.models.decoder import Decoder
from dspark.models.drafter_module import DrafterModule
from dspark.models.weights import load_decoder
from dspark.request import FinishReason, Request, SamplingParams
from dspark.speculation.dspark_drafter import DSparkProposer
from dspark.speculation.proposal import CommittedFeatures
from dspark.training.block_pass import run_blocks
from dspark.training.blocks import build_blocks
from dspark.training.checkpoint import load_module
from dspark.training.dataset import Conversation
from dspark.training.features import OnlineFeatures
from dspark.training.loss import DrafterLoss, LossWeights
from dspark.training.simulated_rounds import acceptance_along, expected_rounds, simulate_rounds
from dspark.training.trainer import train

MAX_TOKENS = 24
EOS_TOKEN_IDS = (256, END_OF_TURN_ID)  # of the tiny target
PROMPTS = [torch.randint(0, 256, (5 + n % 4,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(8)]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("equality") / "target")


@pytest.fixture(scope="module")
def decoder(target_folder: Path) -> Decoder:
    return load_decoder(target_folder, dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def drafter_folder(target_folder: Path, decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("equality")
    records = [{"prompt_ids": prompt, "response_ids": answer(decoder, prompt, MAX_TOKENS)} for prompt in PROMPTS[:4]]
    data = write_records(folder / "data.jsonl", records)
    config = settings(
        target_folder, data, folder / "out",
        num_anchors=1000, batch_size=4, max_steps=100, learning_rate=5e-3, save_interval=1000, ce_weight=1.0,
    )  # fmt: skip
    return train(config, show_progress=False).checkpoint


@pytest.fixture(scope="module")
def module(drafter_folder: Path, decoder: Decoder) -> DrafterModule:
    return loaded(drafter_folder, decoder)


def loaded(folder: Path, decoder: Decoder) -> DrafterModule:
    module = load_module(folder, decoder)
    assert isinstance(module, DrafterModule)
    return module


def serve(
    target_folder: Path, drafter_folder: Path, prompts: Sequence[Sequence[int]], sampling: SamplingParams
) -> list[ServedText]:
    """Answer the prompts with the real engine, four at a time."""
    config = EngineConfig(
        model=str(target_folder),
        drafter=str(drafter_folder),
        speculation=SpeculationConfig(scheduler="fixed"),
        batching=BatchingConfig(max_size=4, max_batch_tokens=64),
        cache=CacheConfig(prefix_caching=False),
    )
    requests = [
        Request(request_id=str(n), prompt_token_ids=prompt, sampling=sampling) for n, prompt in enumerate(prompts)
    ]
    return serve_texts(load_engine(config), requests)


def conversations_of(prompts: Sequence[Sequence[int]], texts: Sequence[ServedText]) -> list[Conversation]:
    return [
        conversation([*prompt, *text.token_ids], len(prompt), n)
        for n, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]


def walked_rounds(module: DrafterModule, decoder: Decoder, one: Conversation, num_prompt: int) -> list[Round]:
    """Draft greedily at an anchor, slot after slot; accept up to the first mismatch with the text; jump; repeat."""
    (features,) = OnlineFeatures(decoder, module.config.tap_ids, chunk_tokens=512)([one])
    ids, rounds, anchor = one.token_ids.tolist(), [], num_prompt
    positions = torch.arange(len(ids))
    while anchor < len(ids) - 1:
        num_left = len(ids) - 1 - anchor
        drafted = draft_with_module(
            module, features.taps, positions, torch.tensor([ids[anchor]]), torch.tensor([anchor])
        )
        tokens = drafted.target_ids[0].tolist()[: num_left - 1]
        matches = [token == true for token, true in zip(tokens, ids[anchor + 1 :], strict=False)]
        num_accepted = matches.index(False) if False in matches else len(matches)
        rounds.append(Round(num_proposed=len(tokens), num_accepted=num_accepted, num_emitted=num_accepted + 1))
        anchor += num_accepted + 1
    return rounds


def test_served_rounds_are_the_offline_walk_round_for_round(
    target_folder: Path, drafter_folder: Path, module: DrafterModule, decoder: Decoder
) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    texts = serve(target_folder, drafter_folder, PROMPTS, sampling)
    conversations = conversations_of(PROMPTS, texts)
    assert {text.finish_reason for text in texts} == {FinishReason.LENGTH}
    walks = [
        walked_rounds(module, decoder, one, len(prompt)) for one, prompt in zip(conversations, PROMPTS, strict=True)
    ]
    assert [text.rounds for text in texts] == walks
    assert {round_.num_accepted for walk in walks for round_ in walk} == {0, 1, 2, 3}  # every length occurs


def test_simulated_counts_equal_served_counts_exactly_at_temperature_0(
    target_folder: Path, drafter_folder: Path, module: DrafterModule, decoder: Decoder
) -> None:
    """With a stop token taken from the middle of the first answer, some texts end by it and others by the limit."""
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    stop_id = serve(target_folder, drafter_folder, PROMPTS[:1], greedy)[0].token_ids[10]
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, stop_token_ids=(stop_id,))
    texts = serve(target_folder, drafter_folder, PROMPTS, sampling)
    assert {text.finish_reason for text in texts} == {FinishReason.LENGTH, FinishReason.STOP}
    source = OnlineFeatures(decoder, module.config.tap_ids, chunk_tokens=512)
    simulated = simulate_rounds(
        module, conversations_of(PROMPTS, texts), source, decoder.compute_logits,
        num_texts=8, eos_token_ids={stop_id, *EOS_TOKEN_IDS},
    )  # fmt: skip
    served = ServedAcceptance.of(texts).rounds
    assert simulated["0"] == served
    assert served.num_rounds > 20
    assert simulated["1"].num_rounds == 0


@pytest.fixture(scope="module")
def soft_folder(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with flatter distributions, which a drafter meets more often at temperature 1."""
    folder = tmp_path_factory.mktemp("equality") / "soft"
    shutil.copytree(target_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] *= 0.2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def soft_decoder(soft_folder: Path) -> Decoder:
    return load_decoder(soft_folder, dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def soft_module(drafter_folder: Path, soft_decoder: Decoder) -> DrafterModule:
    return loaded(drafter_folder, soft_decoder)


@pytest.fixture(scope="module")
def sampled(soft_folder: Path, drafter_folder: Path) -> list[tuple[list[int], ServedText]]:
    """96 prompts with their answers at temperature 1, the same in every run of the tests.

    Unseeded, for seeded requests are verified by `coupled`; so what stands in for fresh seeds is fixed here.
    """
    prompts = PROMPTS * 12
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dspark.engine.engine, "request_seed", lambda request: 1000 + int(request.request_id))
        texts = serve(soft_folder, drafter_folder, prompts, SamplingParams(temperature=1, max_tokens=MAX_TOKENS))
    return list(zip(prompts, texts, strict=True))


def test_acceptance_at_temperature_1_is_the_exact_rate_at_the_anchors_visited(
    sampled: list[tuple[list[int], ServedText]], soft_module: DrafterModule, soft_decoder: Decoder
) -> None:
    """Each judged proposal is accepted with chance 1 - l1 / 2, given all before it: a martingale, so its deviation
    over its standard deviation is nearly normal. 96 texts, fixed seeds; beyond 4.5 by chance: 2e-5 for 3 positions."""
    loss = DrafterLoss(soft_module, soft_decoder.compute_logits, LossWeights(), chunk_slots=256)
    source = OnlineFeatures(soft_decoder, soft_module.config.tap_ids, chunk_tokens=512)
    num_proposals = soft_module.config.num_draft_tokens
    deviation, variance = np.zeros(num_proposals), np.zeros(num_proposals)
    for prompt, text in sampled:
        if not text.rounds:
            continue
        one = conversation([*prompt, *text.token_ids], len(prompt))
        starts = len(prompt) + np.cumsum([0, *(round_.num_emitted for round_ in text.rounds)])[:-1]
        batch = build_blocks([one], source([one]), [starts], soft_module.config, device=CPU)
        with torch.no_grad():
            _, chosen, acceptance, _ = loss.measure(run_blocks(soft_module, batch), batch)
        rates = np.zeros((len(starts), num_proposals))
        rates[chosen.blocks.numpy(), chosen.proposals.numpy()] = acceptance.double().clamp(0, 1).numpy()
        for start, round_, row in zip(starts, text.rounds, rates, strict=True):
            num_judged = min(round_.num_accepted + 1, round_.num_proposed, one.num_tokens - 1 - int(start))
            for k in range(num_judged):
                deviation[k] += (round_.num_accepted > k) - row[k]
                variance[k] += row[k] * (1 - row[k])
    assert variance.min() > 50  # enough outcomes that could have gone either way
    assert np.abs(deviation / np.sqrt(variance)).max() < 4.5


def test_served_counts_at_temperature_1_are_those_expected_of_their_texts(
    sampled: list[tuple[list[int], ServedText]], soft_module: DrafterModule, soft_decoder: Decoder
) -> None:
    """Given its text, a request's rounds and acceptances deviate from the simulation's with mean 0, independently of
    the others. 96 texts, fixed seeds; beyond 4.5 standard errors by chance: about 3e-5 for 4 counts."""
    source = OnlineFeatures(soft_decoder, soft_module.config.tap_ids, chunk_tokens=512)
    differences = []
    for prompt, text in sampled:
        one = conversation([*prompt, *text.token_ids], len(prompt))
        acceptance = acceptance_along(
            soft_module, one, (len(prompt), one.num_tokens), source, soft_decoder.compute_logits
        )
        expected = expected_rounds(acceptance.sampled, is_ended=text.finish_reason is FinishReason.STOP)
        served = ServedAcceptance.of([text]).rounds
        assert expected.num_emitted == served.num_emitted
        served.cover(soft_module.config.num_draft_tokens)  # a text may end before any whole draft
        differences.append(np.array([served.num_rounds, *served.accepted]) - [expected.num_rounds, *expected.accepted])
    means, spread = np.mean(differences, axis=0), np.std(differences, axis=0, ddof=1)
    assert spread.min() > 0.1
    assert np.abs(means / (spread / np.sqrt(len(differences)))).max() < 4.5


@pytest.mark.parametrize("chunk", [16, 64])
def test_features_of_trainer_and_engine_are_equal_bit_for_bit(
    target_folder: Path, drafter_folder: Path, decoder: Decoder, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same text of 41 tokens in the same chunks: three of 16, 16 and 9 tokens, or one."""
    text = torch.randint(0, 256, (41,), generator=torch.Generator().manual_seed(5)).tolist()
    taken: list[CommittedFeatures] = []

    class Recording(DSparkProposer):
        def take_features(self, committed: CommittedFeatures) -> None:
            taken.append(committed)
            super().take_features(committed)

    monkeypatch.setattr("dspark.engine.build.DSparkProposer", Recording)
    config = EngineConfig(
        model=str(target_folder),
        drafter=str(drafter_folder),
        speculation=SpeculationConfig(scheduler="fixed"),
        batching=BatchingConfig(max_size=1, max_batch_tokens=chunk),
    )
    request = Request(request_id="0", prompt_token_ids=text, sampling=SamplingParams(temperature=0, max_tokens=1))
    serve_texts(load_engine(config), [request])
    tap_ids = loaded(drafter_folder, decoder).config.tap_ids
    (trained,) = OnlineFeatures(decoder, tap_ids, chunk_tokens=chunk)([conversation(text, 5)])
    assert len(taken) == -(-len(text) // chunk)
    assert torch.cat([one.positions for one in taken]).tolist() == list(range(41))
    assert torch.equal(torch.cat([one.features for one in taken]), trained.taps)
