"""Two random streams, as a GPU run has them: what the device draws does not move the host's, and the reverse."""

from __future__ import annotations

import logging

import torch

from mindspeed_lite import platform
from tests.harness.processes import forked


def host():
    return torch.get_rng_state()


def device():
    return torch.cuda.get_rng_state()


@forked()
def test_seeds_and_states_of_the_two_streams_are_independent():
    platform.activate()
    torch.manual_seed(1)
    torch.cuda.manual_seed(2)
    at_host, at_device = host(), device()
    torch.rand(100, device="cuda")
    torch.nn.functional.dropout(torch.ones(100), 0.5)
    assert torch.equal(host(), at_host) and not torch.equal(device(), at_device)
    torch.cuda.manual_seed(2)
    assert torch.equal(device(), at_device) and torch.equal(host(), at_host)
    moved = device()
    torch.set_rng_state(torch.Generator().manual_seed(9).get_state())
    assert torch.equal(device(), moved) and not torch.equal(host(), at_host)
    torch.set_rng_state(at_host)
    assert torch.equal(torch.random.get_rng_state(), at_host), "one stream under both of its names"
    torch.cuda.set_rng_state(at_device)
    assert torch.equal(torch.cuda.random.get_rng_state(), at_device)
    assert torch.equal(torch.cuda.get_rng_state_all()[0], at_device)
    assert torch.equal(torch.cuda.default_generators[0].get_state(), at_device)


@forked()
def test_a_loader_draws_its_seed_and_order_from_the_host():
    platform.activate()
    torch.manual_seed(1)
    at_host, at_device = host(), device()
    iter(torch.utils.data.DataLoader(torch.arange(8)))
    assert torch.equal(device(), at_device) and not torch.equal(host(), at_host)

    list(torch.utils.data.DataLoader(torch.arange(8), shuffle=True))
    assert torch.equal(device(), at_device)


@forked()
def test_fork_rng_gives_the_host_its_state_back():
    platform.activate()
    at_host = host()
    with torch.random.fork_rng():
        torch.manual_seed(5)
    assert torch.equal(host(), at_host)


@forked("megatron")
def test_megatrons_tracker_forks_without_a_warning_unless_the_host_draws():
    platform.activate()
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    heard, tracker = [], CudaRNGStatesTracker()
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(lambda record: heard.append(record.msg))
    torch.manual_seed(1)
    at_device = device()
    tracker.add("model-parallel-rng", 1234)
    assert torch.equal(device(), at_device)
    drawn = []
    for _ in range(2):
        with tracker.fork():
            drawn.append(torch.nn.functional.dropout(torch.ones(64), 0.5))
    assert not torch.equal(*drawn), "the tracked stream goes on from fork to fork"
    assert torch.equal(device(), at_device), "and leaves the default one where it was"
    assert heard == []
    with tracker.fork():
        torch.set_rng_state(torch.Generator().manual_seed(9).get_state())
    assert ["CPU RNG state changed" in text for text in heard] == [True]
