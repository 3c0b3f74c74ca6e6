"""Device figures: data sheets, and the shares of them that trainings reach.

The shares' origins are on docs/benchmarks/published-times.md; a user's own device is a JSON file.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from pathlib import Path

from mindspeed_lite import json_file

from .training import ArgumentError


@dataclass(frozen=True)
class Figures:
    """A device, its links, and reached shares of both.

    Attributes:
        kind: cpu, cuda or npu.
        flops: dense 16-bit FLOPS.
        memory: bytes. memory_bandwidth: bytes/s.
        node: devices joined by `link`.
        link: bytes/s from a device to all others of its node; `peer` to one of them, 0: as fast.
        network: bytes/s to other nodes.
        host_link: bytes/s between device and host memory, one way.
        product: share of FLOPS of a large GEMM; half at `half_size` rows, columns or inner size.
        grouped: grouped products' speed over that of one product.
        attention, attention_backward: share of FLOPS of fused attention, heads of 128 and long sequences; half at
            `half_keys` keys.
        bandwidth, scatter: shares of memory bandwidth of elementwise work, and of gathers and scatters by index.
        links, networks, exchanges: shares of the links' bandwidth: collectives in a node, between nodes, all-to-all
            between nodes, of which `spread` is lost per doubling of the nodes.
        latency, network_latency: seconds of a message in a node, between nodes.
        launch: seconds that the host takes for an operator; `step`: for a step, besides operators.
        overlap: share of a message that computation hides; the rest of it slows the computation.
    """

    kind: str
    flops: float
    memory: float
    memory_bandwidth: float
    node: int
    link: float
    network: float
    host_link: float
    source: str
    peer: float = 0.0
    product: float = 0.65
    half_size: float = 200.0
    grouped: float = 0.9
    attention: float = 0.59
    attention_backward: float = 0.49
    half_keys: float = 512.0
    bandwidth: float = 0.8
    scatter: float = 0.75
    links: float = 0.8
    networks: float = 0.85
    exchanges: float = 1.0
    spread: float = 0.16
    latency: float = 5e-6
    network_latency: float = 15e-6
    launch: float = 50e-6
    step: float = 0.07
    overlap: float = 0.9


_GIB = float(1 << 30)
_H100 = Figures(
    "cuda", 989.4e12, 80 * _GIB, 3.35e12, 8, 450e9, 50e9, 64e9,
    "NVIDIA H100 Tensor Core GPU and DGX H100 data sheets: bf16 without sparsity, HBM3, NVLink 900 GB/s both ways, "
    "PCIe 5.0, eight 400 Gb/s adapters for eight GPUs",
)  # fmt: skip
_A100 = replace(
    _H100, flops=312e12, memory_bandwidth=2.039e12, link=300e9, network=25e9, host_link=32e9,
    source="NVIDIA A100 80GB SXM and DGX A100 data sheets: bf16, HBM2e, NVLink 600 GB/s both ways, PCIe 4.0, eight "
    "200 Gb/s adapters for eight GPUs",
)  # fmt: skip
_910B = Figures(
    "npu", 313e12, 64 * _GIB, 1.6e12, 8, 196e9, 25e9, 32e9,
    "Huawei Atlas 800T A2 product page: 64 GB of HBM, eight NPUs in a full mesh of HCCS, a 200 Gb/s port each. "
    "313 TFLOP/s, 1.6 TB/s, 56 GB/s both ways of each of seven HCCS links and PCIe 4.0 are reported, and differ "
    "between variants",
    peer=28e9, product=0.8, attention=0.43, attention_backward=0.36, scatter=0.13, links=0.58,
)  # fmt: skip
FIGURES = {
    "h100-sxm": _H100,
    "h800": replace(
        _H100, link=200e9, source="As NVIDIA H100 SXM, with NVLink of 400 GB/s both ways (arXiv 2505.09343)"
    ),
    "h200": replace(
        _H100, memory=141 * _GIB, memory_bandwidth=4.8e12, source="NVIDIA H200 and DGX H200 data sheets: HBM3e 4.8 TB/s"
    ),
    "b200": replace(
        _H100, flops=2250e12, memory=180 * _GIB, memory_bandwidth=8e12, link=900e9,
        source="NVIDIA DGX B200 data sheet: 1,440 GB and 64 TB/s of HBM3e and 36 PFLOP/s of bf16 with sparsity for "
        "eight GPUs, NVLink 1.8 TB/s both ways, 400 Gb/s adapters; shares as the H100's",
    ),
    "gb200": replace(
        _H100, flops=2500e12, memory=186 * _GIB, memory_bandwidth=8e12, node=72, link=900e9, host_link=225e9,
        source="NVIDIA GB200 NVL72 data sheet: 72 GPUs, 13.4 TB of HBM3e, 360 PFLOP/s of bf16 with sparsity, NVLink "
        "1.8 TB/s both ways, NVLink-C2C 900 GB/s both ways for two GPUs; shares as the H100's",
    ),
    "a100": _A100,
    "ascend-910b": _910B,
    "ascend-910c": replace(
        _910B, flops=376e12, node=768, peer=0.0,
        source="Serving LLMs on Huawei CloudMatrix384 (arXiv 2506.12708), of one of the two dies, which torch_npu "
        "counts as a device: 376 TFLOP/s, 64 GB, 1.6 TB/s, 196 GB/s to all 768 of a supernode, a 200 Gb/s port; "
        "shares as the 910B's",
    ),
}  # fmt: skip
ALIASES = {"h100": "h100-sxm", "910b": "ascend-910b", "a100-sxm": "a100", "910c": "ascend-910c"}


def named(name: str) -> tuple[str, Figures]:
    """Device by name, or of a JSON file; raises ArgumentError."""
    full = ALIASES.get(name.lower(), name.lower())
    if full in FIGURES:
        return full, FIGURES[full]
    if name.endswith(".json"):
        return Path(name).stem, _read(Path(name))
    known = ", ".join((*FIGURES, "here"))
    raise ArgumentError(f"--device {name}: there is no such device: choose one of {known}, or a .json file of your own")


_NUMBERS = [each.name for each in dataclasses.fields(Figures) if each.type in ("float", "int")]
_FILE = json_file.fields(
    {},
    {
        "like": json_file.one_of(*FIGURES),
        "kind": json_file.one_of("cuda", "npu"),
        "source": json_file.text("where the figures come from"),
        **{name: json_file.number("a figure", 0, 1e18) for name in _NUMBERS if name != "node"},
        "node": json_file.whole("devices of a node", 1, 100_000),
    },
)


def _read(file: Path) -> Figures:
    """Figures that differ from those of the device `like`."""
    try:
        given = json_file.read(file, _FILE)
    except json_file.JsonFileError as error:
        raise ArgumentError(f"--device {file}: {error}") from None
    return replace(FIGURES[given.pop("like", "h100-sxm")], **given)
