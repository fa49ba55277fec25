"""Addresses without their passwords and signatures: the only form in which an address is written or printed.

    hide_secrets("https://ann:pw@host/a.jsonl?X-Amz-Signature=f00")    # "https://host/a.jsonl"
    reveal_secrets("https://host/a.jsonl")                             # the address as it was given, to open it

A recipe, a flag and a manifest hold the address without its secrets; this process and its children, which inherit the
environment, find them there by that address. Nothing else keeps them, so a later command needs them again: the same
address as given before, or credentials where fsspec looks for them.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote

_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]{1,20}:/{1,2}"  # pathlib leaves one slash; bounded, so that long words are read once
_SCHEME_START = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]{1,20}::?){1,5}//")  # also chained, as simplecache::https://
_ADDRESS = re.compile(rf"{_SCHEME}(?:(?![,'`]{{1,4}}{_SCHEME})[^\s\"<>])+")
"""Address in a text, up to a space, a double quote, or the next address of a list."""
_AFTER = ".,;:!'`)]}"
"""Characters of the text around an address, at its end."""
_USER = re.compile(r"(?P<scheme>[^/]+:/{1,2})(?P<user>[^/?#\\]*@|[^/?#:@\[]*:(?!\d*(?:[/?#]|$)).*@)")
"""User and password; a password may have a / or ? that should have been escaped, unless a port stands there."""
_NAMED_CONTAINER = ("abfs:", "abfss:", "wasb:", "wasbs:")
"""Schemes whose user is the name of a container."""
_SEPARATOR = re.compile(r"(&amp;|\\u0026|[?&;#])")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_WORDS = {
    *("sig", "sign", "signature", "signed", "token", "secret", "key", "apikey", "auth", "authorization", "credential"),
    *("credentials", "password", "passwd", "passphrase", "pass", "pwd", "pw", "jwt", "sas", "hmac", "session", "code"),
    *("bearer", "cookie", "otp", "hdnea", "hdnts", "ak", "sk"),
}
_SECRET_PART = re.compile(
    "signature|secret|passw|credential|(?:access|api|auth|refresh|security|session)_?(?:key|token)"
)
_WITH_SIGNATURE = re.compile(
    r"x-(?:amz|goog|oss|cos|obs|ms)-.*|q-.*|expires|expiry|policy|googleaccessid|response-content-.*"
    r"|s[vrpseti]|ss|srt|spr|sip|sdd|saoid|suoid|scid|sk(?:oid|tid|t|e|s|v)"
)
"""Parameters that come with a signature and differ from one signed address to the next."""


def redact_urls(text: str) -> str:
    """Return `text` with every address in it stripped of user, password and signature parameters."""
    if ":/" not in text:
        return text
    return _ADDRESS.sub(lambda match: _redact(match[0].rstrip(_AFTER)) + _ending(match[0]), text)


def join_command(words: Iterable[str]) -> str:
    """Return a command for a shell, without the secrets of its addresses."""
    return shlex.join(map(redact_urls, words))


def _ending(match: str) -> str:
    return match[len(match.rstrip(_AFTER)) :]


def _redact(address: str) -> str:
    if (prefix := _USER.match(address)) is not None:
        user = prefix["user"]
        if not address.lower().startswith(_NAMED_CONTAINER):
            user = "" if ":" in user or address[:4].lower() == "http" else user
        elif ":" in user:
            user = user.partition(":")[0] + "@"
        address = prefix["scheme"] + user + address[prefix.end() :]
    path, *rest = _SEPARATOR.split(address)
    marks, parts = rest[::2], rest[1::2]
    if not any(_is_secret(part.partition("=")[0]) for part in parts if "=" in part):
        return address
    harmless = [(mark, part) for mark, part in zip(marks, parts, strict=True) if not _goes_with_secret(part)]
    if harmless and marks[0] == "?" and harmless[0][0] != "#":  # its first parameter may be gone
        harmless[0] = ("?", harmless[0][1])
    return path + "".join(mark + part for mark, part in harmless)


def _is_secret(name: str) -> bool:
    name = unquote(name)
    words = {word.lower() for word in _WORD.findall(name)}
    return not words.isdisjoint(_SECRET_WORDS) or _SECRET_PART.search(name.lower()) is not None


def _goes_with_secret(parameter: str) -> bool:
    name, equals, _ = parameter.partition("=")
    return bool(equals) and (_is_secret(name) or _WITH_SIGNATURE.fullmatch(unquote(name).lower()) is not None)


def hide_secrets(value: str, *, inside: bool = False) -> str:
    """Return `value` without secrets if it is an address, and keep them for `reveal_secrets` in this process and its
    children; any other text as it is. inside: also of addresses within a text."""
    if inside:
        return _ADDRESS.sub(lambda match: hide_secrets(match[0].rstrip(_AFTER)) + _ending(match[0]), value)
    if _SCHEME_START.match(value) is None or any(sign.isspace() for sign in value):
        return value
    hidden = _redact(value)
    if hidden != value:
        os.environ[_variable(hidden)] = value
    return hidden


def reveal_secrets(address: str) -> str:
    """Return the address as it was last given to `hide_secrets`; `address` itself if it had no secrets."""
    return os.environ.get(_variable(address), address)


def _variable(hidden: str) -> str:
    return f"FLATSHIFT_ADDRESS_{hashlib.sha256(hidden.encode()).hexdigest()[:24]}"


_RECORDS = (".json", ".jsonl", ".txt", ".yaml", ".yml", ".html", ".md", ".svg", ".csv", ".tsv", ".toml", ".log")
_ROWS = re.compile(
    r"(?:.*/)?(?:(?:selected|targets|drops|generations)\.jsonl|reference\.json|predictions[^/]*"
    r"|rows/[^/]+/(?:train|validation|test)\.jsonl|[^/]+-texts/(?:pool|target)\.jsonl)"
)
"""Files that hold rows of the user, whose addresses are data."""
_INPUTS = {"manifest.json": '"path": ', "recipe.resolved.yaml": "", "study.recipe.yaml": "", "command.txt": ""}
"""Files that name the inputs of a command, each with a text of the lines that do."""
_QUOTING = ("log.txt", "report.html")
"""Files that quote rows of the user."""
_STORE_SIGNATURE = re.compile(r"sig|signature|awsaccesskeyid|(?:x-[a-z]+|q)-(?:signature|credential|security-token)")


def find_secrets(directory: Path) -> Iterator[tuple[Path, int]]:
    """Yield file and line of every address with a secret in the records of a directory made by a command.

    Rows are data: their files are not searched, and where they are quoted, in a log and a page, an address counts only
    if it begins as an input of a command there does, or holds a password or the signature of a store.
    """
    files = [file for file in sorted(directory.rglob("*")) if file.suffix in _RECORDS and file.is_file()]
    marks = {file: _INPUTS[file.name] for file in files if file.name in _INPUTS}
    named = (_redact(address) for file, mark in marks.items() for _, address in _find_addresses(file, mark))
    inputs = tuple({address.partition("*")[0] for address in named})
    for file in files:
        if _ROWS.fullmatch(file.as_posix()) is not None:
            continue
        lines = (
            number
            for number, address in _find_addresses(file)
            if (hidden := _redact(address)) != address
            and (file.name not in _QUOTING or hidden.startswith(inputs) or _is_signed(address))
        )
        yield from ((file, number) for number in dict.fromkeys(lines))


def _find_addresses(file: Path, mark: str = "") -> Iterator[tuple[int, str]]:
    """Yield line and text of every address in the lines of `file` that contain `mark`, with a plain & for escaped
    ones."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            for match in _ADDRESS.finditer(line) if ":/" in line and mark in line else ():
                yield number, match[0].rstrip(_AFTER).replace("&amp;", "&").replace("\\u0026", "&")


def _is_signed(address: str) -> bool:
    """Return True for an address with a password, or with a parameter by which stores sign."""
    prefix = _USER.match(address)
    names = (unquote(part.partition("=")[0]).lower() for part in _SEPARATOR.split(address)[2::2])
    return (prefix is not None and ":" in prefix["user"]) or any(map(_STORE_SIGNATURE.fullmatch, names))
