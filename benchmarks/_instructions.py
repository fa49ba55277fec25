"""Which instruction sets a benchmark ran with, and how an older processor is rehearsed on a newer one.

Four libraries make our products, and each chooses its kernels by itself: ATen (elementwise), oneDNN (bf16, and float32
where torch asks it), MKL (float32) and numpy with its OpenBLAS. All are told by variables that they read when they are
loaded, so a rehearsal is a process of its own. `ONEDNN_MAX_CPU_ISA` and `ATEN_CPU_CAPABILITY` alone leave the float32
products with AVX512: on the machine of the first figures they ran at 168 GFLOP/s instead of 102.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SHOWN = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_fp16")
ARM = ("asimd", "bf16", "sve", "sve2", "sme")
REHEARSED = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "",  # what numpy would use beyond AVX2: `rehearsal`
}
"""What makes a process compute as on a machine with AVX2 and without bf16 instructions."""


def flags() -> list[str]:
    """The instruction sets of this processor that a matrix product may use, in the order of their age."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return []
    for line in info.read_text().splitlines():
        name, _, values = line.partition(":")
        if name.strip() in ("flags", "Features"):
            results = set(values.split())
            return [flag for flag in (SHOWN if name.strip() == "flags" else ARM) if flag in results]
    return []


def rehearsal() -> dict[str, str]:
    """The environment of a process that is to compute with AVX2."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    newer = [name for name in __cpu_dispatch__ if re.match("AVX512|X86_V4", name) and __cpu_features__.get(name)]
    # Inductor's cache is not keyed by what is hidden: code for wider vectors would be taken from it, and be wrong
    cache = str(Path(tempfile.gettempdir()) / "flatshift-rehearsed-inductor")
    results = {**REHEARSED, "NPY_DISABLE_CPU_FEATURES": " ".join(newer), "TORCHINDUCTOR_CACHE_DIR": cache}
    return {name: value for name, value in results.items() if value}


def in_force() -> dict[str, str]:
    """What of a rehearsal this process's environment holds."""
    return {name: os.environ[name] for name in REHEARSED if os.environ.get(name)}


def used() -> dict[str, str]:
    """What torch's own kernels and oneDNN's say that they use, under this process's environment."""
    code = (
        "import torch; torch.ones(8, 8).to_mkldnn().to_dense(); "  # any call of oneDNN
        "print('torch:', torch.backends.cpu.get_cpu_capability())"
    )
    environment = {**os.environ, "ONEDNN_VERBOSE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    torch_says = re.search(r"^torch: (.*)$", done.stdout, re.MULTILINE)
    onednn_says = re.search(r"info,cpu,isa:(.*)$", done.stdout, re.MULTILINE)
    return {
        "torch": torch_says.group(1) if torch_says else "unknown",
        "oneDNN": onednn_says.group(1) if onednn_says else "unknown",
    }
