"""Counter-based randomness: every draw is a pure function of the request's seed, a purpose and positions.

No state advances, so neighbours in the batch, load, preemption or discarded drafts cannot shift a draw.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class NoisePurpose(IntEnum):
    """What a draw decides. Each purpose has its own independent stream; the values are part of the streams."""

    PROPOSAL = 1  # the drafter samples a token
    ACCEPTANCE = 2  # the verifier keeps or rejects a drafted token
    RESIDUAL = 3  # the replacement of a rejected token
    BONUS = 4  # the token after a fully accepted draft
    TARGET = 5  # the target's own draw at a position (coupled verification)


class KeyedNoise:
    """The noise of one request: Philox4x64-10 (Salmon et al. 2011) keyed by the seed, any integer.

    The counter holds (block, position, anchor position, purpose). Seeds that agree modulo 2**128 share their noise.
    Not for use by two threads at once.
    """

    def __init__(self, seed: int) -> None:
        key = np.array([seed & (2**64 - 1), (seed >> 64) & (2**64 - 1)], dtype=np.uint64)
        self._philox = np.random.Philox(key=key, counter=0)
        # The state of a generator that has not drawn yet. Setting it costs a sixth of making a generator.
        self._start = self._philox.state
        self._counter = self._start["state"]["counter"]

    def uniform(self, purpose: NoisePurpose, *, anchor_position: int, position: int) -> float:
        """Return the number in [0, 1) of 53 random bits that belongs to a position, in the round of an anchor.

        The anchor position is part of the key because the anchor advances with every round: a position drafted
        again in a later round gets fresh noise (block verification decides with draws of later positions, so theirs
        must not return), and a draft that was discarded and is made again from the same text sees the same noise.
        """
        self._seek(purpose, anchor_position=anchor_position, position=position)
        return (int(self._philox.random_raw()) >> 11) * 2.0**-53

    def exponential(self, position: int, size: int) -> np.ndarray:
        """Return [size] float32 exponential draws, each above 0, for the target's own draw at `position`.

        Keyed by seed and position only, so that the drawn token depends on nothing else. A smaller size gives the
        first entries of a larger one: a drafter with fewer rows in its head sees the noise of the same tokens.
        """
        self._seek(NoisePurpose.TARGET, anchor_position=0, position=position)
        # Two 32-bit numbers from each 64-bit one, the low half first on every machine.
        bits = self._philox.random_raw((size + 1) // 2).astype("<u8", copy=False).view("<u4")[:size]
        return exponentials_of(bits)

    def _seek(self, purpose: NoisePurpose, *, anchor_position: int, position: int) -> None:
        self._counter[1] = position
        self._counter[2] = anchor_position
        self._counter[3] = purpose
        self._philox.state = self._start


def exponentials_of(bits: np.ndarray) -> np.ndarray:
    """Map 32-bit integers, increasing, to float32 quantiles of the exponential law; all above 0 and finite."""
    # -log(1 - u) keeps the small values, which win races, to float32's relative precision. The half step keeps u above
    # 0, and the bound keeps it below 1, where float32 would round to infinity. In place: the vector is a vocabulary.
    values = bits.astype(np.float32)
    values += np.float32(0.5)
    values *= np.float32(2.0**-32)
    np.minimum(values, np.float32(1.0 - 2.0**-24), out=values)
    np.negative(values, out=values)
    np.log1p(values, out=values)
    return np.negative(values, out=values)
