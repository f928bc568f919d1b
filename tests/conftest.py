"""For all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dspark.models.model_source import user_cache_folder

# Tiny models gain nothing from a second thread, and threads that wait for each other are what makes tests slow
# on a machine that does something else beside.
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what tests measure and save out of the user's cache; models that are converted once stay there."""
    folder = tmp_path_factory.mktemp("cache") / "dspark"
    folder.mkdir()
    models = user_cache_folder() / "models"
    models.mkdir(parents=True, exist_ok=True)
    (folder / "models").symlink_to(models)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder.parent))
        yield
