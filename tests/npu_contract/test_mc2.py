"""Calls of `parallel.mc2` and `parallel.expert.alltoall_mc2` on the real wheel are what the documentation asks for."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest

from tests.npu_contract import expert_mc2_calls, mc2_calls
from tests.npu_contract.environment import Environment

MODULES = (mc2_calls, expert_mc2_calls)
BROKEN = [(module, name) for module in MODULES for name in module.MUTATIONS]

NAMED = """
import os
import torch
import torch.distributed as dist
from mindspeed_lite.parallel.mc2 import communicator

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
torch.npu.set_device(0)
dist.init_process_group("hccl", rank=0, world_size=1, store=dist.HashStore())
print("name:", repr(communicator(dist.group.WORLD, torch.device("npu"))), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def said(environment: Environment) -> dict[str, dict[str, Any]]:
    """What each module's process printed."""
    found = {}
    for module in MODULES:
        ran = environment.run(module.__name__, "fake")
        assert ran.returncode == 0, ran.stderr[-3000:]
        found[module.__name__] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("module", MODULES)
def test_calls_keep_the_contract(said: dict[str, dict[str, Any]], module: ModuleType) -> None:
    assert said[module.__name__]["right"] == []


@pytest.mark.parametrize(("module", "name"), BROKEN)
def test_a_broken_call_is_noticed(said: dict[str, dict[str, Any]], module: ModuleType, name: str) -> None:
    words, found = module.MUTATIONS[name][2], said[module.__name__][name]
    assert any(words in text for text in found), found


def test_no_operator_exchanges_and_multiplies_batches(said: dict[str, dict[str, Any]]) -> None:
    """Why `migrate` has no place for --moe-bmm-mc2."""
    names = said[expert_mc2_calls.__name__]["exchanges"]
    assert {expert_mc2_calls.ARRIVE, expert_mc2_calls.LEAVE} <= {*names}
    assert not any("bmm" in name or "batch" in name for name in names)


def test_the_group_has_a_name(environment: Environment) -> None:
    """Of HCCL's own, through the wheel's process group."""
    ran = environment.run(NAMED, "host")
    assert ran.returncode == 0, ran.stderr[-3000:]
    (line,) = (line for line in ran.stdout.splitlines() if line.startswith("name:"))
    assert len(line) > len("name: ''"), line
