"""A training step rehearsed for a device that is not here: on tensors without values, every wait written down.

    with Rehearsal() as seen:
        Trainer(model.to("meta"), ...).fit()
    seen.waits            # what made the host wait for the device, and where in our code

Tensors on `meta` have shapes and dtypes; a read of one, which no one could answer, is noted and answered with a
stand-in. So a whole stage runs, and what it does shows that nothing else than a device's own tensors meet there (a host
tensor that strays in raises), that draws come from no generator of the host, and how often the host would have waited:

    read        a number, a verdict, a copy to the host
    shape       how many elements a mask picks, which only the device knows
    copy        a tensor of the host brought over while the host waits, which `non_blocking` avoids

With `on="cpu"` the host's own tensors stand for the device's, where `meta` cannot go (process groups): reads and shapes
are noted and answered truly, copies and strays cannot be told.

Autocast does not see `meta`; here it is imitated, by the lists of torch.amp's documentation. Where torch was built for
CUDA, `on="cuda"` takes fake tensors instead: they say `cuda`, go through CUDA's own dispatch, autocast included, and
need neither a driver nor a GPU. Tensors of the host are real then.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import flatshift
from flatshift.finetune.compute.capabilities import CUDA, Capabilities, override_capabilities
from flatshift.regularizers.layers import signs, sites

aten = torch.ops.aten
_HOUSE = Path(flatshift.__file__).parent
_OWN = str(Path(__file__).resolve())

_SIZED = frozenset({"nonzero", "masked_select", "unique2", "_unique2", "unique_dim", "unique_consecutive", "bincount"})
"""Operators whose result's shape depends on values."""
_INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
_CHECKED = frozenset({"_linalg_check_errors"})
"""What linear algebra calls to see on the host whether a factorisation succeeded."""
_DRAWN = frozenset(
    {"rand", "randn", "randint", "normal_", "uniform_", "bernoulli_", "bernoulli", "random_", "randperm"}
)


@dataclass(frozen=True)
class Wait:
    """Once that the host waited for the device."""

    kind: Literal["read", "shape", "copy"]
    operator: str
    where: str
    """`file:line` of the innermost frame in our packages."""

    def __str__(self) -> str:
        return f"{self.kind} by {self.operator} at {self.where}"


class Rehearsal(contextlib.AbstractContextManager["Rehearsal"]):
    """See the module's text."""

    def __init__(self, record: Capabilities = CUDA, *, on: str = "meta") -> None:
        """
        Args:
            record: of the device that is rehearsed.
            on: the type of the tensors that stand for its own: `meta`, `cpu`, or `cuda` (fake ones).

        Raises RuntimeError for `cuda` where torch was built without it.
        """
        if on == "cuda" and not torch.backends.cuda.is_built():
            raise RuntimeError("this torch was built without CUDA and cannot hold fake CUDA tensors; rehearse on meta")
        self.record, self.on = record, on
        self.waits: list[Wait] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Rehearsal:
        with contextlib.ExitStack() as stack:
            stack.enter_context(override_capabilities(self.record, on=self.on))
            if self.on != "cpu":
                stack.enter_context(_taken_for_cuda())
            if self.on == "cuda":
                stack.enter_context(_fake_tensors())
            calls = _Calls(self)
            stack.enter_context(calls)
            stack.enter_context(calls.in_backward())
            stack.enter_context(_Operators(self))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def note(self, kind: Literal["read", "shape", "copy"], operator: str) -> None:
        """Write down a wait of the code that is running."""
        self.waits.append(Wait(kind, operator, place()))

    def holds(self, value: Any) -> bool:
        """Whether `value` is a tensor of the rehearsed device."""
        return isinstance(value, Tensor) and value.device.type == self.on


def place() -> str:
    """`file:line` of the innermost frame in our packages."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(f"{_HOUSE}/") and name != _OWN:
            return f"{Path(name).relative_to(_HOUSE)}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside of our packages"


# --------------------------------------------------------------------------------------------- operators


class _Operators(TorchDispatchMode):
    """Sees every operator with its tensors, those of backward passes and of libraries too."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        super().__init__()
        self._rehearsal = rehearsal

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented  # seen again with the local tensors
        kwargs, name, seen = kwargs or {}, func._schema.name.partition("::")[2], self._rehearsal
        given, _ = tree_flatten((args, kwargs))
        tensors = [value for value in given if isinstance(value, Tensor)]
        here = [tensor for tensor in tensors if seen.holds(tensor)]
        if seen.on == "cpu":
            return self._on_host(name, func, args, kwargs)
        if name in _DRAWN:
            self._refuse_host_draws(name, given, here)
        if name == "_to_copy":
            return self._moved(func, args, kwargs)
        if not here:
            with self._without_fakes(given):
                return func(*args, **kwargs)
        if name == "copy_":
            return self._copied(func, args, kwargs)
        if name in ("_local_scalar_dense", "equal", "is_nonzero"):
            seen.note("read", name)
            return _number(here[0].dtype) if name == "_local_scalar_dense" else True
        if name in _CHECKED:
            seen.note("read", name)
            return None
        if name in _INDEXED:
            return func(args[0], self._counted(name, args[0], args[1]), *args[2:], **kwargs)
        strays = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.ndim]
        if strays:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in strays)
            raise RuntimeError(f"{name} at {place()}: a host tensor {shapes} meets tensors of the device")
        if name in _SIZED or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            seen.note("shape", name)
            return self._largest(name, func, args, kwargs)
        return func(*args, **kwargs)

    def _without_fakes(self, given: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
        """What is the host's alone has values, where fake tensors stand for the device's."""
        devices = (value if isinstance(value, torch.device) else getattr(value, "device", None) for value in given)
        if self._rehearsal.on != "cuda" or any(device is not None and device.type == "cuda" for device in devices):
            return contextlib.nullcontext()
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        return unset_fake_temporarily()

    def _on_host(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Where tensors of the host stand for the device's: what would wait, with its true answer."""
        if name in ("_local_scalar_dense", "equal", "is_nonzero") or name in _CHECKED:
            self._rehearsal.note("read", name)
        elif name in _SIZED or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self._rehearsal.note("shape", name)
        elif name in _INDEXED and any(index is not None and index.dtype == torch.bool for index in args[1]):
            self._rehearsal.note("shape", f"{name} by a mask")
        return func(*args, **kwargs)

    def _refuse_host_draws(self, name: str, given: Sequence[Any], here: Sequence[Tensor]) -> None:
        wanted = here or any(isinstance(v, torch.device) and v.type == self._rehearsal.on for v in given)
        if wanted and any(isinstance(v, torch.Generator) and v.device.type == "cpu" for v in given):
            raise RuntimeError(f"{name} at {place()}: a generator of the host draws on the device")

    def _moved(self, func: Any, args: Any, kwargs: Any) -> Any:
        source, seen = args[0], self._rehearsal
        target = kwargs.get("device") or source.device
        if seen.holds(source) and target.type == "cpu":
            seen.note("read", "copy to the host")
            with self._without_fakes(()):
                return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        if source.device.type == "cpu" and target.type == seen.on and not kwargs.get("non_blocking", False):
            seen.note("copy", "_to_copy")
        with self._without_fakes((source, target)):
            return func(*args, **kwargs)

    def _copied(self, func: Any, args: Any, kwargs: Any) -> Any:
        target, source, seen = args[0], args[1], self._rehearsal
        if source.device.type == target.device.type:
            return func(*args, **kwargs)
        if seen.holds(source):
            seen.note("read", "copy_ to the host")
            return target.fill_(1)
        if not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
            seen.note("copy", "copy_")
        return target

    def _counted(self, name: str, values: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """`indices` with masks as if they picked everything, and those of the host brought over."""
        results: list[Tensor | None] = []
        for index in indices:
            if index is None or (self._rehearsal.holds(index) and index.dtype not in (torch.bool, torch.uint8)):
                results.append(index)
            elif index.dtype in (torch.bool, torch.uint8):
                self._rehearsal.note("shape", f"{name} by a mask")
                whole = torch.empty(index.numel(), dtype=torch.int64, device=values.device)
                results += [whole] * index.ndim
            else:
                self._rehearsal.note("copy", f"{name} by indices of the host")
                results.append(torch.empty(index.shape, dtype=index.dtype, device=values.device))
        return results

    def _largest(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """What `name` gives where every element counts."""
        first: Tensor = args[0]
        if name == "nonzero":
            return torch.empty(first.numel(), first.ndim, dtype=torch.int64, device=first.device)
        if name == "masked_select":
            return torch.empty(first.numel(), dtype=first.dtype, device=first.device)
        if name == "bincount":
            return torch.empty(max(kwargs.get("minlength", 0), 1), dtype=torch.int64, device=first.device)
        if name == "repeat_interleave":
            return func(*args, **{**kwargs, "output_size": first.numel()})
        raise NotImplementedError(f"{name} at {place()}: its result depends on values; rehearse without it")


def _number(dtype: torch.dtype) -> Any:
    """The stand-in for a number that is read."""
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


# --------------------------------------------------------------------------------------------- calls


_LOWER = frozenset(
    {
        *("linear", "matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "einsum", "conv1d", "conv2d", "mv"),
        *("scaled_dot_product_attention", "__matmul__", "__rmatmul__", "chain_matmul", "multi_head_attention_forward"),
    }
)
"""Functions that autocast gives its own dtype."""
_WIDER = frozenset(
    {
        *("cross_entropy", "nll_loss", "mse_loss", "log_softmax", "softmax", "layer_norm", "group_norm", "norm"),
        *("exp", "log", "log1p", "pow", "__pow__", "rsqrt", "sum", "prod", "cumsum", "cosine_similarity", "cdist"),
        *("binary_cross_entropy_with_logits", "smooth_l1_loss", "softplus", "rms_norm"),
    }
)
"""Functions that autocast gives float32."""


class _Calls(TorchFunctionMode):
    """Sees calls by their Python names: what is built on the device from numbers, and what autocast would cast."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        super().__init__()
        self._rehearsal = rehearsal

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, seen, name = kwargs or {}, self._rehearsal, getattr(func, "__name__", "")
        if name == "pin_memory":
            return args[0]  # there is no device whose driver could pin it
        if seen.on == "cpu" and name in ("tolist", "numpy", "cpu"):
            seen.note("read", "copy to the host")
        if name in ("tensor", "as_tensor", "new_tensor", "asarray"):
            device = kwargs.get("device") or (args[0].device if name == "new_tensor" else "cpu")
            if seen.on != "cpu" and torch.device(device).type == seen.on and not isinstance(args[-1], Tensor):
                seen.note("copy", f"torch.{name}")  # blocking, as torch writes it
                with _quiet(seen):
                    return func(*args, **kwargs)
        if seen.on == "meta" and (name in _LOWER or name in _WIDER) and torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda") if name in _LOWER else torch.float32
            args, kwargs = _cast(args, dtype, seen.holds), _cast(kwargs, dtype, seen.holds)
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def in_backward(self) -> Iterator[None]:
        """See the calls of backward passes too, which compute forward again where activations are checkpointed."""
        plain = torch.autograd._engine_run_backward

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return plain(*args, **kwargs)

        with mock.patch.object(torch.autograd, "_engine_run_backward", run):
            yield


@contextlib.contextmanager
def _quiet(rehearsal: Rehearsal) -> Iterator[None]:
    """What is noted inside was noted already."""
    before = len(rehearsal.waits)
    yield
    del rehearsal.waits[before:]


def _cast(given: Any, dtype: torch.dtype, holds: Callable[[Any], bool]) -> Any:
    """`given` with the device's floating tensors in `dtype`; float64 stays."""
    if isinstance(given, dict):
        return {key: _cast(value, dtype, holds) for key, value in given.items()}
    if isinstance(given, tuple | list):
        return type(given)(_cast(value, dtype, holds) for value in given)
    if holds(given) and given.is_floating_point() and given.dtype != torch.float64:
        return given.to(dtype)
    return given


class _Autocast(contextlib.ContextDecorator):
    """`torch.autocast` that needs no device."""

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        self._type = "cuda" if device_type == "meta" else device_type
        self._now = (enabled, dtype or torch.get_autocast_dtype(self._type))
        self._before: list[tuple[bool, torch.dtype]] = []

    def __enter__(self) -> None:
        self._before.append((torch.is_autocast_enabled(self._type), torch.get_autocast_dtype(self._type)))
        self._set(*self._now)

    def __exit__(self, *error: Any) -> None:
        self._set(*self._before.pop())

    def _set(self, enabled: bool, dtype: torch.dtype) -> None:
        torch.set_autocast_enabled(self._type, enabled)
        torch.set_autocast_dtype(self._type, dtype)


@contextlib.contextmanager
def _fake_tensors() -> Iterator[None]:
    """Fake tensors inside; what is kept between calls is not kept between modes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    signs._byte_table.cache_clear()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        signs._byte_table.cache_clear()


@contextlib.contextmanager
def _taken_for_cuda() -> Iterator[None]:
    """Let autocast, fused optimizers and regularizers take `meta` for a CUDA device."""
    optimizers = importlib.import_module("torch.optim.optimizer")
    fused = optimizers._get_fused_kernels_supported_devices()

    def of_cuda(function: Callable[[str], Any]) -> Callable[[str], Any]:
        return lambda kind: function("cuda" if kind == "meta" else kind)

    with contextlib.ExitStack() as stack:
        for where, name, other in (
            (torch, "autocast", _Autocast),
            (torch.amp, "autocast", _Autocast),
            (torch, "is_autocast_enabled", of_cuda(torch.is_autocast_enabled)),
            (torch, "get_autocast_dtype", of_cuda(torch.get_autocast_dtype)),
            (torch.amp, "is_autocast_available", of_cuda(torch.amp.is_autocast_available)),
            (optimizers, "_get_fused_kernels_supported_devices", lambda: [*fused, "meta"]),
            (sites, "_has_values", lambda weight: True),
        ):
            stack.enter_context(mock.patch.object(where, name, other))
        yield
