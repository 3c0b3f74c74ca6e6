"""`parallel.mc2` on the real wheel: every call is what the documentation asks for, and every mutation is noticed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.npu_contract.environment import Environment
from tests.npu_contract.mc2_calls import MUTATIONS

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
def said(environment: Environment) -> dict[str, Any]:
    ran = environment.run("tests.npu_contract.mc2_calls", "fake")
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_calls_keep_the_contract(said: dict[str, Any]) -> None:
    assert said["right"] == []


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_call_is_noticed(said: dict[str, Any], name: str) -> None:
    words = MUTATIONS[name][2]
    assert any(words in text for text in said[name]), said[name]


def test_the_group_has_a_name(environment: Environment) -> None:
    """Of HCCL's own, through the wheel's process group."""
    ran = environment.run(NAMED, "host")
    assert ran.returncode == 0, ran.stderr[-3000:]
    (line,) = (line for line in ran.stdout.splitlines() if line.startswith("name:"))
    assert len(line) > len("name: ''"), line
