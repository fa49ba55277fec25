"""The commands, one file each: `Flags`, whose docstrings are the help texts, and `run`, which calls the workflow.

A new command needs its file and its line in SUMMARIES. Nothing here imports torch.
"""

from __future__ import annotations

from importlib import import_module

SUMMARIES = {
    "demo": "the three journeys on shipped samples; ends with a report",
    "plan": "does it fit, on which mesh, how fast, before a device is rented",
    "select": "choose warm-up data from a pool for a target",
    "train": "fine-tune an adapter by a recipe, or resume a run",
    "sweep": "a resumable grid over recipe keys and seeds",
    "forecast": "curves along rows, rank, noise and ridge before anything is trained",
    "compare": "training methods against a baseline by one fair protocol",
    "eval": "evaluate runs and base models, side by side, by groups of rows",
    "predict": "label rows with a finished run: classes with probabilities, numbers, answers",
    "chat": "talk to finished runs in the terminal, several adapters over one backbone",
    "serve": "finished runs behind an OpenAI-compatible endpoint on this machine",
    "generate": "let a finished run write: prompts in, answers out",
    "tokenizer": "what tokenizers make of your texts, by language",
    "report": "one offline HTML page from run directories; several runs side by side",
    "runs": "list the runs of a folder, one line a run",
    "merge": "fold a run's adapter into its backbone",
    "export": "a run for other programs: hub, llama.cpp, Ollama, vLLM",
    "push": "upload a folder of export or merge to a model hub",
    "recipes": "list, show or copy the shipped recipes, or translate one of another tool",
    "schema": "JSON schema of recipes, for completion in editors",
    "doctor": "environment, versions, devices, what is missing; secrets in a directory",
}


def run(name: str, argv: list[str]) -> int:
    """Run the command `name` with its arguments; return the exit code."""
    code: int = import_module(f"{__name__}.{name}").run(argv)
    return code
