"""The public names have types: mypy finds every mistake that is ignored here, else `make lint` names an idle ignore."""

from pathlib import Path

import flatshift

flatshift.load_recipe(5, nonsense=1)  # type: ignore[call-arg, arg-type]
flatshift.train("classify", Path("out"))  # type: ignore[arg-type]
flatshift.Recipe(backbone=3)  # type: ignore[arg-type]
flatshift.GGPO(sigma="much")  # type: ignore[arg-type]
flatshift.Pool(size=3)  # type: ignore[call-arg]
flatshift.build_report("run", out=3)  # type: ignore[arg-type]
resolved: int = flatshift.load_recipe("classify")  # type: ignore[assignment]
raise flatshift.UserErrors("no such name")  # type: ignore[attr-defined]
