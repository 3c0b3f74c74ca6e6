"""What all tests share: the training servers, helpers whose asserts explain themselves, and Triton's interpreter.

Triton kernels run on CPU tensors in the tests of a machine without a GPU. Triton asks when a kernel is decorated, so
this must be said before anything imports one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

# Counting devices, unlike asking whether CUDA is available, leaves this process fit to be forked.
if torch.cuda.device_count() == 0:
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.register_assert_rewrite("tests.harness")

from tests.harness import checkouts  # noqa: E402
from tests.harness.training import Trainer  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="write the golden files in tests/golden/ anew")


@pytest.fixture(scope="session")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Trainer]]:
    """`trainer(release)`; the last one used stays, the one before it is closed (each holds half a gigabyte)."""
    open_one: dict[str, Trainer] = {}

    def of(release: str) -> Trainer:
        if release not in open_one:
            for other in list(open_one):
                open_one.pop(other).close()
            target = checkouts.folder(release)
            if target is not None and not target.is_dir():
                pytest.fail(f"megatron-core {release} is not prepared: run `python -m tests.harness.checkouts`")
            scratch = tmp_path_factory.mktemp(f"megatron-{release}")
            open_one[release] = Trainer(target, scratch, training=release in checkouts.WITH_TRAINING)
            # Some wheels name the commit they were built from.
            assert open_one[release].version.partition("+")[0] == release
        return open_one[release]

    yield of
    for each in open_one.values():
        each.close()
