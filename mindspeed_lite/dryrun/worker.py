"""Runs a script as ranks of a world for one step, each in a fork of this process, which has imported its modules.

Started by `rank.run` as `python -m mindspeed_lite.dryrun.worker REQUEST`; each rank pickles what it counted.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import importlib.util
import json
import os
import pickle
import runpy
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wrapt

from mindspeed_lite.engine.errors import OptionError

# Arguments whose schedules hold more micro-batches than a pipeline has stages.
_INTERLEAVED = (
    "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_layout",
    "schedules_method",
)  # fmt: skip
# Features whose schedule is not Megatron's, and their arguments.
_ORDERS = ("pipeline_schedule", "schedules_method")
# What a dry run cannot do.
_UNABLE = {
    "use_checkpoint_args": "reads no checkpoint: give the model's arguments in its place",
    "use_megatron_fsdp": "has no CUDA device, which it needs",
    "use_torch_fsdp2": "has no CUDA device, which it needs",
}


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(MINDSPEED_LITE_DEVICE="cpu", TORCH_COMPILE_DISABLE="1")
    # torch.distributed is changed before any module imports from it by name.
    from mindspeed_lite.dryrun.world import World

    world = World(request["world_size"])
    world.install()
    fuse_compiled()
    import mindspeed_lite.megatron_adaptor  # noqa: F401

    world.replace_groups()
    hide_broken_engine()
    words = request["words"]
    is_module = words[0] == "-m"
    sys.argv[:] = words[is_module:]
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(words[0]))
    if request["replaces_engine"] and not importlib.util.find_spec("transformer_engine"):
        wrapt.register_post_import_hook(_use_local_bert, "megatron.core.models.bert.bert_layer_specs")
        wrapt.register_post_import_hook(_use_local_norm, "megatron.core.models.vision.clip_vit_model")
    _import_ahead(words)
    _read_ahead()
    gc.freeze()
    request["end"] = time.time() + request["timeout"]
    read_end, write_end = os.pipe()
    ranks = request["ranks"] or [0]
    announce = write_end if request["ranks"] is None else None
    children = {_fork(request, world, each, ranks, announce): each for each in ranks}
    os.close(write_end)
    if request["ranks"] is None:
        with open(read_end) as announced:
            others = json.loads(announced.readline() or "[]")
        children |= {_fork(request, world, each, [0, *others], None): each for each in others}
    while children:
        child, status = os.wait()
        if (ended := children.pop(child, None)) is not None:
            _end(Path(request["folder"]), ended, os.waitstatus_to_exitcode(status))


def hide_broken_engine() -> None:
    """Let a Transformer Engine that cannot be imported be absent, which Megatron expects; it would stop there."""
    from mindspeed_lite.patches._shared import megatron_arguments

    if megatron_arguments.import_error() is not None:
        for name in [each for each in sys.modules if each.startswith("transformer_engine.")]:
            del sys.modules[name]
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]


def fuse_compiled() -> None:
    """Count what a compiler would fuse as one kernel, without compiling it."""
    import torch

    from mindspeed_lite.ops import traced

    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return compile
        if isinstance(model, torch.nn.Module):
            return model
        # As by torch, since features refuse functions that others have wrapped.
        space = {"__name__": "torch", "observed": traced.observed(model)}
        exec("def compiled(*given, **options): return observed(*given, **options)", space)
        return functools.wraps(model)(space["compiled"])  # type: ignore[arg-type]

    torch.compile = compile


def _end(folder: Path, rank: int, code: int) -> None:
    """Let no rank wait for one that has ended, and say how it ended if it could not."""
    from mindspeed_lite.dryrun.passed_values import PassedValues

    result = folder / f"result-{rank}"
    if not result.exists():
        cause = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        memory = "; this machine's memory may not suffice" if code == -signal.SIGKILL else ""
        result.write_bytes(pickle.dumps({"error": f"its process ended {cause} before the step did{memory}"}))
    PassedValues(folder, rank, set()).end()


def _use_local_bert(module: Any) -> None:
    module.bert_layer_with_transformer_engine_spec = module.bert_layer_local_spec


def _use_local_norm(module: Any) -> None:
    import torch

    # Megatron's default without Transformer Engine, torch's own, does not take what Megatron gives it.
    init, name = module.CLIPViTModel.__init__, "megatron.core.transformer.torch_norm"
    norm = importlib.import_module(name).WrappedTorchNorm
    init.__defaults__ = tuple(norm if each is torch.nn.LayerNorm else each for each in init.__defaults__)


def _import_ahead(words: Sequence[str]) -> None:
    """Import what the script imports at its top; what fails there fails again in the script."""
    try:
        spec = importlib.util.find_spec(words[1]) if words[0] == "-m" else None
        tree = ast.parse(Path(words[0] if spec is None else spec.origin or "").read_bytes())
    except (OSError, SyntaxError, ImportError, ValueError):
        return
    for statement in tree.body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            with contextlib.suppress(BaseException):
                exec(compile(ast.Module([statement], []), words[0], "exec"), {})


def _read_ahead() -> None:
    """Read what every rank needs: features, this package's modules, what torch imports late."""

    from mindspeed_lite import runtime
    from mindspeed_lite.bench.probes import memory, train_step  # noqa: F401
    from mindspeed_lite.dryrun import fake_tensors, masked_data, repeat, timing, work  # noqa: F401

    runtime.catalogue(), runtime.fingerprints()
    # What torch imports for its first mode.
    fake_tensors.StoragelessMode()


def _fork(request: dict[str, Any], world: Any, rank: int, running: Sequence[int], announce: int | None) -> int:
    """The process number of a child that runs `rank` to its end."""
    if child := os.fork():
        return child
    from mindspeed_lite.dryrun.passed_values import PassedValues

    folder = Path(request["folder"])
    values = PassedValues(folder, rank, {*running})
    world.claim(rank, request["local_size"], values)
    _end_in_time(request, values)
    log = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    own, code = os.getpid(), 1
    try:
        found = _run(request, world, announce)
        # The script may have forked.
        if os.getpid() == own:
            part = folder / f"part-{rank}"
            part.write_bytes(pickle.dumps(found))
            part.rename(folder / f"result-{rank}")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_in_time(request: dict[str, Any], values: Any) -> None:
    """Raise an error in the script when its time is over."""
    from mindspeed_lite.dryrun.rank import WAITS

    def end(number: int, frame: Any) -> None:
        what = f"no step within {request['timeout']:g} seconds"
        raise TimeoutError(what if values.awaited is None else f"{WAITS} {values.awaited}: {what}")

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(0.1, request["end"] - time.time()))


def _run(request: dict[str, Any], world: Any, announce: int | None) -> dict[str, Any]:
    from mindspeed_lite import startup
    from mindspeed_lite.bench.probes import memory, train_step
    from mindspeed_lite.dryrun import fake_tensors, masked_data, repeat, timing
    from mindspeed_lite.dryrun.calls import PIPELINE
    from mindspeed_lite.dryrun.rank import ENDED, NO_STEP
    from mindspeed_lite.dryrun.work import WorkRecorder
    from mindspeed_lite.ops import traced

    words, clock = request["words"], timing.clock_of(request["device"])
    fake_tensors.install()
    fake_tensors.expert_load = request["expert_load"]
    recorder, mode = WorkRecorder(clock), fake_tensors.StoragelessMode()
    traced.dry = True
    probe = memory.MemoryProbe(counts_fake=True, module=recorder.module)
    if announce is not None:
        world.on_pipeline = functools.partial(_announce, announce, world.values.running)
    found: dict[str, Any] = {"error": NO_STEP}
    arguments: list[Any] = []

    def prepare(args: Any) -> None:
        arguments[:] = [args]
        if request["replaces_engine"]:
            found["is_engine_replaced"] = replace_transformer_engine(args)
        found["left_out"] = leave_out(args, (*_DEVICE_ONLY, *_ENGINE_ONLY * found.get("is_engine_replaced", False)))
        replace_tokenizer(args, request["vocabulary"])
        masked_data.install()
        found["micro_batches"] = shorten(args, world.size)
        train_step.leave_no_trace(args)

    def step(model: Any, optimizer: Any, run: Any) -> Any:
        is_partial = not world.values.running.issuperset(range(world.size))
        if is_partial and _is_between_alike(model, world.groups[PIPELINE], world.values):
            found["error"], found["is_alike"] = "", True
            sys.exit()
        forget_orders(arguments[0], _features())
        train_step.stop_after(1)
        optimizer.step = recorder.within("optimizer")(optimizer.step)
        config: Any = getattr(model[0], "config", None)
        if finish := getattr(config, "finalize_model_grads_func", None):
            config.finalize_model_grads_func = recorder.within("gradients")(finish)
        with recorder.recording(mode, model):
            if clock is not None:
                fake_tensors.on_read.append(clock.read_by_host)
                world.on_message = timing.on_message(clock, recorder, world)
            if is_partial:
                counts = repeat.Counts(world, recorder, probe.tracker)
                repeat.install(model, arguments[0], found["micro_batches"][0], counts)
            result = probe.around(model, optimizer, run)
            found["error"], found["in_step"] = "", len(world.messages)
            if clock is not None:
                overlaps = "tp_comm_overlap" in found["left_out"]
                found["time"] = timing.of_step(clock, recorder, world, model, arguments[0], overlaps)
        return result

    startup.before_validation(prepare)
    train_step.install(step)
    try:
        with mode:
            if words[0] == "-m":
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ending:
        if ending.code not in (None, 0) and found["error"]:
            found["error"] = f"{ENDED}{ending.code!r}"
    except BaseException as error:
        traceback.print_exc()
        found["error"] = str(error) if isinstance(error, OptionError) else f"{_told(error)} [{_place(error)}]"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    found["features"] = _features()
    found["memory"], found["work"] = probe.counted, recorder.counted()
    found["host"] = recorder.host()
    found["messages"], found["groups"] = world.messages, world.groups
    return found


def _features() -> list[tuple[str, str, str]]:
    """Each with its status and reasons."""
    from mindspeed_lite import runtime

    active = runtime.current()
    entries = () if active is None else active.session.report.entries
    return [(each.feature, each.status, "; ".join(each.reasons)) for each in entries]


def forget_orders(args: Any, features: Sequence[tuple[str, str, str]]) -> None:
    """Megatron's schedule runs if the feature that has another does not apply."""
    for feature, status, _ in features:
        if feature in _ORDERS and status != "applied":
            setattr(args, feature, None)


def _announce(pipe: int, running: set[int], stages: tuple[int, ...]) -> None:
    running.update(stages)
    os.write(pipe, f"{json.dumps(stages[1:])}\n".encode())
    os.close(pipe)


def _is_between_alike(model: Any, stages: tuple[int, ...], values: Any) -> bool:
    """True if the stages before and after have the same parameters."""
    own = [(name, [*each.shape], str(each.dtype)) for chunk in model for name, each in chunk.named_parameters()]
    mine = [zlib.crc32(repr(own).encode())]
    values.put(("model", values.rank), mine)
    place = stages.index(values.rank)
    neighbours = [stages[each] for each in (place - 1, place + 1) if 0 <= each < len(stages)]
    return len(neighbours) == 2 and all(values.get(values.next(("model", each)), each) == mine for each in neighbours)


# Features that compute what Transformer Engine's layers and optimizer do, with what they save.
_ENGINE = ("use_flash_attn", "use_fused_rmsnorm", "use_fused_layernorm", "use_gradient_accumulation_fusion",
           "use_fused_adamw")  # fmt: skip
# Arguments that need it or a device, without which a training differs in its speed or memory only.
_ENGINE_ONLY = ("fp8", "fp4", "fp8_param_gather", "tp_comm_overlap", "use_precision_aware_optimizer")
_DEVICE_ONLY = ("optimizer_cpu_offload", "defer_embedding_wgrad_compute")


def replace_transformer_engine(args: Any) -> bool:
    """Megatron's own layers with features in place of Transformer Engine's, if it is asked for and missing."""
    from mindspeed_lite.platform import megatron

    if getattr(args, "transformer_impl", "") != "transformer_engine" or importlib.util.find_spec("transformer_engine"):
        return False
    args.transformer_impl = "local"
    backend = getattr(args, "attention_backend", None)
    for name in _ENGINE[getattr(backend, "name", backend) in ("unfused", "local") :]:
        if hasattr(args, name):
            setattr(args, name, True)
    if (megatron.version() or "0").startswith("0.12"):
        # Its layers take the main gradient from a saved weight, which without storage is another tensor.
        args.use_gradient_accumulation_fusion = False
    args.use_fused_rotary_pos_emb = getattr(args, "apply_rope_fusion", False)
    args.use_fused_cross_entropy = getattr(args, "cross_entropy_fusion_impl", "") == "te"
    return True


def leave_out(args: Any, names: Sequence[str]) -> list[str]:
    """Turn arguments off; those that were on."""
    found = [name for name in names if getattr(args, name, None)]
    for name in found:
        setattr(args, name, None if name in ("fp8", "fp4") else False)
    return found


def replace_tokenizer(args: Any, vocabulary: int | None) -> None:
    """A tokenizer without files, of the same size; raises OptionError if files are missing and the size unknown."""
    from mindspeed_lite.planner.arguments import VOCABULARIES

    files = [getattr(args, name, None) for name in ("tokenizer_model", "vocab_file", "merge_file")]
    missing = next((each for each in files if each and not os.path.exists(each)), None)
    # Megatron's tokenizer of a vocabulary with merges, if none is named.
    kind = args.tokenizer_type or ("GPT2BPETokenizer" if args.merge_file else "")
    given = next(filter(None, (getattr(args, name, None) for name in ("vocab_size", "padded_vocab_size"))), None)
    size = vocabulary or VOCABULARIES.get(kind) or given
    if missing is None and vocabulary is None:
        return
    if size is None:
        raise OptionError(f"the tokenizer's {missing} is not on this machine: give its size by --vocabulary N")
    if kind.startswith("BertWordPiece"):
        size += getattr(args, "vocab_extra_ids", 0)
    args.tokenizer_type, args.tokenizer_model, args.vocab_file, args.merge_file = "NullTokenizer", None, None, None
    # It adds a token for the end of a document.
    args.vocab_size = size - 1


def shorten(args: Any, world_size: int) -> tuple[int, int]:
    """One step without files, with as few micro-batches as hold what all hold; micro-batches run, and all."""
    for name, reason in _UNABLE.items():
        if getattr(args, name, False):
            raise OptionError(f"--{name.replace('_', '-')}: a dry run {reason}")
    args.load = args.save = args.pretrained_checkpoint = None
    # Nor a cache of indices, which one rank writes for others.
    args.data_path, args.data_cache_path, args.mock_data = None, None, True
    # The learning rate's schedule stays valid; data sets hold samples for one step.
    args.lr_decay_iters = args.lr_decay_iters or args.train_iters
    args.train_samples = args.lr_decay_samples = args.rampup_batch_size = None
    args.train_iters, args.eval_iters, args.lr_warmup_samples = 1, 0, 0
    args.log_interval = 2
    stages = args.pipeline_model_parallel_size
    data, left = divmod(world_size, stages * args.tensor_model_parallel_size * args.context_parallel_size)
    at_once = args.micro_batch_size * max(1, data)
    batch = args.global_batch_size or at_once
    if not left and batch % at_once and not getattr(args, "decrease_batch_size_if_needed", False):
        raise OptionError(
            f"--global-batch-size {batch} is no multiple of {at_once}, --micro-batch-size {args.micro_batch_size} on "
            f"{data} data-parallel ranks: change one of them"
        )
    every = max(1, batch // at_once)
    is_interleaved = any(getattr(args, name, None) for name in _INTERLEAVED)
    group = getattr(args, "microbatch_group_size_per_vp_stage", None) or stages
    has_own_order = any(getattr(args, name, None) for name in _ORDERS)
    if is_interleaved and not has_own_order and 0 < every % group < stages:
        raise OptionError(
            f"--global-batch-size {args.global_batch_size} gives {every} micro-batches, {every % group} of them in a "
            f"last group; Megatron's interleaved schedule needs groups of at least {stages}, one a stage: change it"
        )
    run = min(every, 2 * stages if is_interleaved else stages + 1)
    args.global_batch_size = run * at_once
    return run, every


def _told(error: BaseException) -> str:
    text = " ".join(str(error).split())[:300]
    if isinstance(error, TimeoutError):
        return text
    # Without Transformer Engine, Megatron's modules hold mocks of its classes, or no names.
    is_mock = isinstance(error, StopIteration) and "mock" in traceback.extract_tb(error.__traceback__)[-1].filename
    if is_mock or (isinstance(error, NameError) and str(error.name).startswith("TE")):
        return f"its layers need Transformer Engine, which is not installed: {text}"
    return f"{type(error).__name__}: {text}"


def _place(error: BaseException) -> str:
    """Where a script fails, or is when its time is over."""
    frames = traceback.extract_tb(error.__traceback__)
    # A dry run may be in Python's library when its time is over.
    passed = (str(Path(__file__).parent), os.path.dirname(os.__file__))
    last = next((each for each in reversed(frames) if _is_of_script(each.filename, passed)), frames[-1])
    return f"{last.filename}:{last.lineno}"


def _is_of_script(file: str, passed: tuple[str, ...]) -> bool:
    return "site-packages" in file or not file.startswith((*passed, "<frozen"))


if __name__ == "__main__":
    main()
