"""Soft tokens: train vectors before every sequence and nothing else (prompt tuning, Lester et al., arXiv 2104.08691),
by PEFT.

They are the soft prompt of eP-ALM (Shukor et al., arXiv 2303.11403), whose projector is in `projector`. The wrapped
model returns logits for the example's own tokens only, so losses and metrics are not affected by the soft tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from ..compute.capabilities import seeded_rng
from ..config import Adapter, Mesh, Train
from ..errors import UserError
from ..models.anatomy import cache_name
from ..planner.rules import RuleSettings, check_settings
from ..seeds import torch_generator
from .projector import attach_projector
from .settings import AdapterTask

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

WEIGHT = "prompt_encoder.embedding.weight"
"""Plain name of the trained tensor (n, D)."""
IN_FILE = "prompt_embeddings"
"""Name of the tensor in PEFT's file."""


def attach_soft_tokens(
    backbone: PreTrainedModel, adapter: Adapter, *, task: AdapterTask, seed: int, dtype: torch.dtype
) -> PeftModel:
    """Wrap `backbone` (in place) to prepend `adapter.soft_tokens` trained vectors to every sequence's embeddings,
    preceded by the features projected by `adapter.projector`.

    They are initialised with the embeddings of tokens drawn with `seed`, as the paper advises.

    Raises:
        UserError: a task (`flatshift.finetune.planner.rules`) or a backbone that does not support them.
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
    drawn = torch.randint(0, table.weight.shape[0], (count,), generator=torch_generator(seed, "init", WEIGHT))
    soft = model.prompt_encoder["default"].embedding
    soft.weight.data = table.weight.detach()[drawn.to(table.weight.device)].to(dtype).clone()
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
    """Return the inputs of a generation step with one of them renamed."""
    inputs = prepare(*args, **kwargs)
    if old in inputs:
        inputs[new] = inputs.pop(old)
    return inputs


def _forward_own_tokens(model: Any, **inputs: Any) -> Any:
    """Run the forward pass of PEFT's class and drop the logits of the soft tokens."""
    output = type(model).forward(model, **inputs)
    output.logits = output.logits[:, model.soft_tokens :]
    return output
