"""Traces layers of a training for several choices of flags, in one process that imports Megatron once.

The model has two layers of each kind, on one pipeline stage, and trains on two micro-batches: what layers or
micro-batches share is told apart. The script runs until Megatron has read its flags; a child for each choice goes on.
"""

from __future__ import annotations

import json
import os
import pickle
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindspeed_lite.child_process import child_process
from mindspeed_lite.planner.choice import LAYERS, MICRO_BATCHES, Tracer, TraceRequest, TracingError
from mindspeed_lite.planner.traced import KeptStorage, LayerTrace

from .launch import TrainingLaunch


@contextmanager
def tracer(launch: TrainingLaunch, device: str = "cpu", jobs: int = 1) -> Iterator[Tracer]:
    """A function that traces choices of a launch as on a kind of device, `jobs` at the same time."""
    here = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [here, launch.environment.get("PYTHONPATH", "")]))
    request = json.dumps({"words": launch.words, "device": device, "jobs": jobs})
    with tempfile.TemporaryFile() as log, child_process(
        # The script becomes the module __main__.
        [sys.executable, "-c", f"from {__name__} import main; main()", request],
        cwd=launch.folder, env={**launch.environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
    ) as server:  # fmt: skip

        def trace(choices: Sequence[TraceRequest]) -> list[LayerTrace | TracingError]:
            assert server.stdin is not None and server.stdout is not None
            try:
                pickle.dump(list(choices), server.stdin)
                server.stdin.flush()
                found: list[LayerTrace | TracingError] = pickle.load(server.stdout)
            except (EOFError, BrokenPipeError):
                log.seek(0)
                lines = log.read().decode(errors="replace").strip().splitlines()
                raise TracingError(lines[-1] if lines else "the script ended without reading its flags") from None
            return found

        yield trace


def main() -> None:
    request = json.loads(sys.argv[1])
    os.environ.update(MINDSPEED_LITE_DEVICE="cpu", TORCH_COMPILE_DISABLE="1")
    # The script's output goes to the log.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    # torch.distributed is changed before any module imports from it by name.
    from mindspeed_lite.dryrun.world import World

    class _World(World):
        def _note(self, *given: Any) -> None:
            super()._note(*given)
            recorder.message(self.messages[-1])

    world = _World(0, 1)
    world.install(1)
    import mindspeed_lite.megatron_adaptor  # noqa: F401
    from mindspeed_lite import startup
    from mindspeed_lite.bench.probes import memory, train_step
    from mindspeed_lite.dryrun import fake_tensors
    from mindspeed_lite.dryrun.work import SavedRecorder, WorkRecorder
    from mindspeed_lite.ops import traced

    recorder, mode = WorkRecorder(), fake_tensors.StoragelessMode()
    fake_tensors.install()
    fake_tensors.claim(request["device"])
    mode.observe = recorder.observe
    traced.dry, traced.observer = True, recorder.kernel
    asked: list[tuple[TraceRequest, Any]] = []

    def prepare(args: Any) -> None:
        if not asked:
            asked.append(_serve(answers, request["jobs"]))
            world.size = asked[0][0].world_size
            os.environ["WORLD_SIZE"] = str(world.size)
        args.rank, args.world_size = 0, world.size
        _shorten(args, asked[0][0])
        train_step.leave_no_trace(args)

    def step(model: Any, optimizer: Any, run: Any) -> Any:
        others = [each.untyped_storage()._cdata for each in (*memory.weights(model), *memory.gradients(model))]
        saved = SavedRecorder(recorder, {*others}.__contains__)
        with recorder.recording(model), saved:
            run()
        first, second = saved.after_forward
        known = {each.storage._cdata for each, *_ in first}
        named = {name: each for chunk in model for name, each in chunk.named_parameters()}
        operations, messages = recorder.last_micro_batch()
        raise _Traced(LayerTrace(
            operations,
            messages,
            [KeptStorage(of, each.shape, each.dtype, size, each.storage._cdata in known) for each, of, size in second],
            saved.peaks,
            {name: each.numel() for name, each in named.items()},
            frozenset(name for name, each in named.items() if not getattr(each, "allreduce", True)),
            world.groups,
        ))  # fmt: skip

    startup.before_validation(prepare)
    train_step.install(step)
    words = request["words"]
    is_module = words[0] == "-m"
    sys.argv[:] = words[is_module:]
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(words[0]))
    result: LayerTrace | TracingError = TracingError("the script ended without a training step")
    try:
        with mode:
            (runpy.run_module if is_module else runpy.run_path)(words[is_module], run_name="__main__")
    except _Traced as found:
        result = found.trace
    except SystemExit as ending:
        result = TracingError(f"the script ended with {ending.code!r}")
    except BaseException as error:
        traceback.print_exc()
        text, place = " ".join(str(error).split())[:300], traceback.extract_tb(error.__traceback__)[-1]
        result = TracingError(f"{type(error).__name__}: {text} [{place.filename}:{place.lineno}]")
    if asked:
        pickle.dump(result, asked[0][1])
        asked[0][1].flush()
    sys.stderr.flush()
    os._exit(0)


class _Traced(BaseException):
    """Ends the script after its step."""

    def __init__(self, trace: LayerTrace) -> None:
        self.trace = trace


def _serve(answers: Any, jobs: int) -> tuple[TraceRequest, Any]:
    """Forks for each choice that is asked for. Returns in the children, with the file of the result."""
    while True:
        try:
            choices = pickle.load(sys.stdin.buffer)
        except EOFError:
            os._exit(0)
        files = [tempfile.TemporaryFile() for _ in choices]  # noqa: SIM115  (open in the children)
        for number, (choice, file) in enumerate(zip(choices, files, strict=True)):
            if number >= jobs:
                os.wait()
            if not os.fork():
                return choice, file
        for _ in choices[:jobs]:
            os.wait()
        found = []
        for file in files:
            file.seek(0)
            try:
                found.append(pickle.load(file))
            except EOFError:
                found.append(TracingError("its process ended"))
        pickle.dump(found, answers)
        answers.flush()


# Arguments of a pipeline of several stages.
_ONE_STAGE = {
    "pipeline_model_parallel_size": 1,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "virtual_pipeline_model_parallel_size": None,
}


def _shorten(args: Any, choice: TraceRequest) -> None:
    """Two micro-batches of a model with two layers of each kind, without files."""
    from mindspeed_lite.dryrun.worker import shorten

    changed = {**_ONE_STAGE, **dict(choice.arguments), "num_layers": LAYERS * len(choice.kinds)}
    if any(choice.kinds):
        changed["moe_layer_freq"] = [int(each) for each in choice.kinds for _ in range(LAYERS)]
    for name, value in changed.items():
        if hasattr(args, name):
            setattr(args, name, list(value) if isinstance(value, tuple) else value)
    data = choice.world_size // (args.tensor_model_parallel_size * args.context_parallel_size)
    args.global_batch_size = MICRO_BATCHES * args.micro_batch_size * data
    shorten(args, choice.world_size)
    args.eval_interval = args.eval_interval or 1
