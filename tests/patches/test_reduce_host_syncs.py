"""`--reduce-host-syncs`: the same bits with fewer reads; a refused result still ends the run, and is never saved."""

from __future__ import annotations

import re
import types

import pytest
import torch

import mindspeed_lite
from mindspeed_lite.engine import Context, Settings
from mindspeed_lite.patches import reduce_host_syncs as patch
from tests.harness import checkouts
from tests.harness.process_groups import start
from tests.harness.processes import forked

# What reads in a step of Megatron's loop, on a device too.
READS = {
    *("validate_result", "_reduce_any", "get_grad_norm_fp32"),
    *("reduce_max_stat_across_model_parallel_group", "logical_and_across_model_parallel_group"),
}


@pytest.mark.parametrize("features", ["", "--use-fused-adamw"])
def test_a_step_reads_nothing_and_trains_to_the_same_bits(trainer, features):
    flags = f"--tensor-model-parallel-size 2 --global-batch-size 4 --log-interval 8 --clip-grad 0.5 {features}".split()

    def train(*more):
        return trainer(checkouts.installed()).script(2, [*flags, "--mindspeed-lite-host-report", *more], 5).check()

    def reads(result):
        head = re.search(r"(\d+) synchronisations? in a step:?", result.log(0))
        assert head, "no report"
        shown = result.log(0)[head.end() :].partition("launches in a step")[0]
        # A long place may be wrapped.
        return {name for name in READS if name in re.sub(r"\s+", "", shown)}

    off, on = train(), train("--reduce-host-syncs")
    assert on.histories() == off.histories()
    assert reads(off) == READS and reads(on) == set()


def machine(mode="disabled"):
    from megatron.core.rerun_state_machine import RerunMode, RerunState, RerunStateMachine

    made = RerunStateMachine(mode=RerunMode(mode))
    made.state = RerunState.INITIAL_RUN
    return made


def validate(made, iteration, value, rejection=torch.isnan, **more):
    made.current_iteration = iteration
    made.validate_result(torch.tensor(value), rejection, "found NaN", **more)


@forked("megatron")
def test_a_refused_result_ends_the_run_when_checks_are_read():
    from megatron.training import checkpointing

    start()
    saved = []
    checkpointing.save_checkpoint, original = lambda *args, **kwargs: saved.append(args), checkpointing.save_checkpoint
    with mindspeed_lite.enabled(reduce_host_syncs=True):
        made = machine()
        for iteration, value in enumerate([1.0, float("nan"), 2.0, float("nan")]):
            validate(made, iteration, value)
        with pytest.raises(RuntimeError, match=r"iteration 2: Unexpected result nan \(message='found NaN'\)"):
            checkpointing.save_checkpoint(1)
        assert not saved and made.current_iteration == 3
        checkpointing.save_checkpoint(2)
        assert saved == [(2,)], "what was told once is not told again"
        # What the host decides itself, and results of many elements, are judged at once.
        with pytest.raises(RuntimeError, match="iteration 5"):
            validate(made, 4, 1.0, lambda result: True)
        validate(made, 5, 1.0, lambda result: False)
        # An evaluation has no log.
        made.state = type(made.state).NOT_RUNNING_YET
        with pytest.raises(RuntimeError, match="iteration 6"):
            validate(made, 5, float("nan"))
        made.state = type(made.state).INITIAL_RUN
        # Not fatal: a warning.
        validate(made, 6, float("nan"), fatal=False)
        checkpointing.save_checkpoint(3)
        # Many checks are read without a log.
        with pytest.raises(RuntimeError, match="iteration 8"):
            for _ in range(patch._MOST_CHECKS):
                validate(made, 7, float("nan"))
    mindspeed_lite.enable(reduce_host_syncs=True)
    validate(machine(), 8, float("nan"))
    # What was not read is told at the end.
    (left,) = mindspeed_lite.disable()
    assert "iteration 9: Unexpected result nan" in left
    checkpointing.save_checkpoint = original
    with pytest.raises(RuntimeError, match="iteration 1"):
        validate(machine(), 0, float("nan"))


@pytest.mark.parametrize(("iteration", "reads"), [(1, False), (2, True), (3, True)])
def test_the_log_reads_at_its_interval_and_after_the_last_step(iteration, reads):
    given = {"log_interval": 2, "train_iters": 3, "curr_iteration": iteration - 1}
    context = Context(Settings({patch.NAME: True}), "cpu", {}, given)
    session = types.SimpleNamespace(context=context, on_end=lambda act: None, state=lambda name, make: checks)
    checks = patch._Checks(session)
    checks.waiting.append(patch._Check(torch.tensor(True), 0, lambda: told.append(1)))
    told, logged = [], []
    patch._log(lambda *args: logged.append(args), session)(1, 2)
    assert bool(told) == reads and logged == [(1, 2)]


@pytest.mark.parametrize(
    ("args", "explicit", "why"),
    [
        ({}, (), ""),
        ({"fp16": True}, (), "gradients overflowed"),
        ({"rerun_mode": "validate_results"}, ("rerun_mode",), "--rerun-mode needs an answer in every step"),
        ({"rerun_mode": "disabled"}, ("rerun_mode",), ""),
        ({"grad_norm_skip_threshold": 10.0}, (), "skips steps by the norm"),
        ({"grad_norm_skip_threshold": float("inf")}, (), ""),
        ({"rerun_mode": "validate_results"}, (), ""),
    ],
)
def test_what_needs_an_answer_in_every_step_is_a_reason(args, explicit, why):
    context = Context(Settings({patch.NAME: True}), "cpu", {}, args, explicit)
    assert "".join(patch._why_not(context)).endswith(why) and bool(why) == bool(patch._why_not(context))


@forked("megatron")
def test_other_norms_are_megatrons():
    from megatron.core.optimizer import clip_grads

    group = start()
    grads = [torch.linspace(0.1, 1.7, 1001), torch.linspace(-3, 2, 517)]
    for norm_type in (2.0, 3.0, float("inf")):
        off = clip_grads.get_grad_norm_fp32(grads, norm_type, group)
        with mindspeed_lite.enabled(reduce_host_syncs=True):
            on = clip_grads.get_grad_norm_fp32(grads, norm_type, group)
        # By other norms Megatron clips in fp32 where the coefficient stays on the device.
        assert float(on) == pytest.approx(float(off), rel=1e-6 if norm_type == 3.0 else 0)
