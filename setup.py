"""Packaging. `patches/` stands at the top of the repository and is imported as `mindspeed_lite.patches`."""

import re
import runpy
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

BENCH = ["matplotlib>=3.7", "jinja2>=3"]
TEST = [
    "pytest>=8",
    "pytest-xdist>=3.6",
    "hypothesis==6.170.17",  # another release draws other examples
    "ruff>=0.6",
    "mypy>=1.11",
    "numpy",
    "setuptools>=68",
    "wheel",
]
# What solves for the choice of --adaptive-memory.
SOLVER = ["scipy>=1.11"]
# What operators are compared with: Triton kernels, and no requirements but torch and triton.
COMPARE = ["liger-kernel==0.8.5; sys_platform == 'linux'"]
# What Megatron's training script imports beyond megatron-core's own requirements.
TRAINING = ["einops", "numpy", "psutil", "pybind11", "pydantic", "pyyaml", "regex", "six"]


def long_description() -> str:
    """README for an index page, which has no file of the repository: links to them are their texts."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"^!\[[^\]]*\]\((?![a-z]+:)[^)]*\)\n+", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\((?![a-z]+:|#)[^)]*\)", r"\1", text)
    return re.sub(r"<!--.*?-->\n", "", text)


setup(
    name="mindspeed-lite",
    version=runpy.run_path(str(HERE / "mindspeed_lite" / "_version.py"))["__version__"],
    description="A non-invasive accelerator for Megatron-LM on Ascend NPU, CUDA and CPU",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[
        *find_packages(include=["mindspeed_lite", "mindspeed_lite.*"]),
        "mindspeed_lite.patches",
        "mindspeed_lite.patches._shared",
    ],
    package_dir={"mindspeed_lite.patches": "patches"},
    package_data={
        "mindspeed_lite.patches": ["fingerprints.json"],
        "mindspeed_lite": ["py.typed"],
        "mindspeed_lite.migration": ["flags.tsv"],
        "mindspeed_lite.ops": ["*/*.cpp", "*/*.h"],
        "mindspeed_lite.platform": ["fingerprints.json"],
        "mindspeed_lite.bench": ["*.j2", "inject/*.py"],
    },
    install_requires=["torch>=2.6", "megatron-core>=0.12.1", "numpy", "wrapt>=1.16", "packaging>=23", "rich>=13"],
    extras_require={
        "npu": ["torch-npu"],
        "adaptive": SOLVER,
        "bench": BENCH,
        "docs": ["mkdocs-material>=9.5", "mkdocstrings-python>=1.10"],
        "compare": COMPARE,
        "training": TRAINING,
        "test": [*TEST, *SOLVER, *TRAINING, *BENCH, *COMPARE],
    },
    entry_points={"console_scripts": ["mindspeed-lite = mindspeed_lite.cli:main"]},
    keywords="megatron-lm megatron-core training ascend npu cuda fused-kernels mixture-of-experts",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
