"""linear_log_prob: options and shards against float64, and what is in memory. test_discrimination rejects mutations."""

from __future__ import annotations

import tempfile
from itertools import product

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mindspeed_lite.ops.cross_entropy import reference
from mindspeed_lite.ops.linear_cross_entropy import chunks
from mindspeed_lite.ops.linear_log_prob import linear_log_prob
from tests.harness.compare import Sizes, assert_not_worse, forward_backward
from tests.harness.processes import forked, on_ranks

ROWS, HIDDEN, WIDTH = 30, 16, 300
NAMES = ("output", "dhidden", "dweight")


def make(rows=ROWS, width=WIDTH, dtype=torch.bfloat16, **where):
    torch.manual_seed(0)
    target = torch.randint(0, width, (rows,), **where)
    target[::4] = -100
    hidden, weight = (torch.randn(size, HIDDEN, **where) for size in (rows, width))
    return hidden.to(dtype), weight.to(dtype), target, torch.rand(2, rows, **where) + 0.5


def definition(hidden, weight, target, temperature=1.0, soft_cap=None):
    logits = hidden @ weight.t()
    if soft_cap is not None:
        logits = (logits / soft_cap).tanh() * soft_cap
    logits = logits / temperature
    log_p = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return torch.stack([log_p.gather(-1, target.clamp(min=0)[:, None])[:, 0], entropy]) * (target >= 0)


def ours(hidden, weight, target, **options):
    return torch.stack(linear_log_prob(hidden, weight, target, entropy=True, **options))


@pytest.fixture(params=[0, 128, WIDTH], ids=["none kept", "some kept", "all kept"])
def narrow(request, monkeypatch):
    """Chunks of 64 columns."""
    monkeypatch.setattr(chunks, "_NARROWEST", 64)
    monkeypatch.setattr(chunks, "CHUNK", 1)
    monkeypatch.setattr(chunks, "KEPT_BYTES", ROWS * request.param * 4)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_options_have_no_larger_error_than_the_logits_path(dtype):
    hidden, weight, target, dout = make(dtype=dtype)
    for temperature, soft_cap in product((1.0, 0.6), (None, 4.0)):
        options = {"temperature": temperature, "soft_cap": soft_cap}
        exact, theirs = (
            forward_backward(lambda h, w: definition(h, w, target, **options), [hidden, weight], dout, wide)  # noqa: B023
            for wide in (torch.float64, None)
        )
        got = forward_backward(lambda h, w: ours(h, w, target, **options), [hidden, weight], dout)  # noqa: B023
        assert_not_worse(got, theirs, exact, 4 * torch.finfo(dtype).eps, NAMES)
        assert not got[0][:, ::4].any() and not got[1][::4].any(), "ignored tokens"


@pytest.mark.usefixtures("narrow")
def test_either_output_alone_and_a_second_backward_pass_have_the_same_gradients():
    hidden, weight, target, dout = make(dtype=torch.float32)
    for each in (0, 1):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        output = linear_log_prob(*leaves, target, entropy=True)[each]
        exact = forward_backward(
            lambda h, w: definition(h, w, target)[each],  # noqa: B023
            [hidden, weight],
            dout[each],
            torch.float64,
        )
        for _ in range(2):
            found = torch.autograd.grad(output, leaves, dout[each], retain_graph=True)
            for got, truth in zip(found, exact[1:], strict=True):
                torch.testing.assert_close(got, truth.float(), rtol=1e-4, atol=1e-4)


def test_logits_of_minus_infinity_are_no_nan():
    weight = torch.tensor([[1.0], [-torch.inf], [2.0]], requires_grad=True)
    log_prob, entropy = linear_log_prob(torch.ones(1, 1), weight, torch.tensor([2]), entropy=True)
    exact = torch.tensor([1.0, 2.0]).log_softmax(0)
    torch.testing.assert_close(log_prob, exact[1:])
    torch.testing.assert_close(entropy, -(exact.exp() * exact).sum()[None])
    (gradient,) = torch.autograd.grad(log_prob.sum() + entropy.sum(), weight)
    assert gradient.isfinite().all()


def test_128k_tokens_of_150k_entries_take_the_bytes_of_one_chunk(monkeypatch):
    monkeypatch.setattr(reference, "_BLOCK", 1 << 25)  # for fewer calls
    tokens, vocabulary = 128 * 1024, 150_000
    hidden, weight, target, dout = make(tokens, vocabulary, device="meta")
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    with Sizes() as sizes:
        torch.stack(linear_log_prob(*leaves, target, entropy=True)).backward(dout)
    chunk = tokens * chunks._NARROWEST * hidden.itemsize
    assert sizes.largest == chunk == 128 << 20
    assert tokens * vocabulary * hidden.itemsize > 290 * chunk, "the logits"


def test_logits_that_fit_are_multiplied_once():
    hidden, weight, target, dout = make(4096, 32768, device="meta")
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    with FlopCounterMode(display=False) as counter, Sizes() as sizes:
        torch.stack(linear_log_prob(*leaves, target, entropy=True)).backward(dout)
    assert counter.get_total_flops() == 3 * 2 * 4096 * 32768 * HIDDEN, "one product forward, two backward"
    assert sizes.largest == 4096 * 32768 * hidden.itemsize == chunks.KEPT_BYTES


@pytest.mark.parametrize("option", [{"temperature": 0.0}, {"temperature": float("nan")}, {"soft_cap": -1.0}])
def test_what_does_not_fit_is_one_clear_error(option):
    hidden, weight, target, _ = make()
    with pytest.raises(ValueError, match=f"{next(iter(option))} is .* must be positive"):
        linear_log_prob(hidden, weight, target, **option)
    with pytest.raises(ValueError, match=r"linear_log_prob: want hidden \[..., H\]"):
        linear_log_prob(hidden, weight, target[1:])


def shard(rank, store, run):
    """`run` by two ranks on halves of the vocabulary, against the whole in float64."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    hidden, weight, target, dout = make(dtype=torch.float32)
    half = slice(rank * WIDTH // 2, (rank + 1) * WIDTH // 2)
    exact = forward_backward(lambda h, w: definition(h, w, target, 0.7), [hidden, weight], dout, torch.float64)
    leaves = [hidden.requires_grad_(), weight[half].clone().requires_grad_()]
    output = torch.stack(run(*leaves, target, dist.group.WORLD))
    output.backward(dout)
    dist.all_reduce(leaves[0].grad)
    for name, got, truth in zip(NAMES, (output, *(each.grad for each in leaves)), exact, strict=True):
        truth = truth[half] if name == "dweight" else truth
        torch.testing.assert_close(got, truth.float(), rtol=1e-4, atol=1e-4, msg=lambda text: f"{name}: {text}")  # noqa: B023


@forked()
def test_two_ranks_with_half_of_the_vocabulary_have_the_values_of_the_whole():
    from mindspeed_lite.parallel.cross_entropy import vocab_parallel_linear_log_prob

    store = tempfile.mkdtemp() + "/store"

    def run(hidden, weight, target, group):
        return vocab_parallel_linear_log_prob(hidden, weight, target, group, temperature=0.7, entropy=True)

    on_ranks(2, lambda rank: shard(rank, store, run))
