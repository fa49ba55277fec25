"""Regularizers for the Hugging Face `Trainer` and its subclasses (such as TRL's SFTTrainer).

    trainer = Trainer(model, args, train_dataset=rows, callbacks=[RegularizerCallback(GGPO(sigma=0.05))])
    trainer.train()

supports all one-pass methods. The SAM kind takes a second pass, which no callback can make:

    class SamTrainer(TwoPassMixin, Trainer): ...
    trainer = SamTrainer(model, args, train_dataset=rows, callbacks=[RegularizerCallback(LoraSAM(rho=0.05))])

If training raises (Ctrl-C too), a `Trainer` does not notify its callbacks. With `TwoPassMixin`, which supports one-pass
methods as well, or inside `with RegularizerCallback(...) as callback:`, the model is released all the same; else call
`callback.close()`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.trainer_callback import TrainerCallback

from flatshift.regularizers.config import RegularizerConfig, RegularizerError
from flatshift.regularizers.layers.sharded import is_sharded
from flatshift.regularizers.mesh import SINGLE_PROCESS, Placement
from flatshift.regularizers.protocol import Regularizer, build

if TYPE_CHECKING:
    from typing import Self

    from transformers import Trainer
else:
    Trainer = object

_log = logging.getLogger(__name__)

TENSORS, RECORD = "regularizer.safetensors", "regularizer.json"


class StepAbandoned(Exception):
    """Raised into a step to end it unfinished; nothing is learned from it."""


class ReplicaPlacement(Placement):
    """Placement of a process under DistributedDataParallel, which averages gradients over the processes."""

    def __init__(self, device: torch.device) -> None:
        import torch.distributed as dist

        self._device, self._rank, self._ranks = device, dist.get_rank(), dist.get_world_size()
        self.gradient_scale = float(self._ranks)

    @property
    def device(self) -> torch.device:
        return self._device

    def sum_data(self, tensor: Tensor) -> None:
        import torch.distributed as dist

        dist.all_reduce(tensor)

    @property
    def share(self) -> tuple[int, int]:
        return self._rank, self._ranks


class RegularizerCallback(TrainerCallback):
    """Attaches a regularizer for the duration of `Trainer.train` and drives it through the optimizer steps.

    A step is left when the backward pass of its last micro-batch ends: before the Trainer unscales and clips the
    gradients, so methods that read them see the true ones. Accumulation, bf16 and fp16 autocast, gradient checkpointing
    and DistributedDataParallel are supported; evaluation and saving happen between steps and see the plain model. The
    state is saved in the Trainer's checkpoints and loaded with `resume_from_checkpoint`. Metrics go into the Trainer's
    logs as `regularizer/<name>`: into `trainer.state.log_history` and the printed log; reporters such as TensorBoard
    run before a user's callbacks and see them only with `TwoPassMixin`.
    """

    def __init__(
        self,
        regularizer: Regularizer | RegularizerConfig,
        *,
        seed: int | None = None,
        resume_from: str | os.PathLike[str] | None = None,
    ) -> None:
        """regularizer: settings, or a regularizer that is not attached. seed: keys its draws; None: the seed of the
        TrainingArguments. resume_from: the checkpoint folder whose state is loaded on a resume, if it is not
        `<output_dir>/checkpoint-<step>`. `TwoPassMixin` finds it by itself."""
        self.regularizer = regularizer if isinstance(regularizer, Regularizer) else build(regularizer)
        self.seed = seed
        self.resume_from = None if resume_from is None else Path(resume_from)
        self.guarded = False
        """True if a `TwoPassMixin` makes the passes, ends the steps and cleans up."""
        self.attached = False
        self._step: contextlib.AbstractContextManager[Any] | None = None
        self._passes: Iterator[int] = iter(())
        self.micro_index = 0
        self._gradient_state: Any = None
        self._group = 0
        """Parameter group of the factors, whose learning rate the regularizer reads."""
        self._end_is_queued = False
        self._forward_hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()  # the Trainer starts over after running out of memory (auto_find_batch_size)
        model, name = kwargs["model"], type(self.regularizer).__name__
        if not self.guarded:
            if self.regularizer.passes > 1:
                raise RegularizerError(
                    f"{name} takes two passes over a step's batches, which a callback cannot make; train with "
                    "`class SamTrainer(TwoPassMixin, Trainer): ...` (from flatshift.regularizers import TwoPassMixin)"
                )
            if getattr(args, "torch_compile", False):
                raise RegularizerError(
                    "torch_compile hides from RegularizerCallback when a backward pass ends; train with "
                    "`class MyTrainer(TwoPassMixin, Trainer): ...` (from flatshift.regularizers import TwoPassMixin)"
                )
        placement = _training_placement(args, model)
        seed = args.seed if self.seed is None else self.seed
        self.regularizer.attach(
            model, seed=seed, total_steps=state.max_steps, placement=None if placement is SINGLE_PROCESS else placement
        )
        self.attached = True
        factors = {id(p) for name, p in model.named_parameters() if ".lora_" in name}
        groups = (any(id(p) in factors for p in group["params"]) for group in kwargs["optimizer"].param_groups)
        self._group = next((number for number, has_factors in enumerate(groups) if has_factors), 0)
        self._gradient_state = kwargs["optimizer"].gradient_state
        try:
            if state.global_step > 0:
                self._restore(args, state)
        except BaseException:
            self.close()
            raise
        if not self.guarded:
            self._forward_hook = model.register_forward_hook(self._hook_output)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.abandon()
        scaler = getattr(kwargs["optimizer"], "scaler", None)
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        step = self.regularizer.step(state.global_step, loss_scale=scale)
        self._passes = iter(step.__enter__())
        self._step, self._end_is_queued = step, False
        next(self._passes)
        self.begin_micro_batch(0)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._step is not None:
            self.begin_micro_batch(self.micro_index + 1)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._step is not None:
            self.abandon()
            raise RegularizerError(
                "the loss was not made from the outputs of the model's own forward pass, so RegularizerCallback could "
                "not tell when its backward pass ended; train with `class MyTrainer(TwoPassMixin, Trainer): ...`"
            )

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = kwargs["optimizer"]
        if not optimizer.step_was_skipped:  # a loss scaler skips steps with an infinite gradient
            self.regularizer.after_optimizer_step(float(optimizer.param_groups[self._group]["lr"]))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.abandon()  # another callback may have stopped the epoch inside a step

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.attached and logs is not None and "loss" in logs and not self.guarded:
            figures = self.figures()
            logs.update(figures)
            state.log_history[-1].update(figures)

    @property
    def in_step(self) -> bool:
        """True between the begin and the end of a step."""
        return self._step is not None

    def next_pass(self) -> bool:
        """Begin the next pass of the step and return True, or return False if there is none."""
        if next(self._passes, None) is None:
            return False
        self.begin_micro_batch(0)
        return True

    def begin_micro_batch(self, index: int) -> None:
        """Announce micro-batch `index` of the pass."""
        self.micro_index = index
        self.regularizer.on_micro_batch(index)

    def end_step(self) -> None:
        """End the step after all its backward passes."""
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)

    def abandon(self) -> None:
        """Undo an unfinished step without learning from it; no-op outside a step."""
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(StepAbandoned, StepAbandoned("the step was not finished"), None)

    def close(self) -> None:
        """Release the model, in whatever state training ended. Calling it twice is harmless."""
        self.abandon()
        if self._forward_hook is not None:
            self._forward_hook.remove()
            self._forward_hook = None
        if self.attached:
            self.regularizer.detach()
            self.attached = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _hook_output(self, model: nn.Module, inputs: Any, output: Any) -> None:
        """Forward hook: when backward reaches the first of these outputs, the end of the step is queued."""
        if self.in_step and self._gradient_state.sync_gradients and torch.is_grad_enabled():
            for tensor in _output_tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._queue_end)

    def _queue_end(self, gradient: Tensor) -> None:
        if self.in_step and not self._end_is_queued:
            self._end_is_queued = True
            # Queued callbacks run once all gradients are accumulated. Queueing again from inside one runs it after the
            # callbacks that DDP has queued meanwhile, when its gradients are averaged.
            _queue_callback(lambda: _queue_callback(self.end_step))

    def figures(self) -> dict[str, float]:
        """Return the regularizer's metrics under their names in the logs."""
        return {f"regularizer/{name}": value for name, value in self.regularizer.metrics().items()}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.attached:
            return
        tensors = self.regularizer.state_dict()
        folder = _checkpoint_folder(args, state)
        if not args.should_save:
            return
        if not folder.is_dir():  # a hyperparameter search names its folders differently
            _log.warning("no folder %s: the regularizer's state is not saved with this checkpoint", folder)
            return
        from safetensors.torch import save_file

        record = {"regularizer": type(self.regularizer).__name__, "step": state.global_step}
        save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, folder / "writing")
        (folder / "writing").replace(folder / TENSORS)
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    def _restore(self, args: Any, state: Any) -> None:
        """Load the state of the checkpoint that the Trainer resumes from. Raises RegularizerError if it is missing or
        another regularizer's."""
        folder = self.resume_from or _checkpoint_folder(args, state)
        advice = "give RegularizerCallback(..., resume_from=<the checkpoint folder>)"
        if not (folder / RECORD).is_file() and not self.regularizer.state_dict():
            return
        if not (folder / RECORD).is_file():
            raise RegularizerError(
                f"training resumes after step {state.global_step}, but {folder} holds no {RECORD}; {advice}, or train "
                "again"
            )
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        for key, value in {"regularizer": type(self.regularizer).__name__, "step": state.global_step}.items():
            if record[key] != value:
                raise RegularizerError(
                    f"{folder / RECORD} says {key} {record[key]}, but this run has {value}; {advice} of this run"
                )
        history = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
        if json.dumps(history) != json.dumps(state.log_history):
            raise RegularizerError(f"{folder} is of another run than the one that is resumed; {advice}")
        from safetensors.torch import load_file

        self.regularizer.load_state_dict(load_file(folder / TENSORS, device=str(args.device)))


def _checkpoint_folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _queue_callback(action: Any) -> None:
    """Run `action` at the end of the current backward pass, as DDP and FSDP2 do with their callbacks."""
    torch.autograd.Variable._execution_engine.queue_callback(action)  # type: ignore[attr-defined]


def _output_tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping | list | tuple):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from _output_tensors(value)


def _training_placement(args: Any, model: nn.Module) -> Placement:
    """Return the placement for one process or DDP replicas. Raises RegularizerError for other multi-device setups."""
    if args.n_gpu > 1:
        raise RegularizerError(
            f"the Trainer splits batches over {args.n_gpu} GPUs of one process (DataParallel), on copies of the model "
            "that no regularizer sees; start it with `torchrun --nproc-per-node`"
        )
    sharded = next((name for name, parameter in model.named_parameters() if is_sharded(parameter)), None)
    if sharded is not None or args.fsdp or args.deepspeed:
        problem = f"{sharded} is sharded" if sharded else "FSDP or DeepSpeed shards the model"
        raise RegularizerError(
            f"{problem}, and the Trainer does not say how; train with DistributedDataParallel, or sharded with "
            "`flatshift train`"
        )
    return ReplicaPlacement(args.device) if args.world_size > 1 else SINGLE_PROCESS


class TwoPassMixin(Trainer):  # type: ignore[misc]
    """`class SamTrainer(TwoPassMixin, Trainer): ...` makes both passes of the SAM kind; give it a RegularizerCallback.

    The first pass runs a step's micro-batches as they come; after the last one, the second pass runs all of them again,
    each with its original random state (dropout). The logged loss is the first pass's, at the weights themselves.
    One-pass methods, and no regularizer at all, are supported too. What a Trainer counts in `_prepare_inputs` or
    `compute_loss` has both passes, such as the steps of TRL's GRPOTrainer and the `num_tokens` that SFTTrainer logs.
    """

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        callback = self._regularizer()
        if callback is None:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        callback.guarded, resume_from = True, callback.resume_from
        if isinstance(resume_from_checkpoint, str | os.PathLike):
            callback.resume_from = Path(resume_from_checkpoint)
        self._window: list[tuple[Any, list[Tensor]]] = []
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            callback.close()
            callback.guarded, callback.resume_from = False, resume_from

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        callback = self._regularizer()
        if callback is None or not callback.in_step:
            return super().training_step(model, inputs, *args, **kwargs)
        if callback.regularizer.passes > 1:
            if callback.micro_index == 0:
                self._window = []
            # A copy, because training_step may remove entries from its inputs.
            self._window.append((copy.copy(inputs), _random_state(self.args.device)))
        loss = super().training_step(model, inputs, *args, **kwargs)
        if self.accelerator.sync_gradients:
            while callback.next_pass():
                for index, (inputs_copy, state) in enumerate(self._window):
                    if index:
                        callback.begin_micro_batch(index)
                    _set_random_state(state, self.args.device)
                    last = index + 1 == len(self._window)
                    # DDP must average only once, in the last backward of the pass.
                    with contextlib.nullcontext() if last else self.accelerator.no_sync(model):
                        super().training_step(model, copy.copy(inputs_copy), *args, **kwargs)
            self._window = []
            callback.end_step()
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        callback = self._regularizer()
        if callback is not None and callback.guarded and callback.attached and "loss" in logs:
            logs = {**logs, **callback.figures()}
        super().log(logs, *args, **kwargs)

    def _regularizer(self) -> RegularizerCallback | None:
        return next((c for c in self.callback_handler.callbacks if isinstance(c, RegularizerCallback)), None)


def _random_state(device: torch.device) -> list[Tensor]:
    state = [torch.get_rng_state()]
    return [*state, torch.cuda.get_rng_state(device)] if device.type == "cuda" else state


def _set_random_state(state: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)
