"""For all tests."""

from __future__ import annotations

import torch

# Tiny models gain nothing from a second thread, and threads that wait for each other are what makes tests slow
# on a machine that does something else beside.
torch.set_num_threads(1)
