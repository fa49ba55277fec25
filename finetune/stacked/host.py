"""The backbone while it serves many cells: its adapted layers look up whose rows they are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..compute.capabilities import capabilities
from ..compute.loss import Head, aligned, linear_cross_entropies
from ..compute.numerics import attention, uses_dropout
from ..data.encoding import IGNORE
from ..models.anatomy import is_conv1d
from ..models.weight_names import canonical
from ..parallel.engine import Engine
from .frozen import Distinct, blocks_below, once_a_row
from .limits import NotStackable
from .linear import Group, HeadPart, Noise, Part, Run, StackedLinear, StackedLora
from .passes import join, split

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from transformers import PreTrainedModel

    from ..data.micro_batch import MicroBatch
    from ..tasks import Task
    from ..train.stage import ForwardBackward

_A, _B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class Seat:
    """A cell's place in the stack."""

    engine: Engine
    group: Group
    place: int
    """In the group."""
    scale: float
    """s of sBA."""
    layers: dict[str, nn.Module]
    """The LoRA layers of its own model, by plain name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements of each of its trained tensors."""
        return tuple(parameter.numel() for parameter in self.engine.parameters.values())

    def signature(self) -> tuple[tuple[int, int], ...] | None:
        """(k, p) of the noise in each of its layers now; None without noise."""
        branches = [self.branch(name) for name in self.layers]
        if all(branch is None for branch in branches):
            return None
        return tuple((b.noise_in.shape[1], b.probe_in.shape[1]) if b is not None else (-1, -1) for b in branches)

    def branch(self, layer: str) -> Any:
        """The noise branch (`flatshift.regularizers.layers.branch`) that stands in for a layer's forward; None
        without."""
        return vars(self.layers[layer]).get("forward")


@dataclass(frozen=True)
class Pass:
    """What the layers must know of the forward pass at hand."""

    runs: list[Run]
    seats: list[list[int]]
    """Of each run."""
    noisy: list[bool]
    """Whether the cells of each run have noise."""
    rows: int
    width: int
    distinct: Distinct | None
    """Which rows are the same; None where none are, or no block could make use of it."""


class Host:
    """Serves `engines`, whose models share the frozen tensors of `backbone`, between `__enter__` and `__exit__`.

    Nothing of the backbone is written, and after `__exit__` its modules are what they were.
    """

    def __init__(self, backbone: PreTrainedModel, engines: Sequence[Engine], *, task: Task, pad_id: int) -> None:
        """Stack the cells' parameters: from now on they are slices of larger tensors.

        Cells of one rank share products best where neighbours have the same batch size.

        Raises:
            NotStackable: a backbone that draws dropout masks, adapters on layers that are not linear, a head of other
                parts than linear layers, cells that adapt other layers than the first.
        """
        self.backbone, self.task, self.pad_id = backbone, task, pad_id
        names = engines[0].parameters.keys()
        if any(engine.parameters.keys() != names for engine in engines):
            raise NotStackable("the cells adapt different layers of the backbone")
        if any(uses_dropout(engine.model) for engine in engines):
            raise NotStackable(
                "the backbone draws dropout masks, which are each cell's own; set train.backbone_dropout: 0"
            )
        self._lora = [name.removesuffix(_A) for name in names if name.endswith(_A)]
        rest = {name for name in names if not name.endswith((_A, _B))}
        self._heads = {owner: {n for n in rest if n.rpartition(".")[0] == owner} for owner in _owners(rest)}
        self._check_modules()
        self._below, self._shared = blocks_below(backbone, [*self._lora, *self._heads])
        self.seats: list[Seat] = self._seats(engines)
        self._anchor = torch.zeros((), device=backbone.device, requires_grad=True)
        self._pass: Pass | None = None
        self._swapped: list[nn.Module] = []
        self._modes: list[tuple[nn.Module, bool]] = []

    def _check_modules(self) -> None:
        for name in self._lora:
            module = self.backbone.get_submodule(name)
            if not (type(module) is nn.Linear or is_conv1d(module)):
                raise NotStackable(f"the adapted layer {name} is a {type(module).__name__}, not a plain linear layer")
        for name, parameters in self._heads.items():
            module = self.backbone.get_submodule(name)
            if type(module) is not nn.Linear:
                odd = min(parameters)
                raise NotStackable(f"{odd} is trained whole and belongs to a {type(module).__name__}, not to a head")

    def _seats(self, engines: Sequence[Engine]) -> list[Seat]:
        shapes = [tuple(p.shape for p in engine.parameters.values()) for engine in engines]
        seats: dict[int, Seat] = {}
        for number, shape in enumerate(dict.fromkeys(shapes)):
            members = [i for i, found in enumerate(shapes) if found == shape]
            group = Group([engines[i] for i in members], number)
            for place, i in enumerate(members):
                seats[i] = _seat(engines[i], group, place, self._lora)
        return [seats[i] for i in range(len(engines))]

    # ------------------------------------------------------------------ attach and detach

    def __enter__(self) -> Self:
        self._modes = [(module, module.training) for module in self.backbone.modules()]
        self.backbone.train()
        for names, make in ((self._lora, self._lora_forward), (self._heads, self._head_forward)):
            for name in names:
                module = self.backbone.get_submodule(name)
                vars(module)["forward"] = make(name, module)
                self._swapped.append(module)
        for block in self._below:
            vars(block)["forward"] = once_a_row(
                block, lambda: self._pass.distinct if self._pass else None, refused=self._share_nothing
            )
            self._swapped.append(block)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for module in self._swapped:
            del vars(module)["forward"]
        for module, training in self._modes:
            module.training = training
        self._swapped, self._modes, self._pass = [], [], None

    def _lora_forward(self, name: str, module: Any) -> Callable[[Tensor], Tensor]:
        transposed = type(module) is not nn.Linear  # Conv1D keeps its weight as (n, m)

        def forward(x: Tensor) -> Tensor:
            x = _computed(x)
            weight = (module.weight.T if transposed else module.weight).to(x.dtype)
            bias = None if module.bias is None else module.bias.to(x.dtype)
            now = self._now(name, x)
            parts = [
                Part(run, name + _A, name + _B, self.seats[of[0]].scale, self._noise(of, name) if noisy else None)
                for run, of, noisy in zip(now.runs, now.seats, now.noisy, strict=True)
            ]
            y: Tensor = StackedLora.apply(self._anchor, x, weight, bias, parts, now.rows)
            return y

        return forward

    def _head_forward(self, name: str, module: Any) -> Callable[[Tensor], Tensor]:
        bias = f"{name}.bias" if f"{name}.bias" in self._heads[name] else None

        def forward(x: Tensor) -> Tensor:
            x = _computed(x)
            now = self._now(name, x)
            parts = [HeadPart(run, f"{name}.weight", bias) for run in now.runs]
            y: Tensor = StackedLinear.apply(self._anchor, x, parts, now.rows)
            return y

        return forward

    def _noise(self, seats: Sequence[int], layer: str) -> Noise:
        return Noise.of([self.seats[seat].branch(layer) for seat in seats])

    def _now(self, name: str, x: Tensor) -> Pass:
        now = self._pass
        assert now is not None
        if x.ndim < 2 or x.shape[0] not in (now.rows, now.rows * now.width):
            raise NotStackable(f"the layer {name} is given {tuple(x.shape)} in a batch of {now.rows} rows")
        return now

    # ------------------------------------------------------------------ computing

    def compute(self, asked: Mapping[int, ForwardBackward]) -> dict[int, Tensor]:
        """Do the work of these seats; each one's loss, float32 scalar, and its gradients in its engine's parameters.

        Raises:
            NotStackable: the backbone gives a layer something else than the rows of the batch.
        """
        device = self.backbone.device
        losses = {seat: torch.zeros((), device=device) for seat in asked}
        written: dict[int, set[str]] = {seat: set() for seat in asked}
        for index in range(max(len(work.micros) for work in asked.values())):
            micros = {seat: work.micros[index] for seat, work in asked.items() if index < len(work.micros)}
            places = list(micros)
            shapes = [tuple(micros[seat].inputs["input_ids"].shape) for seat in places]
            shared = self.shared(plain=all(asked[seat].head is not None for seat in places))
            same = _alike(list(micros.values())) if shared else None
            passes = split(shapes, device=capabilities(device).kind, same=same, shared=shared)  # type: ignore[arg-type]
            for chosen in passes:
                seats = sorted((places[i] for i in chosen), key=self.order)
                found, more = self._together(seats, micros, asked, index)
                for seat in seats:
                    losses[seat] += found[seat]
                    written[seat] |= more[seat]
        for seat, names in written.items():
            self.seats[seat].group.hand_out(self.seats[seat].place, self.seats[seat].engine, names)
            asked[seat].engine.beat()
        return losses

    def shared(self, *, plain: bool) -> float:
        """The share of a token's cost that the cells of a pass pay once for the same rows.

        plain: as in `forward`. Where the logits of all tokens are held, passes may not be longer for it.
        """
        return self._shared if plain or self.task.is_sequence_level else 0.0

    def _share_nothing(self) -> None:
        self._shared = 0.0

    def order(self, seat: int) -> tuple[int, int]:
        """Neighbours in a group come after one another."""
        return self.seats[seat].group.number, self.seats[seat].place

    def _together(
        self, seats: list[int], micros: Mapping[int, MicroBatch], asked: Mapping[int, ForwardBackward], index: int
    ) -> tuple[dict[int, Tensor], dict[int, set[str]]]:
        """One forward and backward pass: the losses, and which gradients were written."""
        counts = torch.tensor([float(asked[seat].count) for seat in seats], device=self.backbone.device)
        plain = all(asked[seat].head is not None for seat in seats)
        with ExitStack() as around:
            for seat in seats:  # precision, which they share, and their regularizers hear of the micro-batch
                around.enter_context(asked[seat].context(index))
            sums, now = self.forward(seats, micros, plain=plain, adds=index > 0)
        losses = sums / counts
        losses.sum().backward()
        found = dict(zip(seats, losses.detach(), strict=True))
        return found, {seat: run.written for run, of in zip(now.runs, now.seats, strict=True) for seat in of}

    def forward(
        self, seats: Sequence[int], micros: Mapping[int, MicroBatch], *, plain: bool, adds: bool = False
    ) -> tuple[Tensor, Pass]:
        """The forward pass of these neighbours' micro-batches: each one's loss, summed, float32 (cells,).

        plain: whether the backbone's own head gives the logits and nothing else
        (`flatshift.finetune.compute.loss.find_head`).
        """
        device = self.backbone.device
        batch = [micros[seat].to(device) for seat in seats]
        inputs, labels = join(batch, pad_id=self.pad_id)
        owner = torch.repeat_interleave(torch.tensor([len(micro.inputs["input_ids"]) for micro in batch])).to(device)
        head = Head(self.backbone.get_output_embeddings()) if plain else None
        distinct = Distinct.of(inputs) if self._shared and len(seats) > 1 else None
        self._pass = now = self._runs(seats, micros, adds=adds, width=inputs["input_ids"].shape[1], distinct=distinct)
        try:
            with attention(inputs):
                return self._sums(inputs, labels, owner, len(seats), head), now
        finally:
            self._pass = None

    def _runs(
        self,
        seats: Sequence[int],
        micros: Mapping[int, MicroBatch],
        *,
        adds: bool,
        width: int,
        distinct: Distinct | None,
    ) -> Pass:
        """`seats` cut into runs of neighbours with equal rows and scale and the same noise."""
        runs: list[Run] = []
        members: list[list[int]] = []
        kinds: list[Any] = []
        start = 0
        for seat in seats:
            mine, rows = self.seats[seat], len(micros[seat].inputs["input_ids"])
            kind = (rows, mine.scale, mine.signature())
            stop = start + rows
            last = runs[-1] if runs else None
            if last is not None and last.group is mine.group and last.cells.stop == mine.place and kinds[-1] == kind:
                last.cells, last.rows = slice(last.cells.start, mine.place + 1), slice(last.rows.start, stop)
                members[-1].append(seat)
            else:
                runs.append(Run(mine.group, slice(mine.place, mine.place + 1), slice(start, stop), adds))
                members.append([seat])
                kinds.append(kind)
            start = stop
        return Pass(runs, members, [kind[2] is not None for kind in kinds], start, width, distinct)

    def _sums(self, inputs: dict[str, Tensor], labels: Tensor, owner: Tensor, cells: int, head: Head | None) -> Tensor:
        """Loss of each cell, summed over its supervised tokens or examples, float32 (cells,).

        owner: (R,) which cell each row belongs to.
        """
        wide = capabilities(owner.device).sums

        def summed(nats: Tensor, owners: Tensor) -> Tensor:
            return torch.zeros(cells, dtype=wide, device=owner.device).index_add(0, owners, nats.to(wide)).float()

        if self.task.is_sequence_level:
            return summed(self.task.example_losses(self.backbone(**inputs).logits, labels), owner)

        def supervised(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            values, targets = aligned(values, labels, self.task)
            mask = targets != IGNORE
            return values[mask], targets[mask], owner[:, None].expand_as(mask)[mask]

        if head is None:
            logits, targets, owners = supervised(self.backbone(**inputs).logits)
            return summed(F.cross_entropy(logits.float(), targets, reduction="none"), owners)
        linear = head.linear

        def cost(hidden: Tensor) -> Tensor:
            rows, targets, owners = supervised(hidden)
            return summed(linear_cross_entropies(rows, linear, targets), owners).view(1, 1, -1)

        with head.computing(cost):
            return self.backbone(**inputs).logits.view(-1)


def _computed(x: Tensor) -> Tensor:
    """`x` in the dtype that autocast would compute in."""
    device = capabilities(x.device).autocast
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def _alike(micros: Sequence[MicroBatch]) -> list[int]:
    """One number for micro-batches of the same rows."""
    numbers: dict[tuple[bytes, ...], int] = {}
    rows = [tuple(micro.inputs[name].numpy().tobytes() for name in sorted(micro.inputs)) for micro in micros]
    return [numbers.setdefault(key, len(numbers)) for key in rows]


def _owners(names: set[str]) -> list[str]:
    return sorted({name.rpartition(".")[0] for name in names})


def _seat(engine: Engine, group: Group, place: int, lora: Sequence[str]) -> Seat:
    modules = {canonical(name): module for name, module in engine.model.named_modules() if hasattr(module, "lora_A")}
    layers: dict[str, Any] = {name: modules[name] for name in lora}
    scales = {layer.scaling["default"] for layer in layers.values()}
    if len(scales) != 1:
        raise NotStackable("the layers of one adapter have different scales")
    return Seat(engine, group, place, scales.pop(), layers)
