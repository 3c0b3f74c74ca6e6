"""Runs operators once, forward and backward, for compute-sanitizer and ncu to watch.

python -m benchmarks.gpu.kernels --device cuda OPERATOR:SHAPE ...
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from mindspeed_lite.bench.operators import equivalence
from mindspeed_lite.ops import discovery


def main(arguments: Sequence[str] | None = None) -> int:
    """Run each twice: the first call compiles, the second is inside the profiler's range."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.kernels", description=main.__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("cases", nargs="+", metavar="OPERATOR:SHAPE")
    options = parser.parse_args(arguments)
    for word in options.cases:
        name, _, text = word.partition(":")
        case = discovery.cases(name).problem(text, options.device, torch.bfloat16)
        inputs, function = case.make(), case.contenders[0].load()
        equivalence.outcome(function, inputs)
        with _profiled(options.device):
            equivalence.outcome(function, inputs)
        print(f"ran {name}", flush=True)
    return 0


class _profiled:
    """The range that `ncu --profile-from-start off` looks at."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"

    def __enter__(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()

    def __exit__(self, *_: object) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


if __name__ == "__main__":
    raise SystemExit(main())
