"""What all tests share: training servers, helpers whose asserts explain themselves, fixed draws, Triton's interpreter.

Triton kernels run on CPU tensors in the tests of a machine without a GPU. Triton asks when a kernel is decorated, so
this must be said before anything imports one.
"""

from __future__ import annotations

import compileall
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

# Counting devices, unlike asking whether CUDA is available, leaves this process fit to be forked.
if torch.cuda.device_count() == 0:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell has what it starts in the background ignore interrupts, which some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest.register_assert_rewrite(*(f"tests.{room}" for room in ("harness", "bench", "ops", "parallel", "patches")))

from tests.harness import checkouts, seeds, traces  # noqa: E402
from tests.harness.training import Trainer  # noqa: E402

# The same draws in every run, and no check that depends on the machine's speed.
hypothesis.settings.register_profile(
    "fixed", derandomize=True, database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.load_profile("fixed")
# Hypothesis also draws numbers of our modules that are imported by then, which the order of files decides.
with contextlib.suppress(ImportError):
    from hypothesis.internal.conjecture import providers

    providers._get_local_constants = lambda: providers._local_constants


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="write golden files and traces that tests ask for anew")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--update"):
        traces.load()
    if not hasattr(config, "workerinput"):
        # Thousands of processes import these, and may not be allowed to keep what they have compiled.
        for room in ("mindspeed_lite", "patches", "lab", "tests"):
            compileall.compile_dir(checkouts.ROOT / room, quiet=2)


def pytest_unconfigure(config: pytest.Config) -> None:
    if config.getoption("--update"):
        traces.write()


# Folders whose files take longest: a file that begins last leaves the other workers idle.
LONG = ("training", "te_contract", "dryrun", "bench", "npu_contract", "cli", "tests", "ops", "patches")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long first; of a folder, all in the order that they have."""
    here = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        folder = (here.name, *item.path.relative_to(here).parts[:-1])[:2][-1]
        return LONG.index(folder) if folder in LONG else len(LONG)

    items.sort(key=place)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    seeds.seed()


@pytest.fixture(scope="session")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Trainer]]:
    """`trainer(release)`; the installed release's stays, and the last two others (half a gigabyte each)."""
    open_ones: dict[str, Trainer] = {}

    def of(release: str) -> Trainer:
        if release not in open_ones:
            others = [each for each in open_ones if each != checkouts.installed()]
            if release != checkouts.installed() and len(others) == 2:
                open_ones.pop(others[0]).close()
            target = checkouts.folder(release)
            if target is not None and not target.is_dir():
                pytest.fail(f"megatron-core {release} is not prepared: run `python -m tests.harness.checkouts`")
            scratch = tmp_path_factory.mktemp(f"megatron-{release}")
            open_ones[release] = Trainer(target, scratch, training=release in checkouts.WITH_TRAINING)
            # Some wheels name the commit they were built from.
            assert open_ones[release].version.partition("+")[0] == release
        return open_ones[release]

    yield of
    for each in open_ones.values():
        each.close()
