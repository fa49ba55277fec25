"""Seconds of an update, from a roofline with few constants: products, element-wise traffic, collectives, the bubble.

The form is that of Megatron-LM's own accounting (2104.04473 §5.1, 2205.05198): a block of width h over b rows of s
tokens multiplies 24·b·s·h² + 4·b·s²·h FLOPs forward. A step trained whole takes three times that, with frozen weights
twice (their gradients are not needed), and a recomputed forward pass once more. The constants were fitted on the ten
rows of 2104.04473, Table 1, alone (A100, full training); what they miss elsewhere is in docs/does-it-fit.md.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Constants:
    """What is reached of a device's data sheet."""

    products: float = 0.641
    """Share of the bf16 peak that matrix products reach."""
    elements: float = 0.97
    """Bytes that element-wise kernels move at the sheet's bandwidth ÷ those that they must."""
    fast_link: float = 0.64
    """Share of the nominal bandwidth inside a node (one direction) that collectives reach: 192 of 300 GB/s."""
    shards: float = 0.63
    """Share of the nominal bandwidth between nodes that gathers of weights reach: 15.7 of 25 GB/s (ZeRO-3,
    2104.04473)."""
    launch: float = 1e-5
    """Seconds of the host for each kernel of a GPU; assumed, not fitted: 5 to 25 µs are usual in eager mode."""


PUBLISHED = Constants()
"""Fitted on the ten rows of 2104.04473, Table 1, alone (A100, full training), but for `launch`."""
_OVERLAP = 3.0
"""T = (Tc³ + Tm³)^(1/3) for gathers that computing hides in part."""


def kernels(adapted: float, *, recompute: str) -> float:
    """Kernels of a Llama block with so many adapted layers, forward and backward, without torch.compile: operations
    that are no views, counted by dispatch."""
    return 94 + 10 * adapted + (36 + 4 * adapted if recompute == "full" else 0)


@dataclass(frozen=True)
class Device:
    """What a device can do, as its maker says."""

    memory: float
    """Bytes."""
    flops: float
    """FLOP/s, dense bf16 (fp16 where there is none)."""
    bandwidth: float
    """Bytes/s of its memory."""
    link: float
    """Bytes/s in one direction to the other devices of its node."""


GB = 1e9
DEVICES = {
    "V100-32": Device(32 * GB, 125e12, 0.9e12, 150 * GB),
    "T4": Device(16 * GB, 65e12, 0.32e12, 16 * GB),
    "A10": Device(24 * GB, 125e12, 0.6e12, 32 * GB),
    "L4": Device(24 * GB, 121e12, 0.3e12, 32 * GB),
    "L40S": Device(48 * GB, 362e12, 0.864e12, 32 * GB),
    "RTX3090": Device(24 * GB, 71e12, 0.936e12, 32 * GB),
    "RTX4090": Device(24 * GB, 165e12, 1.008e12, 32 * GB),
    "A100-40": Device(40 * GB, 312e12, 1.555e12, 300 * GB),
    "A100-80": Device(80 * GB, 312e12, 2.039e12, 300 * GB),
    "H100-80": Device(80 * GB, 989e12, 3.35e12, 450 * GB),
    "H200-141": Device(141 * GB, 989e12, 4.8e12, 450 * GB),
    "B200-180": Device(180 * GB, 2250e12, 7.7e12, 900 * GB),
    "MI300X-192": Device(192 * GB, 1307e12, 5.3e12, 448 * GB),
}
"""By name and memory in GB; figures of their data sheets, without sparsity."""
CORE = Device(4 * GB, 50e9, 10e9, 5 * GB)
"""About a core of a CPU, to tell meshes of one apart; `flatshift plan --calibrate` measures this machine's."""


def device_named(name: str, memory: int) -> str | None:
    """The row of `DEVICES` that a device is which calls itself `name` and has so many bytes; None: none of them."""
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    words |= {"".join(pair) for pair in itertools.pairwise(re.findall(r"[a-z0-9]+", name.lower()))}
    rows = [row for row in DEVICES if row.split("-")[0].lower() in words]
    near = [row for row in rows if 0.8 < memory / DEVICES[row].memory < 1.1]
    return min(near, key=lambda row: abs(DEVICES[row].memory - memory), default=None)


@dataclass(frozen=True)
class StepLayout:
    """One way to spread a step over devices."""

    layers: int
    hidden: int
    heads: int
    products: float
    """Elements of the weights that one block multiplies with."""
    head: float
    """Elements of the output layer."""
    sequence: int
    rows: int
    """Of a micro-batch of a rank's."""
    micro: int
    """Micro-batches (with a pipeline, pieces) of an update."""
    tp: int = 1
    pp: int = 1
    virtual: int = 1
    recompute: str = "none"
    """`train.checkpointing`."""
    sequence_parallel: bool = False
    fused_attention: bool = True
    """Attention that never writes its T² scores."""
    whole: bool = False
    """Trained whole: gradients of all weights, and their optimizer."""
    gathered: float = 0.0
    """Bytes of weights that a rank receives in a micro-batch (FSDP2)."""
    gathered_inside: bool = True
    """Whether those come from the same node."""
    reduced: float = 0.0
    """Bytes of gradients that a rank sends in an update."""
    reduced_inside: bool = False
    tp_inside: bool = True
    exchanged: float = 0.0
    """Bytes that a rank sends to the experts of others and back in a micro-batch, gradients too."""
    exchanged_inside: bool = True
    kernels: float = 0.0
    """That the host starts for a block and micro-batch; 0: the host is the device, or does not matter."""


@dataclass(frozen=True)
class Seconds:
    """Of one update, by cause, each with its title on a page."""

    products: float = field(metadata={"title": "matrix products"})
    elements: float = field(metadata={"title": "element-wise traffic"})
    tensor: float = field(metadata={"title": "tensor parallelism"})
    """Collectives of tensor parallelism."""
    gathers: float = field(metadata={"title": "gathers that nothing hides"})
    """Of what gathers take beyond what computing hides."""
    bubble: float = field(metadata={"title": "idle in the pipeline"})
    pipeline: float = field(metadata={"title": "sent between stages"})
    """Activations sent between stages."""
    gradients: float = field(metadata={"title": "gradients of the adapter"})
    head: float = field(metadata={"title": "output layer and loss"})
    experts: float = field(default=0.0, metadata={"title": "tokens sent to experts"})
    """Tokens sent to experts on other ranks, and back."""
    host: float = field(default=0.0, metadata={"title": "waiting for the host to start kernels"})
    """Of starting kernels, beyond what the device takes to run them: small models and micro-batches wait for it."""

    @property
    def total(self) -> float:
        """Sum of all causes."""
        return sum(vars(self).values())


def seconds(work: StepLayout, device: Device, *, network: float, constants: Constants = PUBLISHED) -> Seconds:
    """Of one update. network: bytes/s between nodes of one device."""
    at = constants
    b, s, h, t, p = work.rows, work.sequence, work.hidden, work.tp, work.pp
    passes = (3 if work.whole else 2) + (work.recompute == "full")
    core = 4 * b * s * s * h * (3 if work.recompute == "none" else 4)  # selective computes the scores again, too
    multiplied = 2 * work.products * b * s * passes + core
    layers = math.ceil(work.layers / p)  # of the fullest stage, which all wait for
    products = layers * multiplied / t / (device.flops * at.products)
    scores = 0.0 if work.fused_attention else 5 * work.heads * s / (h * t)
    kept = (34 / t if work.sequence_parallel else 10 + 24 / t) + scores
    elements = layers * at.elements * b * s * h * kept * passes / device.bandwidth
    reduces = 6 if work.recompute == "full" else 4
    fast = device.link * at.fast_link if work.tp_inside else network
    tensor = 0.0 if t == 1 else layers * reduces * 2 * (t - 1) / t * 2 * b * s * h / fast
    head = (6 if work.whole else 4) * b * s * work.head / t / (device.flops * at.products)
    exchange = layers * work.exchanged / (device.link * at.fast_link if work.exchanged_inside else network)
    stage = products + elements + tensor + exchange + head / (1 if p == 1 else max(1.0, p / 2))
    gathers = 0.0
    if work.gathered:
        taken = work.gathered / (device.link * at.fast_link if work.gathered_inside else network * at.shards)
        gathers = (stage**_OVERLAP + taken**_OVERLAP) ** (1 / _OVERLAP) - stage
    host = max(0.0, layers * work.kernels * at.launch - stage - gathers)
    idle = (p - 1) / work.virtual * (stage + gathers + host)
    sent = 0.0 if p == 1 else 2 * work.virtual * 2 * b * s * h * 2 / t / network
    gradients = work.reduced / (device.link * at.fast_link if work.reduced_inside else network)
    return Seconds(
        products=products * work.micro,
        elements=elements * work.micro,
        tensor=tensor * work.micro,
        gathers=gathers * work.micro,
        bubble=idle,
        pipeline=sent * work.micro,
        gradients=gradients,
        head=(stage - products - elements - tensor - exchange) * work.micro,
        experts=exchange * work.micro,
        host=host * work.micro,
    )
