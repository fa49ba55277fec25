"""The public names have types: mypy finds every mistake that is ignored here, else `make lint` names an idle ignore."""

from pathlib import Path
from typing import Any

import flatshift

recipe = flatshift.load_recipe("classify", {"train": {"steps": 4}, "adapter.rank": 2})
run = flatshift.train(recipe, out="runs/first")
value: float | None = run.metrics["test"]["accuracy"]["value"]
steps: int = run.recipe.train.steps
again: flatshift.Run = flatshift.resume(run.path, {"train.steps": 8})
texts: list[str] = flatshift.select(["a", "b"], ["c"], budget=1).texts
picked: flatshift.Selection = flatshift.select("warmup", out=Path("picked"))
found = flatshift.sweep(recipe, {"adapter.rank": [1, 4], "optimizer.lr": "1e-4..1e-2:log"}, out="ranks", seeds=2)
kinds: list[str] = [verdict.kind for verdict in found.verdicts]
written: list[str] = run.generate("a prompt", max_new_tokens=8)
said: list[dict[str, Any]] = run.predict(["a text", {"text": "another"}])
order = flatshift.GotDSelector().fit_texts(["a", "b"], ["c"], embedder=flatshift.TfIdfEmbedder()).select(1)

flatshift.load_recipe(5, nonsense=1)  # type: ignore[call-arg, arg-type]
flatshift.load_recipe("classify", ["train.steps=4"])  # type: ignore[arg-type]
flatshift.train(5, Path("out"))  # type: ignore[arg-type]
flatshift.select([1], ["b"], budget=1)  # type: ignore[arg-type]
flatshift.select(["a"], ["b"], budget="ten")  # type: ignore[arg-type]
flatshift.sweep("classify", {"adapter.rank": 3}, out="ranks")  # type: ignore[dict-item]
run.predict(5)  # type: ignore[arg-type]
print(run.metric)  # type: ignore[attr-defined]
flatshift.Recipe(backbone=3)  # type: ignore[arg-type]
flatshift.GGPO(sigma="much")  # type: ignore[arg-type]
flatshift.Pool(size=3)  # type: ignore[call-arg]
flatshift.build_report("run", out=3)  # type: ignore[arg-type]
resolved: int = flatshift.load_recipe("classify")  # type: ignore[assignment]
raise flatshift.UserErrors("no such name")  # type: ignore[attr-defined]
