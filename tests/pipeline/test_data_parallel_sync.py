"""When gradients are reduced and parameters gathered, for orders of Megatron's and others."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from mindspeed_lite.pipeline import orders
from mindspeed_lite.pipeline.data_parallel_sync import DataParallelSync, sync_plan
from mindspeed_lite.pipeline.orders import PipelineShape
from mindspeed_lite.pipeline.steps import Kind, Step, backward, forward, input_grad, weight_grad


class Recorder:
    """Functions as Megatron's configuration has them, and what they were called for."""

    def __init__(self, chunks, functions=("no_sync", "reduce", "gather")):
        self.log, self.is_held_back = [], False
        self.models = [SimpleNamespace(parameters=lambda chunk=chunk: chunk) for chunk in range(chunks)]
        single = {name: self._function(name) for name in ("reduce", "gather")}
        given = {name: [each] * chunks if chunks > 1 else each for name, each in single.items() if name in functions}
        self.config = SimpleNamespace(
            no_sync_func=self.no_sync if "no_sync" in functions else None,
            grad_sync_func=given.get("reduce"),
            param_sync_func=given.get("gather"),
        )

    def _function(self, name):
        return lambda chunk: self.log.append((name, chunk, self.is_held_back))

    @contextlib.contextmanager
    def no_sync(self):
        self.is_held_back = True
        yield
        self.is_held_back = False

    def run(self, steps, rank, is_first_stage=False):
        chunks = len(self.models)
        sync = DataParallelSync(self.config, self.models, sync_plan(steps, chunks, rank), is_first_stage)
        sync.begin()
        for step in steps:
            sync.before(step)
            self.log.append((step, self.is_held_back))
            sync.after(step)
        sync.end()
        return self.log


def steps_of(name, rank, *shape):
    return list(orders.build(name, PipelineShape(*shape)).steps(rank))


def places(log, kind):
    """(what was called, its chunk, the number of steps of `kind` before it)."""
    found, count = [], 0
    for entry in log:
        if isinstance(entry[0], Step):
            count += entry[0].kind is kind
        else:
            assert entry[2] is False or entry[0] == "gather"
            found.append((entry[0], entry[1], count))
    return found


def test_gradients_start_their_own_reduction_in_the_last_backward_alone():
    steps = steps_of("interleaved", 0, 2, 4, 2)
    log = Recorder(2, ("no_sync",)).run(steps, 0)
    open_in = [step for step, is_held_back in log if not is_held_back]
    assert open_in == [backward(1, 3), backward(0, 3)]


def test_with_weight_gradients_apart_also_in_the_last_of_these():
    log = Recorder(1, ("no_sync",)).run(steps_of("zb-h1", 1, 2, 4), 1)
    assert [step for step, is_held_back in log if not is_held_back] == [input_grad(0, 3), weight_grad(0, 3)]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_of_one_chunk_reduce_at_the_end_and_the_first_as_they_come(rank):
    steps = steps_of("1f1b", rank, 2, 4)
    recorder = Recorder(1, ("no_sync", "reduce"))
    log = recorder.run(steps, rank, is_first_stage=rank == 0)
    if rank == 0:
        assert [each for each in log if each[-1] is False] == [(backward(0, 3), False)]
    else:
        assert log[-1] == ("reduce", 0, False) and all(held_back for _, held_back in log[:-1])
    assert recorder.is_held_back is False


def test_ranks_of_several_chunks_reduce_together_as_megatron_does():
    """Megatron: after backward k, if the k - rank-th one was the last of a chunk; the rest at the end."""
    for rank in (0, 1):
        log = Recorder(2, ("no_sync", "reduce")).run(steps_of("interleaved", rank, 2, 4, 2), rank)
        # Of 8 backwards number 5 and 7 (from 0) are the last of chunk 1 and of chunk 0.
        assert places(log, Kind.BACKWARD) == [("reduce", 1, 6 + rank), ("reduce", 0, 8)]


def test_parameters_are_gathered_one_chunk_ahead_as_megatron_does():
    """Megatron: two chunks at first; before forward k chunk c + 1, if the k + rank-th is the first of chunk c."""
    for rank in (0, 1):
        log = Recorder(3, ("gather",)).run(steps_of("interleaved", rank, 2, 4, 3), rank)
        # Forward 2 is the first of chunk 1.
        assert places(log, Kind.FORWARD) == [("gather", 0, 0), ("gather", 1, 0), ("gather", 2, 2 - rank)]


def test_without_functions_nothing_is_called():
    steps = [forward(0, 0), backward(0, 0)]
    assert Recorder(1, ()).run(steps, 0) == [(step, False) for step in steps]
