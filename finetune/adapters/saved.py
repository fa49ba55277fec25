"""Saved adapters to continue from: locating them, and checking that they fit the backbone and the settings."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from torch import Tensor

from ..atomic import read_json_object
from ..config import match_pattern
from ..digests import check_adapter, check_files, file_sha256
from ..errors import UserError, shorten, user_path
from ..models.fingerprint import fingerprint
from .offsets import ADAPTER, lora_layers

if TYPE_CHECKING:
    from peft import PeftModel

    from ..models.backbone import Backbone

SETTINGS = "adapter_config.json"
_PLAIN = (True, False, "gaussian", "orthogonal", "eva", "mica")
"""PEFT initialisations that leave the frozen weights equal to the backbone's files."""
_UNREAD = (
    *("lora_bias", "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config"),
    *("velora_config", "monteclora_config", "layer_replication"),
)
"""PEFT's settings that change what a layer computes beyond scaled factors."""


@dataclass(frozen=True)
class SavedAdapter:
    """PEFT directory with a LoRA adapter."""

    path: Path
    settings: Mapping[str, Any]
    """Contents of adapter_config.json."""
    backbone: Mapping[str, Any] | None
    """`name` and `fingerprint` of its backbone, if it is in a run directory that records them."""
    quantization: str | None = None
    """The only quantisation of the weights that it fits, if its run's recipe records one (`adapter.init: loftq`)."""
    classes: tuple[str, ...] | None = None
    """Classes of its head in order, if its run records them."""

    @classmethod
    def find(cls, name: str, *, context: str) -> SavedAdapter:
        """Return the adapter of the run directory or PEFT directory `name`. Raises UserError: starting with `context`:
        there is none, or one of another kind than LoRA."""
        path = user_path(name)
        if (path / "adapter" / SETTINGS).is_file():
            path /= "adapter"
        file = path / SETTINGS
        if not file.is_file():
            raise UserError(f"{context}: {name} is neither a finished run directory nor a PEFT adapter ({SETTINGS})")
        check_adapter(path)
        try:
            settings = read_json_object(file, fix="save the adapter again")
        except UserError as error:
            raise UserError(f"{context}: {error}") from None
        for key in ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern"):
            patterns = settings.get(key) or []
            for pattern in map(str, patterns if isinstance(patterns, list | dict) else [patterns]):
                # repeated groups, or many repetitions, may take for ever to match
                many = re.search(r"\)[*+{]", pattern) or len(re.findall(r"[*+{]", pattern)) > 3
                if many or not _is_regex(pattern):
                    raise UserError(
                        f"{context}: {file}: {key} has the pattern {shorten(pattern, 40)!r}; list the layers' names"
                    )
        if (kind := settings.get("peft_type")) != "LORA":
            raise UserError(f"{context}: {name} holds a {kind} adapter; only LoRA can be taken over")
        alphas = settings.get("alpha_pattern") or {}
        values = [settings.get("lora_alpha", 8), *(alphas.values() if isinstance(alphas, dict) else [alphas])]
        if bad := [value for value in values if not isinstance(value, int | float)]:
            raise UserError(
                f"{context}: {file}: lora_alpha or alpha_pattern has {bad[0]!r}, not a number; write it there"
            )
        if odd := next((name for name in _UNREAD if settings.get(name)), None):
            raise UserError(
                f"{context}: {name} was made with {odd}, which is more than the factors A and B; leave it out"
            )
        if settings.get("init_lora_weights", True) not in _PLAIN:
            raise UserError(
                f"{context}: {name} was begun by {settings['init_lora_weights']} and saved for changed frozen weights; "
                "save it for the plain backbone (PEFT: path_initial_model_for_weight_conversion)"
            )
        return cls(path, settings, *_read_run_record(path))

    def require_backbone(self, backbone: Backbone, *, context: str, quantization: str | None = None) -> None:
        """Raise UserError unless this adapter was trained on `backbone` and fits its weights quantised by
        `quantization` (None: not quantised).

        Backbones are compared by the fingerprint of their weights if that is recorded or the adapter's backbone
        directory exists here, else by the full hub name; for directories of which one is missing, by the last part of
        their names.
        """
        self.require_packing(quantization, context=context)
        name = backbone.name
        recorded_name = str(self.settings.get("base_model_name_or_path") or "")
        if self.backbone is not None:
            same = self.backbone["fingerprint"] == fingerprint(backbone.directory)
            recorded_name = self.backbone["name"]
        elif recorded_name == name or not recorded_name:
            return
        elif (Path(recorded_name) / "config.json").is_file():
            same = fingerprint(Path(recorded_name)) == fingerprint(backbone.directory)
        else:
            local = Path(recorded_name).is_absolute() or user_path(name).is_dir()
            same = (Path(recorded_name).name == Path(name).name) if local else (recorded_name.lower() == name.lower())
        if not same:
            raise UserError(f"{context}: {self.path} was trained on {recorded_name}, which is not the backbone {name}")

    def require_packing(self, quantization: str | None, *, context: str) -> None:
        """Raise UserError if the adapter compensates for one quantisation (loftq) and the weights have another."""
        if self.quantization not in (None, quantization):
            raise UserError(
                f"{context}: {self.path} was begun by loftq on weights in {self.quantization}, and fits no others; "
                "take an adapter that was trained without it"
            )

    def digest(self) -> str:
        """Return the SHA-256 of its settings and its weights."""
        files = [self.path / name for name in (SETTINGS, "adapter_model.safetensors")]
        digests = (bytes.fromhex(file_sha256(file)) for file in files if file.is_file())
        return hashlib.sha256(b"".join(digests)).hexdigest()

    def scales(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, float]]:
        """Return (rank, scale) of each adapted layer by plain name."""
        scales: dict[str, tuple[int, float]] = {}
        for name, tensor in tensors.items():
            if name.endswith((".lora_A.weight", ".lora_embedding_A")):
                layer, rank = name.split(".lora_")[0], tensor.shape[0]
                scales[layer] = rank, saved_scale(self.settings, layer, rank)
        return scales


def _is_regex(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def saved_scale(settings: Mapping[str, Any], layer: str, rank: int) -> float:
    """Return the scale of B·A in a layer of rank `rank` by PEFT's `settings` (adapter_config.json)."""
    alpha = match_pattern(settings.get("alpha_pattern"), layer, settings.get("lora_alpha", 8))
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _read_run_record(path: Path) -> tuple[Mapping[str, Any] | None, str | None, tuple[str, ...] | None]:
    """Return (backbone, quantization, classes) of the adapter in `path`, from the run directory around it, if any."""
    for run in path.resolve().parents[:3]:  # RUN/adapter, RUN/initial, RUN/stages/NAME/adapter
        manifest, recipe = run / "manifest.json", run / "recipe.resolved.yaml"
        if not recipe.is_file():
            continue
        check_files(run, {manifest.name, recipe.name}.__contains__)
        try:
            settings = yaml.safe_load(recipe.read_text(encoding="utf-8"))
            init, train = (settings.get("adapter") or {}).get("init"), settings.get("train") or {}
        except (OSError, ValueError, RecursionError, AttributeError, yaml.YAMLError):
            raise UserError(f"{recipe}: not a run's recipe; restore it, or take the adapter's own folder") from None
        record = read_json_object(manifest) if manifest.is_file() else {}
        names = record.get("label_names")
        quantization = train.get("quantization") if init == "loftq" else None
        return record.get("backbone"), quantization, None if names is None else tuple(names)
    return None, None, None


def check_same_settings(saved: SavedAdapter, tensors: Mapping[str, Tensor], model: PeftModel, *, context: str) -> None:
    """Raise one UserError that lists every setting in which the adapter `saved` differs from that of `model`.

    tensors: of `saved` by plain name. model: built from the recipe, on meta or not.
    """
    live = {name: (layer.r[ADAPTER], layer.scaling[ADAPTER]) for name, layer in lora_layers(model).items()}
    stored = saved.scales(tensors)
    if any(name.endswith(".lora_A.weight") and ".experts." in name for name in tensors):
        stored = {name: live.get(name, value) for name, value in stored.items()}  # r·E rows; shapes are compared later
    shared = sorted(stored.keys() & live.keys())

    def names(layers: Mapping[str, Any]) -> str:
        counts = Counter(name.rsplit(".", 1)[-1] for name in layers)
        return ", ".join(f"{leaf} ({count})" for leaf, count in sorted(counts.items())) or "nothing"

    def span(layers: Mapping[str, tuple[int, float]], index: int) -> str:
        values = sorted({layers[name][index] for name in shared})
        return f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}"

    problems: list[str] = []
    if stored.keys() != live.keys():
        problems.append(f"it adapts {names(stored)} and the recipe {names(live)} (adapter.targets)")
    if any(stored[name][0] != live[name][0] for name in shared):
        problems.append(f"its rank is {span(stored, 0)} and the recipe's {span(live, 0)} (adapter.rank)")
    elif any(not math.isclose(stored[name][1], live[name][1], rel_tol=1e-6) for name in shared):
        problems.append(f"its scale is {span(stored, 1)} and the recipe's {span(live, 1)} (adapter.alpha)")
    config: Any = model.peft_config[ADAPTER]
    if bool(saved.settings.get("use_dora")) != config.use_dora:
        problems.append(f"it is {'' if not config.use_dora else 'not '}of DoRA (adapter.dora)")
    if problems:
        raise UserError(f"{context}: {saved.path} has other settings: {'; '.join(problems)}; set them as it has them")
