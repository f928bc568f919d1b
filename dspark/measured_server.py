"""`python -m dspark.measured_server`: `dspark serve` as load tests, soaks and the serving benchmark start it.

It neither reads nor writes what other runs learned, and its drafter can be made to fail in bursts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dspark.cli import main, serve
from dspark.config import EngineConfig

if TYPE_CHECKING:
    from dspark.engine.build import ReadyEngine, WrapProposer
    from dspark.speculation.fault_injection import Fault
    from dspark.speculation.proposal import Proposer

FAULT_RATE = 0.5  # of the calls in a burst
BURST_SHARE = 0.08  # of a period: 6 of 75 seconds, so that breakers forget between bursts (60 s)
SLOW_S = 1.0  # longer than what is of use
# Not "hang": what computes then goes on in another thread, where torch makes its kernels anew, which looks like a leak.
KINDS: tuple[Fault, ...] = ("raise", "nan", "wrong_ids", "slow")


def run(argv: Sequence[str]) -> int:
    """Serve as the flags of `dspark serve` say, and with --fault-period SECONDS let the drafter fail in bursts."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--fault-period", type=float)
    own, serve_argv = parser.parse_known_args(argv)

    def load(config: EngineConfig) -> ReadyEngine:
        from dspark.engine.build import ReadyEngine, load_engine

        wrap = None if own.fault_period is None else _faulty(own.fault_period)
        return ReadyEngine(engine=load_engine(config, wrap_proposer=wrap), saved_state=None)

    return main(["serve", *serve_argv], run=lambda args: serve(args, load))


def _faulty(period_s: float) -> WrapProposer:
    from dspark.speculation.fault_injection import FaultyProposer, fault_bursts

    def wrap(proposer: Proposer) -> Proposer:
        faults = fault_bursts(
            KINDS,
            rate=FAULT_RATE,
            seed=0,
            period_s=period_s,
            burst_share=BURST_SHARE,
        )
        return FaultyProposer(proposer, faults, slow_s=SLOW_S)

    return wrap


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
