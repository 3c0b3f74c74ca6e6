"""Which CPUs a rank gets, on machines described in a folder like sysfs."""

import math
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_lite.platform import DeviceError, binding


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def machine(
    root: Path, nodes: int, each: int, smt: int = 1, neighbours: bool = False, gpus: tuple[int, ...] = ()
) -> None:
    """`nodes` of `each` physical cores; siblings are numbered together or in blocks. gpus: their nodes, -1 without."""
    total = nodes * each
    cpus = {core: [core * smt + i if neighbours else core + i * total for i in range(smt)] for core in range(total)}
    for siblings in cpus.values():
        for cpu in siblings:
            text = ",".join(map(str, siblings))
            write(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", text)
    lists = [
        sorted(cpu for core in range(node * each, (node + 1) * each) for cpu in cpus[core]) for node in range(nodes)
    ]
    for node, numbers in enumerate(lists):
        write(root / f"sys/devices/system/node/node{node}/cpulist", binding.format_cpus(set(numbers)))
    for number, node in enumerate(gpus):
        address = f"0000:{number + 16:02X}:00.0"
        write(root / f"proc/driver/nvidia/gpus/{address}/information", f"GPU UUID: GPU-{number:04x}-abcd")
        near = sorted(cpu for numbers in lists for cpu in numbers) if node < 0 else lists[node]
        write(root / f"sys/bus/pci/devices/{address.lower()}/local_cpulist", binding.format_cpus(set(near)))


def placed(root: Path, ranks: int, allowed: str = "", kind: str = "cuda", **environment: str) -> tuple[list[str], str]:
    folders = (root / "sys/devices/system/cpu").glob("cpu[0-9]*")
    everything = frozenset(int(folder.name[3:]) for folder in folders)
    cpus = frozenset(binding.parse_cpus(allowed)) & everything if allowed else everything
    devices = None if kind == "cpu" else binding.device_cpus(root, kind, environment)
    result = binding.place(binding.cores(root, cpus), ranks, devices, binding.quota(root))
    return [binding.format_cpus(each) for each in result.cpus], result.note


UNKNOWN = "which CPUs are near the devices is not known"
TWO, NPS4 = (0, 0, 0, 0, 1, 1, 1, 1), (3, 3, 1, 1, 7, 7, 5, 5)


@pytest.mark.parametrize(
    ("built", "asked", "cpus", "note"),
    [
        pytest.param((2, 16, 1, False, TWO), (8,), "0-3 4-7 8-11 12-15 16-19 20-23 24-27 28-31", "", id="two sockets"),
        pytest.param((2, 4, 2, False, (0, 1)), (2,), "0-3,8-11 4-7,12-15", "", id="siblings in blocks"),
        pytest.param((2, 4, 2, True, (0, 1)), (2,), "0-7 8-15", "", id="siblings as neighbours"),
        pytest.param((2, 4, 2, False, TWO), (8,), "0,8 1,9 2,10 3,11 4,12 5,13 6,14 7,15", "", id="a core each"),
        pytest.param((8, 4, 1, False, NPS4), (8,), "12-13 14-15 4-5 6-7 28-29 30-31 20-21 22-23", "", id="NPS4"),
        pytest.param(
            (8, 2, 2, False, (3, 1, 7, 5)), (4,), "6-7,22-23 2-3,18-19 14-15,30-31 10-11,26-27", "", id="NPS4, 4"
        ),
        pytest.param((2, 8, 1, False, (0, 0, 0, 1)), (4,), "0-1 2-4 5-7 8-15", "", id="three and one"),
        pytest.param((1, 7, 1, False, (0, 0)), (2,), "0-2 3-6", "", id="an odd number of cores"),
        pytest.param((2, 4, 1, False, (-1, -1)), (2,), "0-3 4-7", "", id="devices without a node"),
        pytest.param((2, 8, 1, False, TWO), (4,), "0-1 2-3 4-5 6-7", "", id="fewer ranks than devices"),
        pytest.param((1, 2, 2, False, (0, 0, 0, 0)), (4,), "0 2 1 3", "", id="hyperthreads shared out"),
        pytest.param(
            (1, 2, 1, False, (0, 0, 0)), (3,), "0-1 0-1 0-1", "3 ranks share CPUs 0-1", id="more ranks than CPUs"
        ),
        pytest.param((2, 8, 1, False, TWO), (8, "0-3,8-15"), "0 1 2 3 8-9 10-11 12-13 14-15", "", id="a CPU set"),
        pytest.param(
            (2, 4, 1, False, (0, 1)),
            (2, "4-7"),
            "4-5 6-7",
            "no allowed CPU near the devices of ranks 0",
            id="no near CPU",
        ),
        pytest.param(
            (3, 2, 1, False, (0, 1)),
            (2, "2-5"),
            "4-5 2-3",
            "no allowed CPU near the devices of ranks 0",
            id="a free node",
        ),
        pytest.param((2, 2, 2, False, (0, 1)), (2, "0-3,6"), "0-1 2-3,6", "", id="a CPU set without siblings"),
        pytest.param((2, 4, 1, False, ()), (2,), "0-3 4-7", UNKNOWN, id="no driver"),
        pytest.param((2, 4, 1, False, (0,)), (2,), "0-3 4-7", UNKNOWN, id="fewer devices than ranks"),
        pytest.param((2, 4, 1, False, (0, 1)), (2, "", "cpu"), "0-3 4-7", "", id="no device asked for"),
        pytest.param((1, 4, 1, False, ()), (1, "", "cpu"), "0-3", "", id="one rank"),
        pytest.param((2, 6, 1, False, ()), (5, "", "cpu"), "0-1 2-3 4-6 7-8 9-11", "", id="five ranks"),
    ],
)
def test_each_rank_gets_its_share_of_near_cores(tmp_path, built, asked, cpus, note):
    machine(tmp_path, *built)
    assert placed(tmp_path, *asked) == (cpus.split(), note)


@pytest.mark.parametrize(
    ("visible", "cpus"),
    [("1", "4-7"), ("1,0", "4-7 0-3"), ("GPU-0001", "4-7"), ("GPU-0001-abcd,0", "4-7 0-3"), ("0,0", "0-1 2-3")],
)
def test_the_visible_devices_are_followed(tmp_path, visible, cpus):
    machine(tmp_path, 2, 4, gpus=(0, 1))
    assert placed(tmp_path, len(cpus.split()), CUDA_VISIBLE_DEVICES=visible) == (cpus.split(), "")
    assert placed(tmp_path, 1, CUDA_VISIBLE_DEVICES="7") == (["0-7"], UNKNOWN)


TOPOLOGY = """
           NPU0       NPU1       CPU Affinity
NPU0       X          HCCS       4-7
NPU1       HCCS       X          0-1,3

Legend:
  NPU0 is described above
"""


def test_npu_smi_says_which_cpus_are_near(tmp_path, monkeypatch):
    machine(tmp_path, 2, 4)
    tool = tmp_path / "bin" / "npu-smi"
    write(
        tool, f"#!{sys.executable}\nimport sys\nassert sys.argv[1:] == ['info', '-t', 'topo']\nprint('''{TOPOLOGY}''')"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent))
    assert placed(tmp_path, 2, kind="npu") == (["4-7", "0-1,3"], "")
    assert placed(tmp_path, 1, kind="npu", ASCEND_RT_VISIBLE_DEVICES="1") == (["0-1,3"], "")
    tool.write_text(f"#!{sys.executable}\nraise SystemExit(1)\n")
    assert placed(tmp_path, 2, kind="npu") == (["0-3", "4-7"], UNKNOWN)


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, math.inf),
        ({"cpu.max": "max 100000"}, math.inf),
        ({"cpu.max": "400000 100000"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000"}, 1.5),
        # Of a job's own group, as Slurm and systemd make them, or of one around it.
        ({"/": "0::/job/step", "job/step/cpu.max": "max 100000", "job/cpu.max": "400000 100000"}, 4),
        ({"/": "0::/docker/7f", "cpu.max": "150000 100000"}, 1.5),
        (
            {
                "/": "9:pids:/x\n4:cpu,cpuacct:/job",
                "cpu/job/cpu.cfs_quota_us": "400000",
                "cpu/job/cpu.cfs_period_us": "100000",
            },
            4,
        ),
    ],
)
def test_a_quota_limits_each_rank_to_its_share(tmp_path, files, limit):
    machine(tmp_path, 2, 4)
    for name, text in files.items():
        write(tmp_path / ("proc/self/cgroup" if name == "/" else f"sys/fs/cgroup/{name}"), text)
    assert binding.quota(tmp_path) == limit
    shares = {math.inf: "0-3 4-7", 4: "0-1 4-5", 1.5: "0 4"}
    assert placed(tmp_path, 2, kind="cpu")[0] == shares[limit].split()
    machine(tmp_path, 2, 4, smt=2)
    shares[math.inf] = "0-3,8-11 4-7,12-15"
    assert placed(tmp_path, 2, kind="cpu")[0] == shares[limit].split(), "a thread of each core counts"


@pytest.fixture
def unbound(monkeypatch) -> Iterator[None]:
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CPU_AFFINITY_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(binding.BIND_VARIABLE, "auto")
    monkeypatch.setattr(os, "getppid", os.getpid)
    before = os.sched_getaffinity(0)
    yield
    binding.unbind()
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
def test_threads_are_bound_bound_again_and_released(monkeypatch, unbound):
    first, *_, last = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(len(os.sched_getaffinity(0))))
    monkeypatch.setattr(binding, "SECONDS_BETWEEN_CHECKS", 0.01)
    masks = []
    go, ready = threading.Event(), threading.Event()

    def worker() -> None:
        ready.set()
        go.wait()
        masks.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=worker)
    thread.start()
    ready.wait()
    assert (
        binding.bind("cpu").startswith(f"bound rank 0 to CPUs {first}; rank 1 to CPUs ") and binding.bind("cpu") == ""
    )
    go.set()
    thread.join()
    assert masks == [{first}] and os.sched_getaffinity(0) == {first}
    os.sched_setaffinity(0, {last})  # as a library does
    deadline = threading.Event()
    for _ in range(500):
        if os.sched_getaffinity(0) == {first}:
            break
        deadline.wait(0.01)
    assert os.sched_getaffinity(0) == {first}


def test_what_has_been_bound_is_left(monkeypatch, unbound):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0} if process == 0 else {0, 1})
    assert binding.bind("cpu") == "not bound: the launcher has bound it to CPUs 0"
    monkeypatch.undo()
    monkeypatch.setenv(binding.BIND_VARIABLE, "auto")
    monkeypatch.setenv("CPU_AFFINITY_CONF", "1,npu0:0-1")
    assert binding.bind("npu") == "not bound: CPU_AFFINITY_CONF is set, so torch_npu binds"
    monkeypatch.setenv(binding.BIND_VARIABLE, "yes")
    with pytest.raises(DeviceError, match="MINDSPEED_LITE_BIND=yes is not known; choose none or auto"):
        binding.bind("cpu")
