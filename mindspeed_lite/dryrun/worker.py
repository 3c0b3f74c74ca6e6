"""Runs a script as one rank for one step; writes a JSON file of what was counted.

Started by `rank.run` as `python -m mindspeed_lite.dryrun.worker REQUEST`.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Pipelines hold the most activations within so many micro-batches for each stage.
_MICRO_BATCHES = 2


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(MINDSPEED_LITE_DEVICE="cpu", TORCH_COMPILE_DISABLE="1")
    # torch.distributed is changed before any module imports from it by name.
    from mindspeed_lite.dryrun.world import World

    world = World(request["rank"], request["world_size"], {tuple(group): each for group, each in request["known"]})
    world.install(request["local_size"])
    import mindspeed_lite.megatron_adaptor  # noqa: F401
    from mindspeed_lite import runtime, startup
    from mindspeed_lite.bench.probes import memory, train_step
    from mindspeed_lite.dryrun import fake_tensors
    from mindspeed_lite.ops import traced

    fake_tensors.install()
    traced.dry = True
    probe = memory.MemoryProbe(counts_fake=True)
    found: dict[str, Any] = {"error": "the script ended without a training step", "micro_batches": 0}

    def prepare(args: Any) -> None:
        found["micro_batches"], found["all_micro_batches"] = shorten(args, request["world_size"])
        train_step.leave_no_trace(args)

    def step(model: Any, optimizer: Any, run: Any) -> Any:
        train_step.stop_after(1)
        result = probe.around(model, optimizer, run)
        found["error"], found["in_step"] = "", len(world.messages)
        return result

    startup.before_validation(prepare)
    train_step.install(step)
    words = request["words"]
    is_module = words[0] == "-m"
    sys.argv[:] = words[is_module:]
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(words[0]))
    try:
        with fake_tensors.StoragelessMode():
            if is_module:
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ending:
        if ending.code not in (None, 0) and not probe.counted:
            found["error"] = f"the script ended with {ending.code!r}"
    except BaseException as error:
        traceback.print_exc()
        found["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]} [{_place(error)}]"
    active = runtime.current()
    found["features"] = [] if active is None else [
        [each.feature, each.status, "; ".join(each.reasons)] for each in active.session.report.entries
    ]  # fmt: skip
    found["memory"] = probe.counted
    found["messages"] = [asdict(each) for each in world.messages]
    found["flags"] = [[list(group), each] for group, each in world.flags.items()]
    found["groups"] = world.groups
    Path(request["result"]).write_text(json.dumps(found))


def shorten(args: Any, world_size: int) -> tuple[int, int]:
    """One step without files, with as few micro-batches as hold what all hold; micro-batches run, and all."""
    args.load = args.save = None
    args.data_path, args.mock_data = None, True
    # The learning rate's schedule stays valid; data sets hold samples for one step.
    args.lr_decay_iters = args.lr_decay_iters or args.train_iters
    args.train_samples = args.lr_decay_samples = args.rampup_batch_size = None
    args.train_iters, args.eval_iters, args.lr_warmup_samples = 1, 0, 0
    stages = args.pipeline_model_parallel_size
    data = world_size // (stages * args.tensor_model_parallel_size * args.context_parallel_size)
    at_once = args.micro_batch_size * max(1, data)
    every = max(1, (args.global_batch_size or at_once) // at_once)
    run = min(every, _MICRO_BATCHES * stages)
    args.global_batch_size = run * at_once
    return run, every


def _place(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}:{last.lineno}"


if __name__ == "__main__":
    main()
