"""Sizes of a backbone: from config.json and the headers of its weight files, or for one that need not be downloaded
from its shape or from a model on the meta device. Nothing is loaded; torch is imported only for the latter."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..atomic import read_json_object
from ..config import Adapter, match_pattern
from ..errors import UserError, first_error_line, shorten
from ..models.families import BOUNDED, usable_positions

if TYPE_CHECKING:
    from ..tasks import Task

_BLOCK = re.compile(r"^(?:(?P<stack>.*?)\.)?(?P<number>\d+)\.")
_NO_LAYER = re.compile(r"(norm|embed|bias|wte|wpe)[^.]*(\.weight)?$|\.bias$", re.IGNORECASE)
_MAX_NUMBER = 1 << 53  # above it a whole number in config.json is no size, position or token
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
ROUTED = ("num_experts_per_tok", "moe_k", "top_k")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "emb_dim")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "attention_heads")
_FEED_FORWARDS = ("intermediate_size", "n_inner", "d_ff", "encoder_ffn_dim", "ffn_dim", "hidden_dim", "d_inner")
_EXPERT = re.compile(r"\.experts\.(?!.*router)")
_ROUTER = re.compile(r"\.(gate|router|shared_expert_gate)(\.[^.]+)?$")
_OUTPUT = re.compile(r"^(lm_head|embed_out|output_projection|cls)\b")
"""Tensors outside the blocks that compute logits of words; a model with its own head does not load them."""
_WIDE = {"gelu_new": 5, "gelu": 2, "relu": 2}
"""Number of feed-forward-wide tensors that a block without a gate keeps, by activation, its output included."""
_LEARNED = re.compile(r"\b(wpe|position_embeddings?|embed_positions|positions_embed)\.weight$")
_DENSE_HEADS = frozenset({"roberta", "xlm-roberta", "camembert", "electra", "distilbert", "deberta-v2", "t5"})
"""Model types whose new heads have a layer as wide as the model before that of the classes; it trains, too."""
_LONGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors format
_MAKERS = (
    *("", "meta-llama", "mistralai", "qwen", "google", "microsoft", "huggingfacetb", "openai", "deepseek-ai"),
    *("zai-org", "ibm-granite", "google-bert", "facebookai", "answerdotai"),
)
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")


def _read_known_shapes() -> dict[str, dict[str, Any]]:
    """Return name → configuration of each line of shapes.tsv: numbers by column, and other keys in its last."""
    text = Path(__file__).with_name("shapes.tsv").read_text(encoding="utf-8")
    (_, _, *names, _), *lines = (line.split("\t") for line in text.splitlines())
    known = {}
    for name, kind, *numbers, others in lines:
        values = {key: json.loads(number) for key, number in zip(names, numbers, strict=True) if number}
        known[name] = {"model_type": kind, **values, **json.loads(others or "{}")}
    return known


KNOWN: Mapping[str, Mapping[str, Any]] = _read_known_shapes()
"""Shapes of common models, copied from their config.json, for planning without a network."""


@dataclass(frozen=True)
class BackboneSizes:
    """Sizes of a backbone, in elements rather than bytes."""

    kind: str  # model type of transformers
    hidden: int
    feed_forward: int
    heads: int
    groups: int  # key-value heads
    vocabulary: int
    wide: int  # feed-forward-wide tensors that a block keeps for backward
    blocks: tuple[int, ...]  # elements of each block
    depth: int  # blocks of the longest stack, of which an encoder-decoder has two
    ends: tuple[int, ...]  # elements of each tensor outside the blocks: embeddings, head, norms
    adapter: int  # elements of the adapter
    inputs: int  # input channels of all adapted layers of a block
    products: int = 0  # elements of the matrices in a block that one token is multiplied with
    experts: int = 0  # experts per block; 0: not a mixture of experts
    routed: int = 0  # experts that a token is routed to
    expert_elements: int = 0  # elements of all experts of a block
    expert_adapter: int = 0  # elements of the adapters on experts (`adapter.experts`), of all blocks; in `adapter` too
    head: int = 0  # channels of an attention head
    normed: bool = False  # True if queries and keys are normalised per head (Qwen3)
    ranks: tuple[int, int] = (0, 0)  # sum of the ranks of a block's adapted layers: (attention, other)
    trained: tuple[int, int] = (0, 0)  # elements of a block's adapters: (attention, other)
    adapted_widths: tuple[int, int] = (0, 0)  # output channels of a block's adapted layers: (attention, other)
    positions: int | None = None  # maximum sequence length the backbone supports, in tokens; None: not specified
    bounded: bool = False  # True if positions are a table, with no entries beyond `positions`
    layers: tuple[tuple[int, int], ...] = ()  # shape (rows, columns) of each adapted matrix
    outputs: int = 0  # output width of the last layer: words, or classes of a head
    output: tuple[int, ...] = ()
    """Elements of each tensor of `ends` that computes logits of words and is not the embedding itself."""
    dropout: float | None = None  # rate in attention; None: the configuration names none
    supervised: float = 1.0  # fraction of the tokens that contribute to the loss
    whole_rows: bool = False
    """True if a head scores whole sequences: the loss reads one state of each, and no logits of words are computed."""

    @classmethod
    def read(cls, directory: Path, adapter: Adapter) -> BackboneSizes:
        """Read the sizes of the backbone in `directory` under `adapter`. Raises UserError: config.json or the header of
        a weight file is missing or damaged."""
        file = directory / "config.json"
        config = read_json_object(file, fix="fetch the backbone again")
        text = config.get("text_config")
        config |= text if isinstance(text, dict) else {}
        for key, value in config.items():
            if isinstance(value, int) and abs(value) > _MAX_NUMBER:
                raise UserError(
                    f"{file} has {key} {shorten(str(value), 40)}, which is no size; fetch the backbone again"
                )
        if config.get("quantization_config") is not None:  # of the floats that training begins with
            return _sizes_from_config(config, adapter, str(directory))
        return cls.of(config, _read_shapes(directory), adapter, str(directory))

    @classmethod
    def of(
        cls,
        config: dict[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        adapter: Adapter,
        context: str = "the backbone",
    ) -> BackboneSizes:
        """Return the sizes of a backbone with this configuration and these tensors (name → shape)."""
        blocks: dict[tuple[str | None, int], int] = {}
        ends, trained, inputs, multiplied, gated, normed = [], [0, 0], 0, 0, False, False
        ranks, adapted_widths, routed, layers, output, on_experts, outer = [0, 0], [0, 0], 0, [], [], 0, 0
        for name, shape in shapes.items():
            match = _BLOCK.match(name)
            if match is None:
                ends.append(math.prod(shape))
                if _OUTPUT.match(name):
                    output.append(math.prod(shape))
                if len(shape) == 2 and _is_named(name, adapter):
                    outer += match_pattern(adapter.ranks, name.removesuffix(".weight"), adapter.rank) * sum(shape)
                continue
            if len(shape) > 3:  # causal masks stored in older GPT-2 files
                continue
            key = (match["stack"], int(match["number"]))
            blocks[key] = blocks.get(key, 0) + math.prod(shape)
            if _EXPERT.search(name):
                routed += math.prod(shape)
                gated |= "gate" in name or "w3" in name
                on_experts += (adapter.experts or 0) * _expert_channels(name, shape)
                continue
            multiplied += math.prod(shape) if len(shape) == 2 else 0
            gated |= bool(re.search(r"gate_proj|wi_1|w1\.weight", name))
            normed |= bool(re.search(r"\bq_norm\.weight", name))
            if len(shape) == 2 and _is_adapted(name, adapter) and key[1] in (adapter.layers or (key[1],)):
                rank = match_pattern(adapter.ranks, name.removesuffix(".weight"), adapter.rank)
                outside = not re.search(r"attn|attention", name, re.IGNORECASE)
                trained[outside] += rank * sum(shape) + (shape[0] if adapter.dora else 0)
                ranks[outside] += rank
                adapted_widths[outside] += shape[0]
                inputs += shape[1]
                layers.append((shape[0], shape[1]))
        if not blocks:
            raise UserError(f"{context}: its weights show no blocks, so nobody can tell what fits")
        if adapter.experts is not None and not on_experts:
            raise UserError("adapter.experts: this backbone has no mixture of experts in its blocks; leave it at null")
        trained[1] += on_experts
        experts = max((config[name] for name in _EXPERTS if isinstance(config.get(name), int)), default=0)
        chosen = _first_integer(config, *ROUTED) if routed else 0
        hidden, heads = _first_integer(config, *_WIDTHS), _first_integer(config, *_HEADS)
        return cls(
            kind=str(config.get("model_type")), hidden=hidden, feed_forward=_feed_forward_width(config, hidden, chosen),
            heads=heads, groups=_first_integer(config, "num_key_value_heads", default=heads),
            vocabulary=(words := _first_integer(config, "vocab_size", default=1)),
            wide=4 if gated else next((kept for name, kept in _WIDE.items() if name in config.values()), 3),
            blocks=tuple(blocks.values()), depth=1 + max(number for _, number in blocks),
            ends=tuple(sorted(ends, reverse=True)), adapter=sum(trained) + outer,
            inputs=inputs // len(blocks), products=(multiplied + routed * chosen // max(experts, 1)) // len(blocks),
            head=_first_integer(config, "head_dim", "d_kv", default=hidden // heads), normed=normed,
            ranks=(ranks[0] // len(blocks), ranks[1] // len(blocks)),
            trained=(trained[0] // len(blocks), trained[1] // len(blocks)),
            adapted_widths=(adapted_widths[0] // len(blocks), adapted_widths[1] // len(blocks)),
            experts=experts if routed else 0, routed=chosen, expert_elements=routed // len(blocks),
            expert_adapter=on_experts, positions=usable_positions(config),
            bounded=str(config.get("model_type")) in BOUNDED or any(map(_LEARNED.search, shapes)), layers=tuple(layers),
            outputs=words, output=tuple(output), dropout=attention_dropout(config),
        )  # fmt: skip

    def under(self, task: Task, *, classes: int | None = None) -> BackboneSizes:
        """Return the sizes with the task's own head, newly initialised and trained in full, in place of the output
        layer for words.

        classes: outputs of the head; None: as many classes as the task names, else two, or one for a number.
        """
        if task.traits.is_sequence_level:
            names = task.labels
            classes = classes or (len(names) if names else 2 if task.has_classes else 1)
            ends = list(self.ends)
            for elements in self.output:
                ends.remove(elements)
            new = classes * self.hidden + (self.hidden + 1) * self.hidden * (self.kind in _DENSE_HEADS)
            return dataclasses.replace(
                self, ends=tuple(ends), output=(), outputs=classes, adapter=self.adapter + new, whole_rows=True
            )
        return dataclasses.replace(self, supervised=task.supervised)

    @property
    def elements(self) -> int:
        """Elements Ψ of the whole backbone."""
        return sum(self.blocks) + sum(self.ends)


def known_shape(model: str) -> Mapping[str, Any] | None:
    """Return the configuration in `KNOWN` of a model by its name, with or without the maker; None if it has none."""
    maker, _, name = model.lower().rpartition("/")
    if maker not in _MAKERS:  # other makers' models of that name may have another shape
        return None
    return KNOWN.get(_plain_name(name))


def _plain_name(name: str) -> str:
    return name.removesuffix("-hf").removesuffix("-instruct").replace("meta-llama-", "llama-")


def read_sizes(model: str | Path, adapter: Adapter) -> BackboneSizes:
    """Return the sizes of a backbone by name: a shape in `KNOWN`, a directory or config.json, or any name other
    commands accept; of its weights only headers are read, and none need exist.

    Raises UserError for a name that is none of these, and for a config.json that lacks required keys.
    """
    name = str(model)
    path = Path(name).expanduser()
    if path.is_file():
        path = path.parent if path.name == "config.json" else path
    if path.is_dir() and (path / "config.json").is_file():
        if any(path.glob("*.safetensors")):
            return BackboneSizes.read(path, adapter)
        config = read_json_object(path / "config.json", fix="name a model's folder or its config.json")
        return _sizes_from_config(config, adapter, str(path))
    if (shape := known_shape(name)) is not None:
        return _sizes_from_config(dict(shape), adapter, name)
    if path.is_file() and path.suffix != ".gguf":
        raise UserError(f"--model {name} is a file; name a directory with config.json, or that config.json")
    try:
        from ..models.backbone import open_backbone

        return BackboneSizes.read(open_backbone(name).directory, adapter)
    except UserError as error:
        near = difflib.get_close_matches(_plain_name(name.lower().rpartition("/")[2]), KNOWN, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"{hint}{error}; without it the shapes of {len(KNOWN)} common models are known") from None


def _sizes_from_config(config: dict[str, Any], adapter: Adapter, context: str) -> BackboneSizes:
    """Return the shapes of the model that a configuration describes, built on the meta device."""
    import torch
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    from ..models.backbone import check_sizes

    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise UserError(f"{context}: config.json names no model_type that transformers knows ({kind!r})")
    try:
        config_object = transformers.CONFIG_MAPPING[kind].from_dict(config)
        text_config = config_object.get_text_config()
        check_sizes(config_object, Path(context) / "config.json")
        given_keys = {**config, **(config.get("text_config") or {})}
        missing = [
            name
            for name in _NEEDED
            if getattr(text_config, name, None) is not None
            and not {name, text_config.attribute_map.get(name)} & given_keys.keys()
        ]
        with torch.device("meta"):
            auto: Any = transformers.AutoModel
            if type(config_object) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
                auto = transformers.AutoModelForCausalLM
            elif type(config_object) in transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
                auto = transformers.AutoModelForSeq2SeqLM
            model = auto.from_config(config_object)
    except StrictDataclassError as error:  # sizes that contradict each other, possibly through a default
        names = transformers.CONFIG_MAPPING[kind].attribute_map
        absent = [name for name in _NEEDED if not {name, names.get(name)} & config.keys()]
        hint = f"; it lacks {absent[0]}" if absent else ""
        raise UserError(
            f"{context}: its config.json does not describe a model ({error.__cause__ or error}){hint}"
        ) from None
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, ZeroDivisionError, ImportError) as error:
        raise UserError(f"{context}: its config.json does not describe a model ({first_error_line(error)})") from None
    if missing:
        raise UserError(f"{context}: config.json lacks {missing[0]}, and a default would be a guess; write it there")
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is model.get_input_embeddings().weight
    if is_tied and config.get("tie_word_embeddings") is False:  # T5's configuration ties them whatever the file says
        shapes["lm_head.weight"] = tuple(head.weight.shape)
    return BackboneSizes.of(config_object.to_dict() | config, shapes, adapter)


def attention_dropout(config: Mapping[str, Any]) -> float | None:
    """Return the rate of dropout in attention that a configuration names (T5 has one for all places); None without."""
    rates = [rate for name, rate in config.items() if re.search("att.*drop|dropout_rate$", name)]
    return max((float(rate) for rate in rates if isinstance(rate, int | float)), default=None)


def _feed_forward_width(config: Mapping[str, Any], hidden: int, routed: int) -> int:
    """Return the channels between a block's feed-forward maps; with experts, of all a token meets, shared ones too."""
    dense = _first_integer(config, *_FEED_FORWARDS, default=4 * hidden)
    if not routed:
        return dense
    expert_width = _first_integer(config, "moe_intermediate_size", default=dense)
    shared = _first_integer(config, "shared_expert_intermediate_size", default=0) or expert_width * _first_integer(
        config, "n_shared_experts", default=0
    )
    return routed * expert_width + shared


def _expert_channels(name: str, shape: tuple[int, ...]) -> int:
    """Return the rows and columns of a tensor of experts, which A and B of rank 1 have together, over all its experts.

    A gate and the map beside it are one parameter in the model, with one A, also where files have them apart.
    """
    if re.search(r"bias|scale", name) or len(shape) < 2:
        return 0
    if len(shape) == 3:
        return shape[0] * (shape[1] + shape[2])
    return shape[0] + (0 if re.search(r"\b(up_proj|w3)\b", name) else shape[1])


def _is_adapted(name: str, adapter: Adapter) -> bool:
    module = name.removesuffix(".weight")
    if _NO_LAYER.search(name) or _ROUTER.search(module):
        return False
    if any(f".{module}".endswith(f".{suffix}") for suffix in adapter.exclude or ()):
        return False
    return adapter.targets == "all-linear" or _is_named(name, adapter)


def _is_named(name: str, adapter: Adapter) -> bool:
    """Return True if `adapter.targets` ends the module's name; `all-linear` leaves out embeddings and output layers."""
    suffixes = (adapter.targets,) if isinstance(adapter.targets, str) else adapter.targets
    return any(f".{name.removesuffix('.weight')}".endswith(f".{suffix}") for suffix in suffixes)


def _read_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return tensor name → shape, from the headers of all weight files."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(min(length, _LONGEST_HEADER)))
            shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{file} is damaged or cut short; fetch the backbone again") from error
    return shapes


def _first_integer(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    values = (config.get(name) for name in names)  # Gemma 3n lists one value per layer: take the largest
    numbers = (max(value) if isinstance(value, list) and value else value for value in values)
    number_found = next((number for number in numbers if isinstance(number, int) and number > 0), default)
    if number_found is None:
        raise UserError(f"config.json says nothing of {names[0]}, so nobody can tell what fits; write it there")
    return number_found
