"""Initialise adapters (`adapter.init`) by PEFT's own code, seeded by seed and layer name.

PEFT's initialisations modify the weight of the layer they act on; here the weight is restored, and the initial product
is folded out of it by `flatshift.finetune.adapters.offsets`, in the same way as when a run is resumed.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..compute.capabilities import seeded_rng
from ..compute.micro_batch import MicroBatch
from ..compute.protocols import LossTask
from ..config import DATA_INITS, Adapter
from ..errors import UserError
from ..models.checkpoint import open_slice, read_floats
from ..seeds import derive_seed
from .offsets import ADAPTER, LowRankOffset, fold_offsets, lora_layers

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel

    from ..data.example import Example

ROWS = 64
SUBTRACTED_INITS = ("pissa", "olora", "corda", "lora-ga")
"""Initialisations whose BA is not zero, so that it is subtracted from the frozen weight."""
_PASSES = 30  # maximum passes of EVA over the examples before its directions must have converged


@dataclass(frozen=True)
class Calibration:
    """Training examples for the data-dependent initialisations."""

    rows: Sequence[Example]
    task: LossTask
    pad_id: int
    batch_size: int = 8
    precision: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    """Context of every forward pass: the autocast of training."""

    def batches(self, device: torch.device, rows: int | None = None) -> list[MicroBatch]:
        """Return all examples once as padded batches of `rows` examples."""
        from ..data.eval_batching import EvalBatching

        batching = EvalBatching(rows or self.batch_size, self.pad_id)
        return [batch.to(device) for batch in batching.batches(self.rows, self.task)]


@dataclass(frozen=True)
class InitialAdapter:
    """Initial state of a fresh adapter that is more than a random draw; one of the two fields is set."""

    folder: Path | None = None
    """An adapter saved before step 1, including the parts folded into the frozen weights."""
    rows: Calibration | None = None
    """Training examples for `adapter.init`."""


def require_calibration(adapter: Adapter, calibration: Calibration | None) -> Calibration:
    """Return `calibration`; raise UserError if it is missing but `adapter.init` needs data."""
    if calibration is None or not calibration.rows:
        raise UserError(f"adapter.init: {adapter.init} looks at training rows, and there are none here")
    return calibration


def collect_statistics(
    backbone: PreTrainedModel, config: LoraConfig, adapter: Adapter, calibration: Calibration
) -> None:
    """Store on each layer of `backbone` the statistics that PEFT's corda_init or lora_ga_init will read there."""
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers

    # PEFT's functions for bare models need the layers of all-linear by name
    resolved: Any = _maybe_include_all_linear_layers(copy.deepcopy(config), backbone)
    with _restore_state(backbone), _translate_peft_errors(adapter.init):
        (_prepare_corda if adapter.init == "corda" else _prepare_lora_ga)(backbone, resolved, calibration)


def _prepare_corda(backbone: PreTrainedModel, config: LoraConfig, calibration: Calibration) -> None:
    from peft.tuners.lora.config import CordaConfig

    try:
        from peft.tuners.lora.corda import preprocess_corda
    except ModuleNotFoundError as error:  # a dependency that PEFT 0.21 does not declare
        raise UserError(
            f"adapter.init: corda needs the Python package attrs ({error}); pip install attrs, or take another init"
        ) from error

    def run() -> None:
        for micro in calibration.batches(backbone.device, rows=1):  # PEFT's covariance is of one row's tokens
            with calibration.precision():
                backbone(**micro.inputs)

    settings = dataclasses.replace(config, init_lora_weights="corda", corda_config=CordaConfig())
    preprocess_corda(backbone, settings, run_model=run)


def _prepare_lora_ga(backbone: PreTrainedModel, config: LoraConfig, calibration: Calibration) -> None:
    from peft.tuners.lora.config import LoraGAConfig
    from peft.tuners.lora.loraga import preprocess_loraga

    from ..compute.loss import batch_loss

    batches = calibration.batches(backbone.device)
    count = sum(micro.supervised for micro in batches)

    def step() -> None:
        # Without dropout: the gradient of the examples, not of one draw of masks.
        backbone.eval()
        for micro in batches:
            with calibration.precision():
                loss = batch_loss(backbone, micro, task=calibration.task, head=None) / count
            loss.backward()

    settings: Any = dataclasses.replace(config, lora_ga_config=LoraGAConfig())
    settings.init_lora_weights = "lora_ga"
    preprocess_loraga(backbone, settings, step)


def initialise(
    model: PeftModel, adapter: Adapter, *, seed: int, calibration: Calibration | None, weights: Path | None = None
) -> None:
    """Replace PEFT's default values of the factors of the wrapped `model` by those of `adapter.init`.

    weights: directory of the backbone's unquantised weight files (loftq).

    Raises UserError: settings or layers that PEFT rejects.
    """
    if adapter.init == "eva":
        _initialise_eva(model, require_calibration(adapter, calibration))
    elif adapter.init == "loftq":
        _initialise_loftq(model, weights)
    else:
        offsets: dict[str, LowRankOffset] = {}
        for name, layer in lora_layers(model).items():
            if ADAPTER not in layer.lora_A:  # embeddings keep the default initialisation
                continue
            _check_rank(adapter, name, layer)
            draws = seeded_rng(derive_seed(seed, "init", name), layer.get_base_layer().weight.device)
            with draws, _translate_peft_errors(adapter.init):
                a, b = _initial_factors(layer, adapter)
            if adapter.init in SUBTRACTED_INITS:
                offsets[name] = LowRankOffset(a.clone(), -b)
        if offsets:
            fold_offsets(model, offsets, context=f"adapter.init: {adapter.init}")


def _check_rank(adapter: Adapter, name: str, layer: Any) -> None:
    rank, maximum = layer.r[ADAPTER], min(layer.in_features, layer.out_features)
    if adapter.init == "lora-ga":
        maximum //= 2
    if adapter.init == "olora" and layer.fan_in_fan_out:
        raise UserError(
            f"adapter.init: olora does not work on {name}, a Conv1D whose weight PEFT would decompose the wrong way "
            "round; take pissa"
        )
    if adapter.init == "orthogonal" and rank % 2:
        raise UserError(f"adapter.init: orthogonal needs even ranks, and {name} has {rank}")
    if adapter.init in SUBTRACTED_INITS and rank > maximum:
        raise UserError(
            f"adapter.init: {adapter.init} takes at most {maximum} directions out of {name}, and its rank is {rank}; "
            f"lower adapter.rank, or set adapter.ranks.{name.rsplit('.', 1)[-1]}: {maximum}"
        )


@torch.no_grad()
def _initial_factors(layer: Any, adapter: Adapter) -> tuple[Tensor, Tensor]:
    """Return A and B as initialised by PEFT's method, in their dtype; the frozen weight is restored."""
    from peft.tuners.lora.config import LoraGAConfig

    a, b, base = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER], layer.get_base_layer()
    dtype, weight = a.weight.dtype, base.weight.data
    base.weight.data = weight.clone()  # some methods subtract in place
    try:
        options = {"pissa": ("pissa",), "corda": ("corda",), "lora-ga": (LoraGAConfig(),)}.get(adapter.init, ())
        getattr(layer, f"{adapter.init.replace('-', '_')}_init")(ADAPTER, *options)
    finally:
        base.weight.data = weight
    for factor in (a, b):
        factor.weight.data = factor.weight.data.to(weight.device, dtype).contiguous()
        factor.weight.requires_grad_(True)
    return a.weight.detach(), b.weight.detach()


def _initialise_eva(model: PeftModel, calibration: Calibration) -> None:
    from peft import EvaConfig, get_eva_state_dict, initialize_lora_eva_weights

    config: Any = model.peft_config[ADAPTER]
    config.init_lora_weights, config.eva_config = "eva", EvaConfig()
    device = next(model.parameters()).device
    batches = [dict(micro.inputs) for micro in calibration.batches(device)]
    for batch in batches:
        batch["mask"] = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    directions = max(round(layer.r[ADAPTER] * config.eva_config.rho) for layer in lora_layers(model).values())
    tokens = min(int(batch["mask"].sum()) for batch in batches)
    if tokens < directions:  # PEFT skips such batches, and would wait for others for ever
        raise UserError(
            f"adapter.init: eva needs {directions} tokens in a batch of {calibration.batch_size} rows (twice the "
            f"rank), and one has {tokens}; take longer rows, other rows, or a smaller adapter.rank"
        )
    calls = itertools.count(1)

    def forward(peft_model: nn.Module, batch: dict[str, Tensor]) -> None:
        if next(calls) > _PASSES * len(batches):
            raise UserError(
                f"adapter.init: the directions of eva still move after {_PASSES} passes over {len(calibration.rows)} "
                "rows; raise adapter.init_rows"
            )
        with calibration.precision():
            peft_model(**{name: tensor for name, tensor in batch.items() if name != "mask"})

    with _restore_state(model), _translate_peft_errors("eva"):
        state = get_eva_state_dict(
            model, batches, peft_config=config, forward_fn=forward,
            prepare_model_inputs_fn=lambda batch, _: batch["mask"], prepare_layer_inputs_fn=_real_tokens,
            adapter_name=ADAPTER, show_progress_bar=False,
        )  # fmt: skip
        before = lora_layers(model).keys()
        initialize_lora_eva_weights(model, eva_state_dict=state)
    if before - (kept := lora_layers(model).keys()):  # of rank 0: PEFT's own suffixes would name them all the same
        config.target_modules = set(kept)
    config.init_lora_weights, config.eva_config = True, None


def _real_tokens(states: Any, mask: Tensor, name: str) -> Tensor:
    """Return a layer's inputs at real tokens (n, D); all of them for a layer that gets one state per sequence."""
    first: Tensor = states[0] if isinstance(states, tuple | list) else states
    return first[mask] if first.shape[:2] == mask.shape else first.reshape(-1, first.shape[-1])


@torch.no_grad()
def _initialise_loftq(model: PeftModel, directory: Path | None) -> None:
    """Initialise A and B with the best rank-r approximation of each weight's 4-bit quantisation error (one iteration).

    Computes the same as PEFT's `replace_lora_weights_loftq`, but on any device, and with the layer's scale, which that
    function ignores.
    """
    from peft.utils.integrations import dequantize_module_weight
    from safetensors import safe_open

    packed = {name: layer for name, layer in lora_layers(model).items() if type(layer).__name__ == "Linear4bit"}
    if directory is None or not packed:
        raise UserError("adapter.init: loftq found no 4-bit layer among the adapted ones; set train.quantization: nf4")
    prefix, entries = getattr(model.get_base_model(), "base_model_prefix", ""), read_floats(directory)
    for name, layer in packed.items():
        dequantized = dequantize_module_weight(layer.get_base_layer()).float()
        key = f"{name}.weight" if f"{name}.weight" in entries else f"{name}.weight".removeprefix(f"{prefix}.")
        if key not in entries:
            raise UserError(f"adapter.init: loftq does not find {name}.weight in the weight files of {directory}")
        with safe_open(entries[key].file, framework="pt") as tensors:
            weight = open_slice(tensors, key, entries[key])[:].to(dequantized)
        # bitsandbytes may store the transpose of a Conv1D's weight
        fitting = [w for w in (weight, weight.T) if w.shape == dequantized.shape]
        weight = min(fitting, key=lambda w: float((w - dequantized).norm()))
        rank, scale = layer.r[ADAPTER], layer.scaling[ADAPTER]
        u, s, v = torch.linalg.svd((weight - dequantized) / scale, full_matrices=False)
        root = s[:rank].sqrt()
        for factor, value in ((layer.lora_A, root[:, None] * v[:rank]), (layer.lora_B, u[:, :rank] * root)):
            factor[ADAPTER].weight.copy_(value)


@contextlib.contextmanager
def _restore_state(model: nn.Module) -> Iterator[None]:
    """Restore the model's mode, requires_grad flags and the global random state at the end."""
    training, trainable = model.training, {p: p.requires_grad for p in model.parameters()}
    with seeded_rng(0, next(model.parameters()).device):
        try:
            yield
        finally:
            model.train(training)
            for parameter, requires_grad in trainable.items():
                parameter.requires_grad_(requires_grad)


@contextlib.contextmanager
def _translate_peft_errors(kind: str) -> Iterator[None]:
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except UserError:
        raise
    except (ValueError, TypeError, torch.linalg.LinAlgError) as error:
        raise UserError(f"adapter.init: {kind} does not work here: {str(error).splitlines()[0]}") from error


def calibration_rows(adapter: Adapter) -> int:
    """Return the number of training examples that the initialisation needs; 0 for most."""
    return (adapter.init_rows or ROWS) if adapter.init in DATA_INITS else 0
