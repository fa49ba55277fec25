"""`flatshift serve`: serve finished generative runs behind an endpoint on this machine."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from flatshift.command_line import parse_flags
from flatshift.experiments.recipe import from_override
from flatshift.finetune.errors import UserError


@dataclass(frozen=True)
class Flags:
    """Serve finished runs over the OpenAI protocol, to try them with any client; the request's `model` names the run.

    Requests that wait for one run are answered together. For many users, export the run for vLLM.
    """

    runs: Positional[tuple[Path, ...]]
    """Run directories."""
    host: str = "127.0.0.1"
    """Address to listen on; any but this machine's own lets other machines in."""
    port: int = 8000
    """Port; 0: any free one."""
    allow_origin: tuple[str, ...] = ()
    """Sites (https://host:port) whose web pages may ask, besides this machine's own; *: any."""
    api_key: str | None = None
    """Key that clients must send; by default none."""
    device: str | None = None
    """auto, cpu, cuda or cuda:N; by default the runs' own."""


def run(argv: list[str]) -> int:
    """Run `flatshift serve`."""
    flags: Flags = parse_flags(Flags, "serve", argv)
    if not 0 <= flags.port < 65536:
        raise UserError(f"--port {flags.port}: give a number from 0 to 65535")
    for origin in flags.allow_origin:
        if origin != "*" and not re.fullmatch(r"https?://[^/\s]+/?", origin):
            raise UserError(f"--allow-origin {origin}: give a site such as https://example.org, or *")
    if flags.api_key is not None and not re.fullmatch(r"[!-~]+", flags.api_key):
        raise UserError("--api-key: give a key of visible ASCII characters")
    from flatshift.experiments.workflows.generate import GenerativeRuns
    from flatshift.experiments.workflows.serve import Server

    overrides = [] if flags.device is None else [from_override("train.device", flags.device, "--device")]
    runs = GenerativeRuns(flags.runs, overrides=overrides)
    with Server(runs, flags.host, flags.port, allow_origins=flags.allow_origin, api_key=flags.api_key) as server:
        if flags.host not in ("127.0.0.1", "localhost", "::1") and flags.api_key is None:
            print(f"warning: {flags.host} lets other machines ask, and no --api-key is set", file=sys.stderr)
        print(f"{', '.join(runs.names)} at {server.url}; Ctrl-C ends it", file=sys.stderr, flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
    return 0
