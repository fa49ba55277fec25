"""Diagnosis of the installation for `flatshift doctor`: installed and missing parts, and the commands that install
them.

Imports no other package at module level, and torch only when asked: it must start in a broken installation.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import itertools
import platform
import re
import shutil
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatshift.finetune.compute.memory import available_memory, machine_memory
from flatshift.finetune.machine import count_cores, cpu_info, installed_version

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "flatshift"
HOME = Path(__file__).parents[3]
EXTRAS = {
    "zstd": "read .zst input",
    "remote": "read input from s3:// and https://",
    "datatrove": "read shards of documents through datatrove's maps",
    "hf": "read hub data sets and `datasets` directories",
    "harness": "run lm-eval tasks on a run directory (eval --harness)",
    "gguf": "write GGUF files for llama.cpp and Ollama (export --to gguf)",
    "quant": "keep backbones in 4 or 8 bits (train.quantization)",
    "cuda": "another kernel for the loss on CUDA, taken where it is faster",
    "track-tensorboard": "write event files of TensorBoard (tracker.kinds)",
    "track-wandb": "report to Weights & Biases (tracker.kinds)",
    "track-trackio": "report to Trackio (tracker.kinds)",
    "words": "count words of Thai, Khmer, Chinese and Japanese",
    "ray": "run cells of studies on a Ray cluster (--on ray)",
    "slurm": "run cells of studies as Slurm jobs (--on slurm)",
}
"""Uses of the extras; another extra of the metadata is described by its packages."""
_DEVELOPMENT_EXTRAS = {"all", "bench", "demo", "docs", "real", "test", "test-remote"}
Findings = list[dict[str, str]]
_MIN_DISK = 1 << 30  # bytes; a run directory with its checkpoints should fit
_CGROUP = Path("/sys/fs/cgroup")


def diagnose(*, deep: bool = False) -> dict[str, Any]:
    """Check the environment; `deep` also imports torch and lists its devices.

    Returns a JSON-ready dict. `ok` is False if `problems` is not empty: then something will not work. Each problem and
    each note is `{"what", "fix"}`, and `fix` may be empty for a note. Sizes are bytes.
    """
    problems: Findings = []
    notes: Findings = []
    versions, extras = check_versions(problems, notes)
    disk = shutil.disk_usage(Path.cwd())
    if disk.free < _MIN_DISK:
        notes.append({"what": f"only {_format_gib(disk.free)} free here", "fix": "give `--out` on a larger disk"})
    result: dict[str, Any] = {
        "ok": False,
        "problems": problems,
        "notes": notes,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "installation": str(HOME),
        "cpu": describe_cpu(),
        "memory": {"total": machine_memory(), "available": available_memory()},
        "disk": {"path": str(Path.cwd()), "free": disk.free, "total": disk.total},
        "versions": versions,
        "extras": extras,
        "shipped": _list_shipped_files(problems),
        "cache": describe_token_cache(problems),
        "devices": list_devices(problems, notes) if deep else None,
    }
    driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
    if not deep and driver and "+cpu" in (versions.get("torch", {}).get("installed") or ""):
        fix = f"pip install --force-reinstall 'torch{versions['torch']['wanted']}' without the index of CPU builds"
        notes.append({"what": "an NVIDIA driver is here, but torch is a CPU build", "fix": fix})
    known = platform.system() == "Linux"  # CPU flags are read on Linux only
    if known and not result["cpu"]["bf16"] and not (result["devices"] or {}).get("cuda"):
        note = "this CPU has no bf16 instructions: `train.precision: auto` takes fp32; bf16 by name would be many times"
        notes.append({"what": f"{note} slower", "fix": ""})
    result["ok"] = not problems
    return result


def read_requirements() -> list[Requirement]:
    """Return the requirements in this package's metadata, extras included; from pyproject.toml in a source tree that is
    not installed."""
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        source = HOME / "pyproject.toml"
        if not source.is_file():
            return []
        project = tomllib.loads(source.read_text(encoding="utf-8"))["project"]
        lines = list(project["dependencies"])
        for extra, required in project["optional-dependencies"].items():
            for line in required:
                need, _, marker = line.partition(";")
                lines.append(f'{need}; {f"({marker}) and " if marker else ""}extra == "{extra}"')
    return [Requirement(line) for line in lines]


def check_versions(problems: Findings, notes: Findings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Check the versions of the core packages, and find the installed extras.

    Returns ({package: {installed, wanted, ok}}, {extra: {installed, gives, get, packages}}).
    """
    try:
        requirements = read_requirements()
    except ImportError:
        problems.append({"what": "the package `packaging` is missing", "fix": "pip install packaging"})
        return {}, {}

    core = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    versions = {r.name: _version_row(r) for r in core}
    for name, row in versions.items():
        if not row["ok"]:
            state = "is not installed" if row["installed"] is None else f"{row['installed']} is outside {row['wanted']}"
            problems.append({"what": f"{name} {state}", "fix": f"pip install '{name}{row['wanted']}'"})
    extras: dict[str, Any] = {}
    optional = [r for r in requirements if r not in core]
    names = {name for r in optional for name in re.findall(r'extra == "([^"]+)"', str(r.marker))}
    for extra in sorted(names - _DEVELOPMENT_EXTRAS):
        own = [r for r in optional if r.marker is not None and r.marker.evaluate({"extra": extra})]
        rows = {r.name: _version_row(r) for r in own}
        gives = EXTRAS.get(extra, ", ".join(rows))
        get = f"pip install '{DISTRIBUTION}[{extra}]'"
        installed = bool(rows) and all(row["ok"] for row in rows.values())
        packages = {name: row["installed"] for name, row in rows.items()}
        extras[extra] = {"installed": installed, "gives": gives, "get": get, "packages": packages}
        for name, row in rows.items():
            if row["installed"] is not None and not row["ok"]:
                notes.append({"what": f"{name} {row['installed']} is outside {row['wanted']}", "fix": get})
    return versions, extras


def _version_row(requirement: Requirement) -> dict[str, Any]:
    installed = installed_version(requirement.name)
    # Users of torch's development builds want them, so prereleases count by their number.
    ok = installed is not None and requirement.specifier.contains(installed, prereleases=True)
    return {"installed": installed, "wanted": str(requirement.specifier), "ok": ok}


def describe_cpu() -> dict[str, Any]:
    """Return the model, usable cores (affinity and container quota), and the fast bf16 instructions of the CPU."""
    model, flags = cpu_info()
    return {
        "model": model,
        "cores": count_cores(),
        "quota": _read_cpu_quota(),
        "bf16": not {"avx512_bf16", "bf16"}.isdisjoint(flags),
        "amx": "amx_bf16" in flags,
    }


def _read_cpu_quota() -> float | None:
    """Return the cores that this container (cgroup v2) may use; None if unlimited."""
    with contextlib.suppress(OSError, ValueError):  # `max` is no number
        quota, period = (_CGROUP / "cpu.max").read_text(encoding="ascii").split()
        return float(quota) / float(period)
    return None


def _report_missing_cuda(problems: Findings, notes: Findings) -> None:
    """Report the reason why torch sees no CUDA device, with a run's error message: a problem if both a driver and a
    CUDA build are installed, a note if one of them is missing, nothing if neither is."""
    try:
        from flatshift.finetune.compute.cuda_status import diagnose_cuda, probe_cuda

        status = probe_cuda()
        reason = diagnose_cuda(status)
    except Exception as error:  # a broken installation may raise anything
        notes.append({"what": f"CUDA cannot be looked at: {error}", "fix": ""})
        return
    built = status.built_for is not None
    if reason is not None and (built or status.driver):
        (problems if built and status.driver else notes).append({"what": reason.problem, "fix": reason.fix})


def list_devices(problems: Findings, notes: Findings) -> dict[str, Any]:
    """Import torch and list its devices."""
    try:
        import torch
    except Exception as error:  # a broken shared library raises OSError, a bad build anything else
        problems.append(
            {"what": f"`import torch` fails: {error}", "fix": "reinstall torch for this Python and machine"}
        )
        return {}
    gpus: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        gpus.append({"name": properties.name, "memory": properties.total_memory, "capability": capability})
    if not gpus:
        _report_missing_cuda(problems, notes)
    backends = []
    if torch.distributed.is_available():
        checks = {"gloo": torch.distributed.is_gloo_available, "nccl": torch.distributed.is_nccl_available}
        backends = [name for name, available in checks.items() if available()]
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cuda": gpus,
        "mps": torch.backends.mps.is_available(),
        "distributed": backends,
        "quantization": try_quantization(problems, ["cpu", *(["cuda"] if gpus else [])]),
        "precision": resolve_auto_precision(problems),
    }


def resolve_auto_precision(problems: Findings) -> dict[str, str] | None:
    """Return the precision that `train.precision: auto` resolves to on the device of `train.device: auto`, and the
    reason."""
    try:
        from flatshift.finetune.compute.cuda_status import resolve_device
        from flatshift.finetune.compute.matmul_rate import MatmulShape
        from flatshift.finetune.compute.precision import resolve_precision
        from flatshift.finetune.config import Train

        choice = resolve_precision(Train(), resolve_device("auto"), MatmulShape.of(tokens=256, width=512, inner=1024))
    except Exception as error:  # a broken installation, or a device that fails
        problems.append({"what": f"train.precision: auto cannot be settled: {error}", "fix": ""})
        return None
    return {"auto": choice.precision, "why": choice.why}


def try_quantization(problems: Findings, devices: list[str]) -> dict[str, list[str]] | None:
    """Return for each kind of `train.quantization` those of `devices` on which a small layer passes a gradient; None
    without bitsandbytes."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return None
    try:
        from flatshift.finetune.models import quantize

        kinds: dict[str, list[str]] = {kind: [] for kind in quantize.KINDS}
        for kind, device in itertools.product(quantize.KINDS, devices):
            error = quantize.gradient_problem(kind, device)
            if error is None:
                kinds[kind].append(device)
            else:
                what = f"train.quantization: {kind} fails on {device}: {error}"
                problems.append({"what": what, "fix": "pip install --force-reinstall bitsandbytes"})
    except Exception as error:  # a broken installation, or a shared library that cannot be loaded
        problems.append({"what": f"bitsandbytes is here but of no use: {error}", "fix": "reinstall it"})
        return None
    return kinds


def _list_shipped_files(problems: Findings) -> dict[str, list[str]]:
    try:
        from flatshift.finetune import assets

        shipped = {"backbones": assets.list_backbones(), "samples": assets.list_samples()}
    except Exception as error:  # a broken installation may raise anything
        problems.append({"what": f"the shipped files cannot be listed: {error}", "fix": ""})
        return {"backbones": [], "samples": []}
    for kind, names in shipped.items():
        if not names:
            fix = f"pip install --force-reinstall {DISTRIBUTION}"
            problems.append({"what": f"the package holds no {kind}", "fix": fix})
    return shipped


def describe_token_cache(problems: Findings) -> dict[str, Any] | None:
    """Return the directory of cached encoded rows, its number of inputs and bytes; None if it cannot be read."""
    try:
        from flatshift.finetune.cache_directory import cache_limit, cache_root, list_cache_entries

        root = cache_root()
        entries = list_cache_entries(root)
        size = sum(entry.bytes for entry in entries)
        return {"path": str(root), "entries": len(entries), "bytes": size, "limit": cache_limit()}
    except Exception as error:  # a limit that is not a number, or a broken installation
        problems.append({"what": f"the token cache cannot be looked at: {error}", "fix": ""})
        return None


def _format_gib(size: float | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.1f} GiB"


def format_result(result: Mapping[str, Any]) -> str:
    """Format the result of `diagnose` as plain text."""
    processor, ram = result["cpu"], result["memory"]
    instructions = [name for key, name in {"bf16": "bf16 dot products", "amx": "AMX tiles"}.items() if processor[key]]
    quota = f", limited to {processor['quota']:.1f}" if processor["quota"] is not None else ""
    lines = [
        f"python     {result['python']}  {result['executable']}",
        f"platform   {result['platform']}",
        f"cpu        {processor['model']}, {processor['cores']} cores{quota}, "
        f"{' and '.join(instructions) or 'no bf16 instructions'}",
        f"memory     {_format_gib(ram['total'])}, {_format_gib(ram['available'])} available",
        f"disk       {_format_gib(result['disk']['free'])} free in {result['disk']['path']}",
        f"installed  {result['installation']}",
        f"shipped    {', '.join(result['shipped']['backbones'])}; {len(result['shipped']['samples'])} samples",
    ]
    if (cache := result["cache"]) is not None:
        size = f"{_format_gib(cache['bytes'])} of at most {_format_gib(cache['limit'])}"
        lines.append(f"tokens     {cache['entries']} inputs kept, {size}, in {cache['path']}")
    lines.append("")
    width = max((len(name) for name in result["versions"]), default=0)
    for name, row in result["versions"].items():
        mark = "ok " if row["ok"] else "NO "
        lines.append(f"{mark} {name.ljust(width)}  {row['installed'] or 'missing'}  (wants {row['wanted'] or 'any'})")
    lines.append("")
    for extra, row in result["extras"].items():
        state = ", ".join(f"{name} {installed}" for name, installed in row["packages"].items())
        state = state if row["installed"] else f"missing: {row['get']}"
        lines.append(f"extra {extra} ({row['gives']}): {state}")
    lines.append("")
    devices = result["devices"]
    if devices is None:
        lines.append("devices: not looked at; `flatshift doctor --deep` imports torch and lists them")
    elif devices:
        gpus = [f"{gpu['name']} ({_format_gib(gpu['memory'])}, sm {gpu['capability']})" for gpu in devices["cuda"]]
        names = [f"cpu ({devices['threads']} threads)", *gpus, *(["mps"] if devices["mps"] else [])]
        lines.append(f"devices: {', '.join(names)}; torch {devices['torch']}")
        lines.append(f"process groups: {', '.join(devices['distributed']) or 'none'}")
        if (chosen := devices["precision"]) is not None:
            lines.append(f"train.precision: auto takes {chosen['auto']}: {chosen['why']}")
        if (kinds := devices["quantization"]) is not None:
            served = [f"{kind} on {' and '.join(places)}" for kind, places in kinds.items() if places]
            lines.append(
                f"quantised backbones: {', '.join(served) or 'none'}; mesh.dp and mesh.cp shard nf4 and nf4-double"
            )
    lines.append("")
    for title, group in (("problem", result["problems"]), ("note", result["notes"])):
        for entry in group:
            lines += [f"{title}: {entry['what']}", *([f"         fix: {entry['fix']}"] if entry["fix"] else [])]
    lines.append("all well" if result["ok"] else f"{len(result['problems'])} problem(s)")
    return "\n".join(lines)
