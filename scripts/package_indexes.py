"""Ask each package index once whether it answers, so that pip does not retry dead ones for every dependency.

    python scripts/package_indexes.py [TORCH_INDEX] > .venv/indexes
    . .venv/indexes && python -m pip install $TORCH_FLAGS torch

Prints lines for a shell: `TORCH_FLAGS`, the option that adds TORCH_INDEX if it answers, and pip's environment variables
that exclude those of its configured indexes that do not. Each excluded index is reported on standard error.
"""

from __future__ import annotations

import ast
import shlex
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

PYPI = "https://pypi.org/simple"
SECONDS = 5.0
"""Timeout of an index, in seconds."""


def main(arguments: Sequence[str]) -> None:
    """Print the shell lines for `[TORCH_INDEX]`."""
    settings = pip_settings()
    lines = reachable_index_lines(settings)
    if torch := " ".join(arguments).strip():
        why = index_failure(torch, proxy=settings.get("proxy"))
        if why is None:
            lines.append(f"TORCH_FLAGS={shlex.quote(f'--extra-index-url {torch}')}")
        else:
            warn_unreachable(torch, why, "torch comes from the others, maybe as a CUDA build of some GB")
    sys.stdout.writelines(f"{line}\n" for line in lines)


def pip_settings() -> dict[str, str]:
    """Return pip's own settings that name indexes, by option, with pip's precedence of files, sections and
    environment."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"],
        check=True,
        capture_output=True,
        text=True,
    )
    results: dict[tuple[str, str], str] = {}
    for line in done.stdout.splitlines():
        key, sign, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if sign and section in ("global", "install", ":env:"):
            results[section, option] = str(ast.literal_eval(value))
    wanted = ("index-url", "extra-index-url", "no-index", "proxy")
    return {o: results[s, o] for s in ("global", "install", ":env:") for o in wanted if results.get((s, o))}


def reachable_index_lines(settings: Mapping[str, str]) -> list[str]:
    """Return shell lines that exclude the configured indexes that do not answer; none if all do."""
    if settings.get("no-index", "no").lower() in ("1", "true", "yes", "on", "t", "y"):
        return []
    first, *more = [settings.get("index-url", PYPI), *settings.get("extra-index-url", "").split()]
    here = []
    for index in dict.fromkeys([first, *more]):
        why = index_failure(index, proxy=settings.get("proxy"))
        if why is None:
            here.append(index)
        else:
            warn_unreachable(index, why, "going on without it")
    if set(here) == {first, *more}:
        return []
    if not here:
        return ["export PIP_NO_INDEX=1"]
    # pip ignores an empty variable, so the list of further indexes repeats the only one.
    return [
        f"export PIP_INDEX_URL={shlex.quote(here[0])}",
        f"export PIP_EXTRA_INDEX_URL={shlex.quote(' '.join(here[1:] or here))}",
    ]


def index_failure(index: str, *, proxy: str | None = None) -> str | None:
    """Return the reason that `index` does not answer; None if it does, whatever the answer: its content is pip's
    concern."""
    parts = urlsplit(index)
    if parts.scheme in ("", "file"):
        path = Path(unquote(parts.path))
        return None if path.exists() else "no such directory"
    handlers = [urllib.request.ProxyHandler({"http": proxy, "https": proxy})] if proxy else []
    try:
        with urllib.request.build_opener(*handlers).open(f"{without_credentials(index).rstrip('/')}/", timeout=SECONDS):
            return None
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):  # the server exists; trust is configured in pip
            return None
        return str(getattr(reason, "strerror", None) or reason)


def without_credentials(index: str) -> str:
    """Return the address without a user name and password."""
    parts = urlsplit(index)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def warn_unreachable(index: str, why: str, then: str) -> None:
    """Report on standard error that an index does not answer."""
    print(f"package index {without_credentials(index)} does not answer ({why}): {then}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
