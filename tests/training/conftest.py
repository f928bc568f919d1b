"""The tiny target on disk and in memory, shared by all tests of the room."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training_cases import CPU, save_target, write_conversations

from dspark.models.decoder import Decoder
from dspark.models.weights import load_decoder


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("training") / "target")


@pytest.fixture(scope="session")
def decoder(target_folder: Path) -> Decoder:
    return load_decoder(target_folder, dtype=torch.float32, device=CPU)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, decoder: Decoder) -> Path:
    """Eight greedy answers."""
    return write_conversations(tmp_path_factory.mktemp("training") / "data.jsonl", decoder, 8)
