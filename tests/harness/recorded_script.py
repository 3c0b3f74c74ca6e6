"""A training script, run for one step with storage and peers: what a dry run says of it, written for each rank."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from mindspeed_lite.dryrun.world import World

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"


class Recorder(World):
    """Records a real rank's messages, and sends them."""

    depth = 0

    def _note(self, *args: Any, **kwargs: Any) -> None:
        if not self.depth:
            super()._note(*args, **kwargs)

    def _perform(self, original: Callable[..., Any], kind: str, given: dict[str, Any]) -> Any:
        self.depth += 1
        try:
            return original(**given)
        finally:
            self.depth -= 1


def spread(_: Any, logits: torch.Tensor) -> torch.Tensor:
    """Random logits of Megatron's that spread the tokens of a rank evenly, as a dry run does."""
    experts = logits.shape[-1]
    tokens = torch.arange(logits.numel() // experts, device=logits.device)
    distance = (torch.arange(experts, device=logits.device) - tokens.unsqueeze(1)) % experts
    return -distance.to(logits.dtype).view_as(logits)


def main() -> None:
    world = Recorder(int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
    world.record()
    import mindspeed_lite.megatron_adaptor  # noqa: F401
    from mindspeed_lite import startup
    from mindspeed_lite.bench.probes import memory, train_step
    from mindspeed_lite.dryrun import worker

    probe = memory.MemoryProbe()

    def prepare(args: Any) -> None:
        worker.shorten(args, world.size)

    def step(model: Any, optimizer: Any, run: Callable[[], Any]) -> Any:
        train_step.stop_after(1)
        importlib.import_module("megatron.core.transformer.moe.moe_utils").RandomSTE.forward = staticmethod(spread)
        result = probe.around(model, optimizer, run)
        found = {"memory": probe.counted, "messages": [asdict(each) for each in world.messages]}
        Path(os.environ["RECORDED"], f"rank{world.rank}.json").write_text(json.dumps(found))
        return result

    startup.before_validation(prepare)
    train_step.install(step)
    script = os.environ.get("SCRIPT", str(SCRIPT))
    sys.argv[0] = script
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
