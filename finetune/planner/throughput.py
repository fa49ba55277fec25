"""Seconds of an optimizer step, from a roofline model with few constants: products, element-wise traffic, collectives
and the pipeline bubble.

The form is that of Megatron-LM's own accounting (2104.04473 §5.1, 2205.05198): a block of width h over b sequences of s
tokens multiplies 24·b·s·h² + 4·b·s²·h FLOPs forward. Full training takes three times that, with frozen weights twice,
and a recomputed forward pass once more. The constants were fitted on the ten rows of 2104.04473, Table 1 (A100, full
training, fused kernels); their errors elsewhere are in docs/does-it-fit.md.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RooflineConstants:
    """Fractions of a device's data-sheet rates that are reached."""

    products: float = 0.641  # fraction of the bf16 peak that matrix products reach
    elements: float = 0.97
    """Bytes that element-wise kernels move at the data sheet's bandwidth ÷ the minimum they must move."""
    eager: float = 11.0
    """Element-wise traffic of transformers' blocks without torch.compile ÷ that of fused kernels: 10.9 and 11.4 of
    Llama 8 B and 1 B on an H200 (`benchmarks.gpu`)."""
    fast_link: float = 0.64
    """Fraction of the nominal bandwidth inside a node (one direction) that collectives reach: 192 of 300 GB/s."""
    shards: float = 0.63
    """Fraction of the bandwidth between nodes that gathers of weights reach: 15.7 of 25 GB/s (ZeRO-3, 2104.04473)."""
    launch: float = 1e-5  # host seconds to launch a GPU kernel; assumed, not fitted: 5 to 25 µs are usual in eager mode


PUBLISHED = RooflineConstants()
FORWARD_KERNELS = 36  # of a Llama block without adapters, counted as in `kernels_per_block`
_OVERLAP = 3.0  # exponent of T = (Tc³ + Tm³)^(1/3), for gathers that computation partly hides


def kernels_per_block(adapted: float, *, recompute: str) -> float:
    """Return the number of kernels of a Llama block with `adapted` adapted layers, forward and backward, without
    torch.compile: operations that are not views, counted by dispatch."""
    return 94 + 10 * adapted + (FORWARD_KERNELS + 4 * adapted if recompute == "full" else 0)


@dataclass(frozen=True)
class DeviceSpec:
    """Data-sheet rates of a device."""

    memory: float  # bytes of memory
    flops: float  # FLOP/s, dense bf16 (fp16 where there is none)
    bandwidth: float  # memory bandwidth, bytes/s
    link: float  # bytes/s in one direction to the other devices of its node
    bf16: bool = True  # False: its matrix units take fp16 alone


GB = 1e9
DEVICES = {
    "V100-32": DeviceSpec(32 * GB, 125e12, 0.9e12, 150 * GB, bf16=False),
    "T4": DeviceSpec(16 * GB, 65e12, 0.32e12, 16 * GB, bf16=False),
    "A10": DeviceSpec(24 * GB, 125e12, 0.6e12, 32 * GB),
    "L4": DeviceSpec(24 * GB, 121e12, 0.3e12, 32 * GB),
    "L40S": DeviceSpec(48 * GB, 362e12, 0.864e12, 32 * GB),
    "RTX3090": DeviceSpec(24 * GB, 71e12, 0.936e12, 32 * GB),
    "RTX4090": DeviceSpec(24 * GB, 165e12, 1.008e12, 32 * GB),
    "A100-40": DeviceSpec(40 * GB, 312e12, 1.555e12, 300 * GB),
    "A100-80": DeviceSpec(80 * GB, 312e12, 2.039e12, 300 * GB),
    "H100-80": DeviceSpec(80 * GB, 989e12, 3.35e12, 450 * GB),
    "H200-141": DeviceSpec(141 * GB, 989e12, 4.8e12, 450 * GB),
    "B200-180": DeviceSpec(180 * GB, 2250e12, 7.7e12, 900 * GB),
    "MI300X-192": DeviceSpec(192 * GB, 1307e12, 5.3e12, 448 * GB),
}
"""Devices by name and memory in GB; data-sheet rates, without sparsity."""
CORE = DeviceSpec(4 * GB, 50e9, 10e9, 5 * GB)
"""Rough rates of one CPU core, to rank meshes; `flatshift plan --calibrate` measures this machine's."""


def find_device(name: str, memory: int) -> str | None:
    """Return the row of `DEVICES` for a device that reports `name` and `memory` bytes; None if there is none."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    names = {*words, *("".join(pair) for pair in itertools.pairwise(words))}
    rows = [row for row, device in DEVICES.items() if row.split("-")[0].lower() in names]
    near = [row for row in rows if 0.8 < memory / DEVICES[row].memory < 1.1]
    return min(near, key=lambda row: abs(DEVICES[row].memory - memory), default=None)


@dataclass(frozen=True)
class StepLayout:
    """One way to distribute a step over devices."""

    layers: int
    hidden: int
    heads: int
    products: float  # elements of the weights that one block multiplies with
    head: float  # elements of the output layer
    sequence: int
    rows: int  # sequences of one rank's micro-batch
    micro: int  # micro-batches of a step (with a pipeline, pieces)
    tp: int = 1
    pp: int = 1
    virtual: int = 1
    recompute: str = "none"  # value of `train.checkpointing`
    sequence_parallel: bool = False
    fused_attention: bool = True  # attention that does not store its T² scores
    whole: bool = False  # full training: gradients of all weights, and their optimizer
    gathered: float = 0.0  # bytes of weights that a rank receives per micro-batch (FSDP2)
    gathered_inside: bool = True  # True if those come from the same node
    reduced: float = 0.0  # bytes of gradients that a rank sends per step
    reduced_inside: bool = False
    tp_inside: bool = True
    exchanged: float = 0.0
    """Bytes that a rank sends to experts on other ranks and back per micro-batch, gradients included."""
    exchanged_inside: bool = True
    kernels: float = 0.0
    """Kernels launched per block and micro-batch, none of them fused; 0: the host is the device, or they are fused."""
    repeats: int = 1  # forward and backward passes over a micro-batch
    references: int = 0  # forward passes beside them


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step by cause, each with its title on a page."""

    products: float = field(metadata={"title": "matrix products"})
    elements: float = field(metadata={"title": "element-wise traffic"})
    tensor: float = field(metadata={"title": "tensor parallelism"})
    gathers: float = field(metadata={"title": "gathers that nothing hides"})
    bubble: float = field(metadata={"title": "idle in the pipeline"})
    pipeline: float = field(metadata={"title": "sent between stages"})
    gradients: float = field(metadata={"title": "gradients of the adapter"})
    head: float = field(metadata={"title": "output layer and loss"})
    experts: float = field(default=0.0, metadata={"title": "tokens sent to experts"})
    host: float = field(default=0.0, metadata={"title": "waiting for the host to start kernels"})

    @property
    def total(self) -> float:
        """Sum of all causes."""
        return sum(vars(self).values())


def predict_seconds(
    work: StepLayout, device: DeviceSpec, *, network: float, constants: RooflineConstants = PUBLISHED
) -> StepSeconds:
    """Predict the seconds of one step. network: bytes/s of one device between nodes."""
    b, s, h, t, p = work.rows, work.sequence, work.hidden, work.tp, work.pp
    repeats, references = work.repeats, work.references
    once = (3 if work.whole else 2) * repeats + references
    passes = once + (work.recompute == "full") * repeats
    # selective recomputes the attention scores, too
    core = 4 * b * s * s * h * ((3 if work.recompute == "none" else 4) * repeats + references)
    multiplied = 2 * work.products * b * s * passes + core
    layers = math.ceil(work.layers / p)  # of the fullest stage, which all others wait for
    products = layers * multiplied / t / (device.flops * constants.products)
    scores = 0.0 if work.fused_attention else 5 * work.heads * s / (h * t)
    saved = (34 / t if work.sequence_parallel else 10 + 24 / t) + scores
    elements = layers * constants.elements * b * s * h * saved * passes / device.bandwidth
    elements *= constants.eager if work.kernels else 1.0
    reduces = (6 if work.recompute == "full" else 4) * repeats + 2 * references
    inner = device.link * constants.fast_link
    tensor = (
        0.0 if t == 1 else layers * reduces * 2 * (t - 1) / t * 2 * b * s * h / (inner if work.tp_inside else network)
    )
    head = 2 * once * b * s * work.head / t / (device.flops * constants.products)
    exchange = layers * work.exchanged / (inner if work.exchanged_inside else network)
    head /= 1 if p == 1 else max(1.0, p / 2)
    stage = products + elements + tensor + exchange + head
    gathers = 0.0
    if work.gathered:
        gather = work.gathered / (inner if work.gathered_inside else network * constants.shards)
        gathers = (stage**_OVERLAP + gather**_OVERLAP) ** (1 / _OVERLAP) - stage
    host = max(0.0, layers * work.kernels * constants.launch - stage - gathers)
    sent = 0.0 if p == 1 else 2 * work.virtual * 2 * b * s * h * 2 * repeats / t / network
    return StepSeconds(
        products=products * work.micro, elements=elements * work.micro, tensor=tensor * work.micro,
        gathers=gathers * work.micro, bubble=(p - 1) / work.virtual * (stage + gathers + host),
        pipeline=sent * work.micro, gradients=work.reduced / (inner if work.reduced_inside else network),
        head=head * work.micro, experts=exchange * work.micro, host=host * work.micro,
    )  # fmt: skip
