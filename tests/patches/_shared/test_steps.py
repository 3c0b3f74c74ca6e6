"""Where Megatron's loop is: the step that runs, and whether it is the last."""

import pytest

from mindspeed_lite.engine import Context, Settings
from mindspeed_lite.patches._shared.steps import current_step, is_last_step


@pytest.mark.parametrize(
    ("args", "step", "last"),
    [
        ({}, None, False),
        ({"curr_iteration": 0, "train_iters": 2}, 1, False),
        ({"curr_iteration": 1, "train_iters": 2}, 2, True),
        ({"curr_iteration": 3, "train_iters": 9, "exit_interval": 2}, 4, True),
        ({"curr_iteration": 4, "train_iters": 9, "exit_interval": 2}, 5, False),
    ],
)
def test_the_step_and_whether_it_is_the_last(args, step, last):
    context = Context(Settings({}), "cpu", {}, args)
    assert current_step(context) == step and is_last_step(context, step) == last
