"""The package moe-asyncrl. Ranges stand here, exact versions in requirements/*.txt, reasons in docs/dependencies.md."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def version() -> str:
    """The one version string of the project, read without importing the package."""
    text = (ROOT / "moe_asyncrl" / "__init__.py").read_text()
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError('moe_asyncrl/__init__.py has no line __version__ = "..."')
    return match.group(1)


CORE = [
    "aiohttp>=3.9,<4",
    "msgspec>=0.18,<1",
    "numpy>=1.26,<3",
    "nvidia-ml-py>=12",
    "prometheus-client>=0.20,<1",
    "plotly>=6,<8",
    "polars>=1.20,<3",
    "psutil>=5.9",
    "pyyaml>=6,<7",
    "pyzmq>=26,<28",
    "rich>=13.7,<16",
    "safetensors>=0.4.3,<1",
    "tensorboard>=2.18,<3",
    "xxhash>=3.4,<5",
]

# One machine without a GPU. SGLang and xgrammar are missing on purpose: their wheels declare CUDA packages, so they are
# installed with --no-deps (requirements/cpu-nodeps.txt), and what they import on the CPU path is listed here instead.
SGLANG_ON_CPU = [
    "apache-tvm-ffi>=0.1.11,<0.2",
    "compressed-tensors>=0.18,<0.19",
    "dill",
    "fastapi",
    "gguf",
    "ipython",
    "jsonschema",
    "openai>=2.8,<3",
    "orjson",
    "packaging",
    "partial-json-parser",
    "pillow",
    "pybase64",
    "pydantic>=2,<3",
    "python-multipart",
    "requests",
    "sentencepiece>=0.2.1,<0.3",
    "setproctitle",
    "soundfile",
    "tqdm",
    "uvicorn>=0.51",
    "uvloop",
    "zstandard",
]
PROMPTS = ["datasets>=3,<6", "math-verify>=0.8,<0.10", "pyarrow>=17", "reasoning-gym>=0.1.19,<0.2"]
TRAINER = ["einops>=0.7,<1", "megatron-core>=0.16.1,<0.20", "torch>=2.13,<2.15", "transformers>=5.19,<6"]

setup(
    name="moe-asyncrl",
    version=version(),
    description="Asynchronous reinforcement learning for large mixture-of-experts models",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["moe_asyncrl", "moe_asyncrl.*", "megatron_patches", "megatron_patches.*"]),
    package_data={
        "moe_asyncrl": ["py.typed"],
        "megatron_patches": ["py.typed"],
        "moe_asyncrl.engine.plugin": ["onpath/*", "onpath/*/*"],
        "moe_asyncrl.telemetry.report": ["assets/*"],
    },
    zip_safe=False,
    install_requires=CORE,
    extras_require={
        "cpu": [*TRAINER, *PROMPTS, "tokenizers>=0.23,<0.24", *SGLANG_ON_CPU],
        # NVIDIA's apex is detected where it is installed and never listed: the index has another package of that name.
        "cluster": [*TRAINER, *PROMPTS, "sglang>=0.5.23,<0.6", "transformer-engine[pytorch]>=2.8,<3"],
        "dev": [
            "hypothesis>=6.100",
            "import-linter>=2.1,<3",
            "mlflow-skinny>=3,<4",
            "mypy>=1.11,<3",
            "playwright>=1.45,<2",
            "pytest>=8,<10",
            "pytest-timeout>=2.3,<3",
            "ruff>=0.6",
            "types-psutil",
            "types-pyyaml",
            "wandb>=0.18,<1",
        ],
    },
    entry_points={
        "console_scripts": ["moe-asyncrl = moe_asyncrl.cli:main"],
        # SGLang loads this in each of its processes; it does nothing in a server that our launcher did not start.
        "sglang.srt.plugins": ["moe_asyncrl = moe_asyncrl.engine.plugin:register"],
    },
)
