"""The real Hugging Face Trainer with our callback and mixin: equal to plain PyTorch loops, and clean after."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from flatshift.regularizers import (
    ASAM,
    BAR,
    GGPO,
    MGPO,
    SAM,
    BiLora,
    LoraSAM,
    Plain,
    PlainRegularizer,
    RegularizerCallback,
    RegularizerError,
    TwoPassMixin,
    build,
)
from tests.regularizers.methods.test_sam import bits, forwards, theta
from tests.support.regularizer_models import tiny_llama, tokens, with_lora

RATE, CLIP = 1e-2, 0.05
NAMES = TrainingArguments.__dataclass_fields__
CHECKPOINTING = next(name for name in ("activation_checkpointing", "gradient_checkpointing") if name in NAMES)
"""The bound is far below the gradients' norm: every step is clipped."""


class InOrder(Trainer):
    """Rows as they come, so that a plain loop can have the same."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset)


class TwoPassTrainer(TwoPassMixin, InOrder):
    pass


def rows(count: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": ids, "labels": ids} for ids in tokens(count, 10)]


def trainer(
    folder: Path, model: Any, *callbacks: Any, kind: Any = InOrder, steps: int = 4, accumulate: int = 2, **more: Any
) -> Any:
    """Two rows a micro-batch; AdamW at a constant rate."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": accumulate,
        "max_steps": steps,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": CLIP,
        "optim": "adamw_torch",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 11,
    }
    made = kind(
        model,
        TrainingArguments(**(settings | more)),
        train_dataset=rows(2 * accumulate * 8),
        eval_dataset=rows(2),
        callbacks=list(callbacks),
    )
    return made


def micros(step: int, accumulate: int = 2) -> list[Tensor]:
    """What the Trainer's step sees."""
    return list(tokens(2 * accumulate * 8, 10).chunk(8)[step].chunk(accumulate))


def plain_loop(model: Any, config: Any, *, steps: int = 4, accumulate: int = 2) -> tuple[list[float], Any]:
    """The protocol in plain PyTorch: the losses at the weights themselves, and the regularizer, still attached."""
    regularizer = build(config).attach(model.train(), seed=11, total_steps=steps)
    optimizer = torch.optim.AdamW(theta(model).values(), lr=RATE, weight_decay=0.0)
    losses = []
    for t in range(steps):
        with regularizer.step(t) as passes:
            for index in passes:
                for number, ids in enumerate(micros(t, accumulate)):
                    regularizer.on_micro_batch(number)
                    loss = model(input_ids=ids, labels=ids).loss / accumulate
                    loss.backward()
                    losses += [float(loss.detach())] if index == 0 else []
        torch.nn.utils.clip_grad_norm_(theta(model).values(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        regularizer.after_optimizer_step(RATE)
    return [sum(losses[t * accumulate : (t + 1) * accumulate]) for t in range(steps)], regularizer


class Keep(TrainerCallback):
    """Copies the regularizer's state after every step."""

    def __init__(self, callback: RegularizerCallback) -> None:
        self.callback = callback
        self.states: list[dict[str, Tensor]] = []
        self.forwards: list[list[str]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.states.append(self.callback.regularizer.state_dict())

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.forwards.append(forwards(kwargs["model"]))


PLAIN = {accumulate: plain_loop(with_lora(tiny_llama()), Plain(), accumulate=accumulate)[0] for accumulate in (1, 3)}


def near(one: Any, other: Any, tolerance: float = 2e-5) -> bool:
    mine, theirs = theta(one), theta(other)
    return all(torch.allclose(mine[name], theirs[name], rtol=0, atol=tolerance) for name in theirs)


def losses_of(run: Any) -> list[float]:
    return [line["loss"] for line in run.state.log_history if "loss" in line]


def test_the_plain_callback_and_a_zero_sigma_change_no_bit(tmp_path: Path) -> None:
    results = []
    for callback in ([], [RegularizerCallback(Plain())], [RegularizerCallback(GGPO(sigma=0.0))]):
        model = with_lora(tiny_llama(), lora_dropout=0.2)
        run = trainer(tmp_path, model, *callback)
        run.train()
        results.append((bits(model), losses_of(run)))
    assert results[0] == results[1] == results[2]
    assert len(results[0][1]) == 4


@pytest.mark.parametrize(
    ("config", "kind", "accumulate"),
    [
        (GGPO(sigma=0.2, refresh=2), InOrder, 1),
        (GGPO(sigma=0.2, refresh=2), InOrder, 3),
        (GGPO(sigma=0.2, refresh=2), TwoPassTrainer, 3),
        (BiLora(rho=0.5), InOrder, 3),
        (MGPO(rho=0.3), InOrder, 3),
        (BAR(alpha=20.0), InOrder, 3),
    ],
)
def test_one_pass_methods_equal_a_plain_loop(tmp_path: Path, config: Any, accumulate: int, kind: Any) -> None:
    model, twin = with_lora(tiny_llama()), with_lora(tiny_llama())
    callback = RegularizerCallback(config)
    keep = Keep(callback)
    run = trainer(tmp_path, model, callback, keep, kind=kind, accumulate=accumulate)
    before = forwards(model)
    run.train()
    wanted, reference = plain_loop(twin, config, accumulate=accumulate)
    assert losses_of(run) == pytest.approx(wanted, abs=1e-4)
    assert near(model, twin)
    state = reference.state_dict()
    assert set(keep.states[-1]) == set(state)
    for name, value in state.items():
        assert torch.allclose(keep.states[-1][name], value, rtol=1e-2, atol=1e-4), name
    assert forwards(model) == before and not callback.attached
    lines = [line for line in run.state.log_history if "loss" in line]
    figures = {name: value for name, value in lines[-1].items() if name.startswith("regularizer/")}
    assert figures == pytest.approx({f"regularizer/{n}": v for n, v in reference.metrics().items()}, rel=1e-2)
    assert len(lines) == 4 and all(figures.keys() <= line.keys() for line in lines)
    assert max(abs(loss - plain) for loss, plain in zip(wanted, PLAIN[accumulate], strict=True)) > 2e-3


class Reader(PlainRegularizer):
    """Reads the adapter's gradient when its step is left, as momentum methods do."""

    def attach(self, model: Any, **kwargs: Any) -> Any:
        self.model, self.norms, self.micros, self.rates, self.seeds = model, [], [], [], kwargs["seed"]
        return self

    @contextlib.contextmanager
    def step(self, t: int, *, loss_scale: float = 1.0) -> Iterator[Any]:
        self.micros.append([])
        yield range(1)
        norm = torch.cat([p.grad.flatten() for p in theta(self.model).values()]).norm()
        self.norms.append(float(norm) / loss_scale)

    def on_micro_batch(self, index: int) -> None:
        self.micros[-1].append(index)

    def after_optimizer_step(self, rate: float) -> None:
        self.rates.append(rate)


def plain_norms(model: Any, steps: int) -> list[float]:
    reader = Reader()
    optimizer = torch.optim.AdamW(theta(model).values(), lr=RATE, weight_decay=0.0)
    reader.attach(model, seed=0)
    for t in range(steps):
        with reader.step(t):
            for ids in micros(t):
                (model(input_ids=ids, labels=ids).loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(theta(model).values(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return reader.norms


def scale_losses(run: Any, scaler: torch.amp.GradScaler) -> None:
    """What fp16 does on a GPU; accelerate refuses fp16 on the CPU."""
    run.accelerator.scaler = scaler
    run.accelerator.unscale_gradients = lambda: scaler.unscale_(run.optimizer.optimizer)


def test_the_rate_is_that_of_the_factors(tmp_path: Path) -> None:
    reader, model = Reader(), with_lora(tiny_llama())
    head = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([{"params": [head], "lr": 0.5}, {"params": [*theta(model).values()], "lr": RATE}])
    run = trainer(tmp_path, model, RegularizerCallback(reader, seed=77), kind=InOrder, steps=2)
    run.optimizer = optimizer
    run.train()
    assert reader.rates == [RATE] * 2


@pytest.mark.parametrize("kind", [InOrder, TwoPassTrainer])
@pytest.mark.parametrize("how", ["plain", "scaler", "checkpointing", "reentrant checkpointing"])
def test_gradients_are_read_before_they_are_unscaled_and_clipped(tmp_path: Path, kind: Any, how: str) -> None:
    wanted = plain_norms(with_lora(tiny_llama()), 3)
    reader, model, more = Reader(), with_lora(tiny_llama()), {}
    if "checkpointing" in how:
        more = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": how.startswith("reentrant")}}
    run = trainer(tmp_path, model, RegularizerCallback(reader, seed=77), kind=kind, steps=3, **more)
    if how == "scaler":
        scale_losses(run, torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1))
    run.train()
    assert reader.norms == pytest.approx(wanted, rel=1e-3) and min(wanted) > 2 * CLIP
    assert reader.micros == [[0, 1]] * 3 and reader.rates == [RATE] * 3 and reader.seeds == 77


def test_a_skipped_update_is_none(tmp_path: Path) -> None:
    reader, model = Reader(), with_lora(tiny_llama())
    run = trainer(tmp_path, model, RegularizerCallback(reader), steps=3)
    scale_losses(run, torch.amp.GradScaler("cpu"))
    factor = next(iter(theta(model).values()))
    hook = factor.register_hook(lambda gradient: gradient / 0.0 if reader.norms == [] else gradient)
    run.train()
    hook.remove()
    assert len(reader.norms) == 3 and len(reader.rates) == 2


@pytest.mark.parametrize(
    ("config", "accumulate"), [(LoraSAM(rho=0.3), 1), (LoraSAM(rho=0.3), 3), (ASAM(rho=2.0), 3), (SAM(rho=0.3), 3)]
)
def test_two_pass_methods_equal_a_plain_loop(tmp_path: Path, config: Any, accumulate: int) -> None:
    model, twin = with_lora(tiny_llama()), with_lora(tiny_llama())
    run = trainer(tmp_path, model, RegularizerCallback(config), kind=TwoPassTrainer, accumulate=accumulate)
    run.train()
    wanted, reference = plain_loop(twin, config, accumulate=accumulate)
    assert losses_of(run) == pytest.approx(wanted, abs=2e-4)
    assert near(model, twin) and forwards(model) == []
    figures = {name: value for name, value in run.state.log_history[-2].items() if name.startswith("regularizer/")}
    assert figures == pytest.approx({f"regularizer/{n}": v for n, v in reference.metrics().items()}, rel=1e-2)


def test_both_passes_drop_the_same(tmp_path: Path) -> None:
    """ρ = 0 repeats the pass: with the same dropout it is plain training, bit for bit."""
    results = []
    for regularized in (False, True):
        model = with_lora(tiny_llama(), lora_dropout=0.3)
        callbacks = [RegularizerCallback(LoraSAM(rho=0.0))] if regularized else []
        run = trainer(tmp_path, model, *callbacks, kind=TwoPassTrainer)
        run.train()
        results.append((bits(model), losses_of(run)))
    assert results[0] == results[1]


def test_two_passes_without_the_mixin_are_refused(tmp_path: Path) -> None:
    model = with_lora(tiny_llama())
    with pytest.raises(RegularizerError, match=r"AdapterSAM takes two passes.*TwoPassMixin"):
        trainer(tmp_path, model, RegularizerCallback(LoraSAM())).train()
    callback = RegularizerCallback(LoraSAM())
    trainer(tmp_path, model, callback, kind=TwoPassTrainer, steps=1).train()
    with pytest.raises(RegularizerError, match="TwoPassMixin"):
        trainer(tmp_path, model, callback).train()
    with pytest.raises(RegularizerError, match=r"torch_compile.*TwoPassMixin"):
        trainer(tmp_path, model, RegularizerCallback(GGPO()), torch_compile=True).train()


CONFIGS = {"ggpo": GGPO(sigma=0.2, refresh=2), "bi-lora": BiLora(rho=0.5), "lora-sam": LoraSAM(rho=0.3)}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, config: Any) -> None:
    def run(folder: Path, resume: Any = None) -> tuple[Any, Any, Keep]:
        model = with_lora(tiny_llama(), lora_dropout=0.2)
        callback = RegularizerCallback(config)
        keep = Keep(callback)
        made = trainer(folder, model, callback, keep, kind=TwoPassTrainer, steps=5, save_strategy="steps", save_steps=3)
        made.train(resume_from_checkpoint=resume)
        return model, made, keep

    model, whole, keep = run(tmp_path / "a")
    assert (tmp_path / "a/checkpoint-3/regularizer.safetensors").is_file()
    moved = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "a/checkpoint-3", moved)
    again, resumed, later = run(tmp_path / "b", resume=str(moved))
    assert len(later.states) == 2 and bits(model) == bits(again)
    assert losses_of(whole) == losses_of(resumed)
    assert all(torch.equal(value, later.states[-1][name]) for name, value in keep.states[-1].items())


def test_plain_training_resumes_from_any_plain_checkpoint(tmp_path: Path) -> None:
    for callbacks, steps, resume in (([], 2, None), ([RegularizerCallback(Plain())], 4, True)):
        run = trainer(tmp_path, with_lora(tiny_llama()), *callbacks, steps=steps, save_strategy="steps", save_steps=2)
        run.train(resume_from_checkpoint=resume)
    assert run.state.global_step == 4


def test_a_resume_with_another_state_is_refused(tmp_path: Path) -> None:
    def run(config: Any, *, resume: Any = None, steps: int = 2, folder: str = "a", **more: Any) -> None:
        made = trainer(
            tmp_path / folder,
            with_lora(tiny_llama()),
            RegularizerCallback(config, **more),
            steps=steps,
            save_strategy="steps",
            save_steps=2,
        )
        made.train(resume_from_checkpoint=resume)

    run(GGPO(sigma=0.2))
    first = str(tmp_path / "a/checkpoint-2")
    with pytest.raises(RegularizerError, match=r"says regularizer GGPORegularizer.*BiLoraRegularizer"):
        run(BiLora(), resume=first, steps=4)
    with pytest.raises(RegularizerError, match=r"train\.seed"):
        run(GGPO(sigma=0.2), resume=first, steps=4, seed=5)
    with pytest.raises(RegularizerError, match=r"holds no regularizer\.json.*resume_from"):
        run(GGPO(sigma=0.2), resume=first, steps=4, folder="b")
    run(GGPO(sigma=0.3), folder="b")
    with pytest.raises(RegularizerError, match="of another run"):
        run(GGPO(sigma=0.2), resume=first, steps=4, folder="b")
    run(GGPO(sigma=0.2), resume=first, steps=4, folder="b", resume_from=first)


class Stop(TrainerCallback):
    """Raises, or stops the epoch, after the first micro-batch of the second step."""

    def __init__(self, error: type[BaseException] | None) -> None:
        self.error = error

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.global_step == 1:
            if self.error is not None:
                raise self.error
            control.should_training_stop = True
        return control


@pytest.mark.parametrize(
    ("config", "error"),
    [(GGPO(sigma=0.2), KeyboardInterrupt), (LoraSAM(rho=0.3), KeyboardInterrupt), (SAM(rho=0.3), RuntimeError)],
)
def test_an_error_leaves_the_model_as_a_plain_run_would(tmp_path: Path, config: Any, error: type) -> None:
    model = with_lora(tiny_llama())
    callback = RegularizerCallback(config)
    two = not isinstance(config, GGPO)
    run = trainer(tmp_path, model, callback, Stop(error), kind=TwoPassTrainer if two else InOrder)
    with pytest.raises(error):
        if two:
            run.train()
        else:
            with callback:
                run.train()
    assert forwards(model) == [] and not model._forward_hooks
    twin = with_lora(tiny_llama())
    plain_loop(twin, config, steps=1)[1].detach()
    assert near(model, twin)
    build(GGPO()).attach(model, seed=0, total_steps=1)


def test_an_epoch_that_stops_inside_a_step_is_abandoned(tmp_path: Path) -> None:
    model = with_lora(tiny_llama())
    callback = RegularizerCallback(GGPO(sigma=0.2))
    run = trainer(tmp_path, model, callback, Stop(None), eval_strategy="epoch")
    run.train()
    assert run.state.global_step == 1 and not callback.in_step and forwards(model) == []


@pytest.mark.parametrize("config", [GGPO(sigma=0.3), SAM(rho=0.5)], ids=lambda c: c.kind)
def test_evaluation_in_the_middle_sees_the_plain_model(tmp_path: Path, config: Any) -> None:
    model = with_lora(tiny_llama())
    callback = RegularizerCallback(config)
    keep = Keep(callback)
    run = trainer(tmp_path, model, callback, keep, kind=TwoPassTrainer, eval_strategy="steps", eval_steps=2)
    run.train()
    assert len(keep.forwards) >= 2 and not any(keep.forwards)
    model.eval()
    last = [line["eval_loss"] for line in run.state.log_history if "eval_loss" in line][-1]
    ids = tokens(2, 10)
    assert last == pytest.approx(float(model(input_ids=ids, labels=ids).loss), rel=1e-4)


@pytest.mark.bf16
@pytest.mark.parametrize("config", [GGPO(sigma=0.2), LoraSAM(rho=0.3)], ids=["ggpo", "lora-sam"])
def test_bf16_with_checkpointing(tmp_path: Path, config: Any) -> None:
    model = with_lora(tiny_llama(dtype=torch.bfloat16))
    frozen = {n: b for n, b in bits(model).items() if "lora_" not in n}
    run = trainer(
        tmp_path,
        model,
        RegularizerCallback(config),
        kind=TwoPassTrainer,
        bf16=True,
        steps=2,
        max_grad_norm=1.0,
        **{CHECKPOINTING: True},
    )
    run.train()
    losses = losses_of(run)
    assert all(0 < loss < 20 for loss in losses)
    assert {n: b for n, b in bits(model).items() if "lora_" not in n} == frozen


def test_a_loss_that_is_not_the_models_is_refused_and_the_mixin_takes_it(tmp_path: Path) -> None:
    class Inside(InOrder):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            return model.base_model.model(**inputs).loss

    class InsideTwoPass(TwoPassMixin, Inside):
        pass

    model = with_lora(tiny_llama())
    with pytest.raises(RegularizerError, match=r"not made from the outputs.*TwoPassMixin"):
        trainer(tmp_path, model, RegularizerCallback(GGPO(sigma=0.2)), kind=Inside).train()
    assert forwards(model) == []
    trainer(tmp_path, with_lora(tiny_llama()), RegularizerCallback(GGPO(sigma=0.2)), kind=InsideTwoPass).train()


def test_the_mixin_without_a_regularizer_is_the_trainer(tmp_path: Path) -> None:
    results = []
    for kind in (InOrder, TwoPassTrainer):
        model = with_lora(tiny_llama())
        trainer(tmp_path, model, kind=kind).train()
        results.append(bits(model))
    assert results[0] == results[1]
