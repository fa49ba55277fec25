"""Soft tokens: train vectors before every sequence and nothing else (prompt tuning, Lester et al., arXiv 2104.08691),
by PEFT; and before them features, through one trained linear map, the projector of eP-ALM (Shukor et al., arXiv
2303.11403). The wrapped model returns logits for the example's own tokens only, so losses and metrics are not affected.

A frozen external encoder produced K vectors x_k of width d for each example's image, sound or video. P is the map.

    [P x_1 … P x_K][soft tokens][text]   inject: first        K positions at the front, as inputs of the first block
    [      ·      ][soft tokens][text]   inject: [8, 9, 10]   one position: P x_1 enters at block 8, P x_2 at block 9, …

In the second form the blocks below the first injection compute as if the position did not exist: their attention skips
it. The paper's code concatenates the vector there instead, which is equivalent for the text except that here positions
are counted with the extra one from the start, and between two blocks of `inject` it is processed like a first token,
which attends only to itself.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..compute.attention import register_attention
from ..compute.capabilities import seeded_rng
from ..compute.protocols import TraitsTask
from ..config import Adapter, Mesh, Projector, Train
from ..errors import UserError
from ..models.anatomy import cache_name, transformer_blocks
from ..planner.rules import RuleSettings, check_settings
from ..seeds import torch_generator

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

WEIGHT = "prompt_encoder.embedding.weight"
"""Plain name of the trained tensor (n, D)."""
IN_FILE = "prompt_embeddings"
"""Name of the tensor in PEFT's file."""


def attach_soft_tokens(
    backbone: PreTrainedModel, adapter: Adapter, *, task: TraitsTask, seed: int, dtype: torch.dtype
) -> PeftModel:
    """Wrap `backbone` (in place) to prepend `adapter.soft_tokens` trained vectors to every sequence's embeddings,
    preceded by the features projected by `adapter.projector`.

    They are initialised with the embeddings of tokens drawn with `seed`, as the paper advises.

    Raises UserError: a task (`flatshift.finetune.planner.rules`) or a backbone that does not support them.
    """
    from peft import PromptTuningConfig, get_peft_model

    check_settings(RuleSettings(Mesh(), Train(), adapter, cast(Any, task)))
    count = adapter.soft_tokens
    assert count is not None
    table: Any = backbone.get_input_embeddings()
    width = table.weight.shape[1]
    if width != backbone.config.get_text_config().hidden_size:
        raise UserError(f"adapter.soft_tokens: this backbone's embeddings have {width} channels, its blocks others")
    with seeded_rng(0, table.weight.device):  # PEFT initialises values that are replaced below
        config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=count, token_dim=width)
        model: Any = get_peft_model(backbone, config)
    token_ids = torch.randint(0, table.weight.shape[0], (count,), generator=torch_generator(seed, "init", WEIGHT))
    soft = model.prompt_encoder["default"].embedding
    soft.weight.data = table.weight.detach()[token_ids.to(table.weight.device)].to(dtype).clone()
    model.soft_tokens = count
    model.forward = functools.partial(_forward_own_tokens, model)
    # PEFT (0.21) detects the first generation step by the cache, which it only knows by its older name
    model.base_model_prepare_inputs_for_generation = functools.partial(
        _rename_input, model.base_model_prepare_inputs_for_generation, cache_name(), "past_key_values"
    )
    model.prepare_inputs_for_generation = functools.partial(
        _rename_input, model.prepare_inputs_for_generation, "past_key_values", cache_name()
    )
    if adapter.projector is not None:
        attach_projector(model, adapter.projector, seed=seed, dtype=dtype)
    return model


def _rename_input(
    prepare: Callable[..., dict[str, Any]], old: str, new: str, /, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    inputs = prepare(*args, **kwargs)
    if old in inputs:
        inputs[new] = inputs.pop(old)
    return inputs


def _forward_own_tokens(model: Any, **inputs: Any) -> Any:
    """Run the forward pass of PEFT's class and drop the logits of the soft tokens."""
    output = type(model).forward(model, **inputs)
    output.logits = output.logits[:, model.soft_tokens :]
    return output


FILE = "projector.safetensors"
"""File next to PEFT's own: `weight` (D, d) and `bias` (D,) of an `nn.Linear`; its metadata records where they enter."""
INPUT = "features"
"""Keyword argument of the wrapped model's forward pass: (B, K, d)."""
_MODULE = "projector"
_ATTENTION = "flatshift_hidden_places"
_HIDDEN = "hidden_places"
"""Attribute of modules whose attention skips this many positions at the front of each sequence."""


def attach_projector(model: PeftModel, projector: Projector, *, seed: int, dtype: torch.dtype) -> None:
    """Give `model`, which has soft tokens, a trained `nn.Linear(d, D)` and a forward pass that takes features.

    It is initialised like torch's own linear layers, from `seed`.

    Raises UserError: `projector.inject` names a block that does not exist, or the blocks below cannot skip a position.
    """
    owner: Any = model
    soft = owner.prompt_encoder["default"].embedding.weight
    linear = nn.Linear(projector.width, soft.shape[1], device="meta").to_empty(device=soft.device).to(dtype)
    bound = 1 / math.sqrt(projector.width)
    for name, parameter in linear.named_parameters():
        value = torch.empty(parameter.shape)
        nn.init.uniform_(value, -bound, bound, generator=torch_generator(seed, "init", f"{_MODULE}.{name}"))
        parameter.data.copy_(value)
    forward = _FeatureForward(owner, projector)
    if not isinstance(projector.inject, str):
        forward.enter_at(projector.inject)
    owner.add_module(_MODULE, linear)
    owner.soft_tokens += projector.places  # so that position counts include these too
    owner.features_before = projector
    owner.forward = forward


def blank_features(model: nn.Module, *, rows: int) -> dict[str, Tensor]:
    """Return zero features, if `model` takes any: for measuring the cost of a pass."""
    projector: Projector | None = getattr(model, "features_before", None)
    if projector is None:
        return {}
    return {INPUT: torch.zeros(rows, projector.count, projector.width, device=next(model.parameters()).device)}


class _FeatureForward:
    """Forward pass of a model with features at the front of every sequence."""

    def __init__(self, model: Any, projector: Projector) -> None:
        self.model, self.projector = model, projector
        self._entering: Tensor | None = None
        """(B, K, D) of the current forward pass, read by the blocks of `inject`."""

    def __call__(
        self, *, input_ids: Tensor, attention_mask: Tensor | None = None, features: Tensor | None = None, **options: Any
    ) -> Any:
        """Run the backbone on features, soft tokens and text.

        input_ids: (B, T).
        attention_mask: (B, T), 1 for real tokens; padding on the right.
        features: (B, K, d) float32.
        Returns: the backbone's output, with logits (B, T, V).
        """
        projector, linear = self.projector, self.model.projector
        expected = (len(input_ids), projector.count, projector.width)
        if features is None or features.shape != expected:
            shape = "none" if features is None else tuple(features.shape)
            raise UserError(
                f"this adapter reads features of the shape {expected} with these rows, and is given {shape}"
            )
        base = self.model.get_base_model()
        text = base.get_input_embeddings()(input_ids)
        projected = linear(features.to(linear.weight.dtype)).to(text.dtype)
        soft = self.model.get_prompt(batch_size=len(text)).to(text.dtype)
        is_front = isinstance(projector.inject, str)
        front = projected if is_front else projected.new_zeros(len(text), 1, text.shape[2])
        prefix = self.model.soft_tokens
        if attention_mask is not None:
            attention_mask = F.pad(attention_mask, (prefix, 0), value=1)
        self._entering = None if is_front else projected
        try:
            output = base(inputs_embeds=torch.cat([front, soft, text], dim=1), attention_mask=attention_mask, **options)
        finally:
            self._entering = None
        output.logits = output.logits[:, prefix:]
        return output

    def enter_at(self, inject: tuple[int, ...]) -> None:
        """Register hooks: the k-th vector replaces the first hidden state when the k-th block of `inject` starts."""

        base = self.model.get_base_model()
        layers = transformer_blocks(base)
        if inject[-1] >= len(layers):
            raise UserError(
                f"adapter.projector.inject: there is no block {inject[-1]}; this backbone has {len(layers)}, from 0 to "
                f"{len(layers) - 1}"
            )
        if inject[0] > 0:
            _hide_first_position(base, layers, inject[0])
        for k, number in enumerate(inject):
            layers[number].register_forward_pre_hook(functools.partial(self._replace, k), with_kwargs=True)

    def _replace(self, k: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._entering is None:  # a forward pass of the bare backbone
            return None
        hidden = args[0] if args else kwargs["hidden_states"]
        new = torch.cat([self._entering[:, k : k + 1].to(hidden.dtype), hidden[:, 1:]], dim=1)
        return ((new, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": new})


def _hide_first_position(base: Any, layers: list[nn.Module], block_count: int) -> None:
    """Make the attention of the blocks below `block_count` skip the first position of each sequence. Raises UserError:
    attention is not torch's own, or the position still affects the output of those blocks at the others."""
    config = base.config.get_text_config()
    if config._attn_implementation != "sdpa":
        raise UserError(
            f"adapter.projector.inject: the blocks below {block_count} are to leave the features' place out, which is "
            f"possible in sdpa attention, and this backbone has {config._attn_implementation}; begin with block 0, or "
            "take first"
        )
    register_attention(_ATTENTION, _attention_hiding_positions)
    config._attn_implementation = _ATTENTION
    for block in layers[:block_count]:
        for module in block.modules():
            setattr(module, _HIDDEN, 1)
    if not _is_position_hidden(base, layers[block_count]):
        raise UserError(
            f"adapter.projector.inject: the blocks of this backbone ({config.model_type}) below {block_count} cannot "
            "leave the features' place out; begin with block 0, or take first"
        )


def _attention_hiding_positions(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention function for transformers, (B, H, T, D) each → (B, T, H, D): sdpa, which in blocks that hide positions
    skips the first ones and outputs 0 for them."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    hidden = getattr(module, _HIDDEN, 0)
    if hidden:
        query, key, value = (states[:, :, hidden:] for states in (query, key, value))
        attention_mask = None if attention_mask is None else attention_mask[..., hidden:, hidden:]
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return F.pad(output, (0, 0, 0, 0, hidden, 0)) if hidden else output, None


@torch.no_grad()
def _is_position_hidden(base: Any, block: nn.Module) -> bool:
    """True if the inputs of `block` at the other positions are bit-identical, whatever the input at the first."""
    states: list[Tensor] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states.append((args[0] if args else kwargs["hidden_states"])[:, 1:])

    rows = base.get_input_embeddings().weight[:8].clone()[None]
    training = base.training
    base.eval()
    handle = block.register_forward_pre_hook(record, with_kwargs=True)
    try:
        for value in (0.0, 1.0):
            rows[:, 0] = value
            base(inputs_embeds=rows.clone(), attention_mask=torch.ones(rows.shape[:2], device=rows.device).long())
    finally:
        handle.remove()
        base.train(training)
    return len(states) == 2 and torch.equal(*states)


def write_projector(model: Any, directory: Path) -> None:
    """Write the projector of `model`, if it has one, into the existing `directory`."""
    from safetensors.torch import save_file

    projector: Projector | None = getattr(model, "features_before", None)
    if projector is None:
        return
    metadata = json.dumps({**_injection_metadata(projector), "features": projector.features})
    tensors = {name: p.detach().cpu().contiguous() for name, p in model.projector.named_parameters()}
    # a single key: safetensors writes several in arbitrary order, and a resumed run's file has to be identical
    save_file(tensors, directory / FILE, metadata={_MODULE: metadata})


def check_projector(model: Any, directory: str | Path) -> None:
    """Raise UserError if the projector in `directory` injects features elsewhere than that of `model`.

    Does nothing if either has none. A damaged file is reported by `read_projector`.
    """
    from safetensors import safe_open

    projector: Projector | None = getattr(model, "features_before", None)
    file = Path(directory) / FILE
    if projector is None or not file.is_file():
        return
    with safe_open(file, "pt") as opened:
        metadata = json.loads((opened.metadata() or {}).get(_MODULE, "{}"))
    own = _injection_metadata(projector)
    stored, expected = (
        " and ".join(f"{name} {json.dumps(entry.get(name))}" for name in own) for entry in (metadata, own)
    )
    if stored != expected:
        raise UserError(f"{file}: this projector has {stored}, and adapter.projector here {expected}; set them alike")


def _injection_metadata(projector: Projector) -> dict[str, Any]:
    return {"inject": projector.inject, "vectors": projector.count}


def read_projector(directory: str | Path) -> dict[str, Tensor]:
    """Return the projector in `directory` by plain name (`projector.weight`, `projector.bias`); empty if there is none.
    Raises UserError: the file is not a valid safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = Path(directory) / FILE
    if not file.is_file():
        return {}
    try:
        return {f"{_MODULE}.{name}": tensor for name, tensor in load_file(file).items()}
    except SafetensorError as error:
        raise UserError(f"{file} is damaged or cut short: {error}") from error
