"""Draws and runs calls, and says what is wrong with each, in one line."""

from __future__ import annotations

import argparse
import functools
import importlib
import math
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mindspeed_lite.bench.operators.equivalence import outcome, output_gradient, own
from mindspeed_lite.ops import dispatch
from mindspeed_lite.ops.case import Function, Problem
from mindspeed_lite.ops.discovery import OPERATORS
from tools.fuzz.calls import Call, NoCall, draw, inputs_of, problem

_FORK_SECONDS = 300
# Multiples of the dtype's eps, of a result and of the numbers it is made of; and of the reference's own error in that
# dtype. What is missing, of another sign or of another place is beyond.
_EPS, _REFERENCE = 4.0, 3.0

NO_MKLDNN = "no mkldnn"

Results = dict[str, torch.Tensor]


def tried(given: argparse.Namespace, environment: str, seconds: float, seed: int) -> Iterator[tuple[Call, str]]:
    """Yield each call before it is made, and again with a finding about it."""
    if environment == NO_MKLDNN:
        torch._C._set_mkldnn_enabled(False)  # type: ignore[attr-defined]
    if given.plant:
        module, _, name = given.plant.partition(":")
        getattr(importlib.import_module(module), name)()
    chance, operators = random.Random(seed), given.only.split(",") if given.only else [*OPERATORS]
    end = time.monotonic() + seconds
    for _ in range(given.calls):
        call = draw(chance, max(2, os.cpu_count() or 1), operators) if given.call is None else Call.of(given.call)
        yield call, ""
        if text := finding(call):
            yield call, text
        if given.call is not None or time.monotonic() >= end:
            return


def finding(call: Call) -> str:
    """What is wrong with the call, or nothing."""
    try:
        found = problem(call)
    except NoCall:
        return ""
    # A kernel that is handed the address of a fake tensor ends the process.
    if call.mode == "fake":
        _load_fake_kernels()
    if call.mode in ("forked", "fake"):
        return forked(lambda: _finding(call, found))
    return _finding(call, found)


def _finding(call: Call, problem: Problem) -> str:
    torch.set_num_threads(call.threads)
    torch.manual_seed(call.seed)
    try:
        inputs = inputs_of(call, problem)
        definition = function = problem.contenders[0].load()
        if call.mode == "fake":
            return _fake(function, inputs)
        if call.mode == "compiled":
            torch.compiler.reset()
            function = torch.compile(function, backend="eager", dynamic=False)
        ours = outcome(function, inputs)
        gradient = output_gradient(ours["output"])
        with dispatch.force(call.operator, dispatch.REFERENCE):
            plain = outcome(definition, inputs, gradient)
            wide = [_in_float64(each) for each in inputs]
            exact = None if problem.is_random else outcome(definition, wide, gradient.double())
    except Exception as error:
        return _raised(call, error)
    for name, theirs in plain.items():
        if name not in ours:
            return f"{name} is missing"
        found = ours[name]
        if (found.shape, found.dtype) != (theirs.shape, theirs.dtype):
            return f"{name} is {tuple(found.shape)} {found.dtype}, not {tuple(theirs.shape)} {theirs.dtype}"
    if exact is None:
        return ""
    return "" if call.values in ("nan", "inf", "-inf") else _wrong(call, inputs, ours, plain, exact)


def _in_float64(tensor: torch.Tensor) -> torch.Tensor:
    own = tensor.detach()
    return own.double().requires_grad_(tensor.requires_grad) if own.is_floating_point() else own


@functools.cache
def _load_fake_kernels() -> None:
    """Import here, once, what PyTorch imports for the first fake tensor."""
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(2, 2, requires_grad=True))
        torch.nn.functional.layer_norm((x @ x).softmax(-1) + x.rsqrt(), (2,)).sum().backward()  # type: ignore[no-untyped-call]


def fake_finding(call: Call) -> str:
    """The same of a call with fake tensors, in this process."""
    return _finding(call, problem(call))


def _fake(function: Function, inputs: Sequence[torch.Tensor]) -> str:
    """Fake tensors have no memory: the shapes of real ones come out, or an exception."""
    real = function(*own(inputs))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        try:
            found = function(*(mode.from_tensor(each.detach()) for each in inputs))
        except Exception:  # by FakeTensorMode or by the operator
            return ""
    if found.shape != real.shape or found.dtype != real.dtype:
        return f"of fake tensors {tuple(found.shape)} {found.dtype} comes out, not {tuple(real.shape)} {real.dtype}"
    return ""


def _raised(call: Call, error: Exception) -> str:
    """An error of the operator's; what cannot be asked for is no finding."""
    frames = traceback.extract_tb(error.__traceback__)
    folder = f"{os.sep}ops{os.sep}{call.operator}{os.sep}"
    in_operator = [each for each in frames if folder in each.filename and not each.filename.endswith("cases.py")]
    if not in_operator or (isinstance(error, ValueError) and str(error).startswith(f"{call.operator}: ")):
        return ""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0] if said else ''} ({in_operator[-1].name})"


def _wrong(call: Call, inputs: Sequence[torch.Tensor], ours: Results, plain: Results, exact: Results) -> str:
    floats = [each for each in inputs if each.is_floating_point()]
    floats = [each for each in floats if each.requires_grad] or floats
    eps = max(torch.finfo(each.dtype).eps for each in floats)
    size = max([1.0, *map(_mean_square, floats)])
    for name, truth in exact.items():
        mine, theirs = ours[name].double(), plain[name].double()
        if not bool(theirs.isfinite().all()) or not bool(truth.isfinite().all()):
            continue
        if not bool(mine.isfinite().all()):
            return f"{name} is not finite"
        number = math.sqrt(max(truth.numel(), 1))
        # A gradient is made of the output's, whose elements are of size 1, and of the inputs.
        around = number * (size if name.startswith("output") else size * size)
        allowed = _EPS * eps * (float(truth.norm()) + around) + _REFERENCE * float((theirs - truth).norm())
        apart = float((mine - truth).norm())
        if not apart <= allowed:
            return f"{name} is {apart:.3g} from the definition's, allowed {allowed:.3g}"
    return ""


def _mean_square(tensor: torch.Tensor) -> float:
    return float(tensor.detach().double().square().mean().sqrt()) if tensor.numel() else 0.0


def forked(run: Callable[[], Any]) -> str:
    """The finding of a child process; that it ended or hung is one."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            signal.alarm(_FORK_SECONDS)
            torch.set_num_threads(1)
            os.write(writing, str(run()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as answers:
        text = answers.read().decode()
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended == -signal.SIGALRM:
        return f"a forked process hung for {_FORK_SECONDS} s"
    return text if ended == 0 else f"a forked process ended with {_ending(ended)}"


def _ending(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"status {status}"
