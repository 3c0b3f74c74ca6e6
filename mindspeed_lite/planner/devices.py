"""Published device figures with sources, and assumed efficiencies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figures:
    """A device and its links.

    Attributes:
        kind: cpu, cuda or npu.
        flops: dense 16-bit FLOPS.
        memory: bytes. memory_bandwidth: bytes/s.
        node: devices per node.
        link: bytes/s from a device to others of its node. network: to other nodes.
        host_link: bytes/s between device and host memory, one way.
        published, assumed: names of such figures.
        source: of the published figures.
    """

    kind: str
    flops: float
    memory: float
    memory_bandwidth: float
    node: int
    link: float
    network: float
    host_link: float
    published: str
    assumed: str
    source: str


_GIB = float(1 << 30)
FIGURES = {
    "h100-sxm": Figures(
        "cuda", 989.4e12, 80 * _GIB, 3.35e12, 8, 450e9, 50e9, 64e9,
        "bf16 without sparsity 989.4 TFLOP/s, HBM3 3.35 TB/s, NVLink 900 GB/s both ways, PCIe 5.0 128 GB/s both ways; "
        "eight 400 Gb/s adapters for eight GPUs",
        "none",
        "NVIDIA H100 Tensor Core GPU datasheet; NVIDIA DGX H100 datasheet",
    ),
    "h200": Figures(
        "cuda", 989.4e12, 141 * _GIB, 4.8e12, 8, 450e9, 50e9, 64e9,
        "bf16 without sparsity 989.4 TFLOP/s, HBM3e 4.8 TB/s, NVLink 900 GB/s both ways, PCIe 5.0; eight 400 Gb/s "
        "adapters for eight GPUs",
        "none",
        "NVIDIA H200 Tensor Core GPU datasheet; NVIDIA DGX H200 datasheet",
    ),
    "a100": Figures(
        "cuda", 312e12, 80 * _GIB, 2.039e12, 8, 300e9, 25e9, 32e9,
        "bf16 312 TFLOP/s, HBM2e 2,039 GB/s, NVLink 600 GB/s both ways, PCIe 4.0 64 GB/s both ways; eight 200 Gb/s "
        "adapters for eight GPUs",
        "none",
        "NVIDIA A100 80GB SXM datasheet; NVIDIA DGX A100 datasheet",
    ),
    "ascend-910b": Figures(
        "npu", 313e12, 64 * _GIB, 1.6e12, 8, 196e9, 25e9, 32e9,
        "64 GB of HBM; 8 NPUs of an Atlas 800T A2 server with a full mesh of HCCS and a 200 Gb/s port each",
        "313 TFLOP/s of fp16 and bf16, 1.6 TB/s of HBM, 392 GB/s of HCCS both ways and PCIe 4.0 are reported for "
        "variants of the 910B, and differ between them: taken for all",
        "Huawei Atlas 800T A2 product page",
    ),
}  # fmt: skip
ALIASES = {"h100": "h100-sxm", "910b": "ascend-910b", "a100-sxm": "a100"}


@dataclass(frozen=True)
class Assumptions:
    """Assumed efficiencies relative to published figures; not measured.

    Attributes:
        product: share of FLOPS of a large GEMM.
        half_rows: rows, columns or inner size at which a GEMM reaches half of that.
        attention, attention_backward: share of FLOPS of fused attention.
        bandwidth, link: shares of memory and link bandwidth.
        latency, network_latency: seconds of a message within a node, between nodes.
        launch: size-independent seconds of an operator.
    """

    product: float = 0.75
    half_rows: float = 128.0
    attention: float = 0.5
    attention_backward: float = 0.4
    bandwidth: float = 0.8
    link: float = 0.75
    latency: float = 5e-6
    network_latency: float = 15e-6
    launch: float = 3e-6


def named(name: str) -> tuple[str, Figures]:
    """Device by name; raises KeyError."""
    full = ALIASES.get(name.lower(), name.lower())
    return full, FIGURES[full]
