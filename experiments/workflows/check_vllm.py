"""Compare a merged model in vLLM with its run: `python check_vllm.py [FOLDER]`, by default in `.`.

Uses `reference.json`: prompts of the run, their tokens in training, and the likeliest next tokens with their log
probabilities in float32. Exit code 1 if vLLM tokenizes or answers differently.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FAR = 0.5
"""Largest accepted difference of a log probability, nats: rounding to 16 bits and other kernels explain it."""


def main(folder: str = ".") -> int:
    """Print the largest difference; return 0 if it is small."""
    vllm: Any = __import__("vllm")
    reference = json.loads((Path(folder) / "reference.json").read_text(encoding="utf-8"))
    model = vllm.LLM(model=folder, max_logprobs=50, enforce_eager=True)
    tokenizer = model.get_tokenizer()
    options = vllm.SamplingParams(max_tokens=1, temperature=0.0, logprobs=50)
    answers = model.generate([{"prompt_token_ids": prompt["ids"]} for prompt in reference], options)
    worst, wrong = 0.0, []
    for prompt, answer in zip(reference, answers, strict=True):
        if prompt["whole"] and list(tokenizer(prompt["text"])["input_ids"]) != prompt["ids"]:
            wrong.append(f"vLLM's tokenizer reads {prompt['text'][:60]!r} otherwise than training did")
        logs = {int(token): entry.logprob for token, entry in answer.outputs[0].logprobs[0].items()}
        for token, value in prompt["next"].items():
            worst = max(worst, abs(logs.get(int(token), -1e9) - value))
    print(f"{len(reference)} prompts: log probabilities of the likeliest next tokens differ by at most {worst:.3g}")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return int(bool(wrong) or worst > FAR)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
