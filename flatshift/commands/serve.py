"""`flatshift serve`: serve finished generative runs behind an endpoint on this machine."""

from __future__ import annotations

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

    Requests are answered one at a time and without an API key: for many users, export the run for vLLM.
    """

    runs: Positional[tuple[Path, ...]]
    """Run directories."""
    host: str = "127.0.0.1"
    """Address to listen on; any but this machine's own lets other machines in."""
    port: int = 8000
    """Port; 0: any free one."""
    device: str | None = None
    """auto, cpu, cuda or cuda:N; by default the runs' own."""


def run(argv: list[str]) -> int:
    """Run `flatshift serve`."""
    flags: Flags = parse_flags(Flags, "serve", argv)
    if not 0 <= flags.port < 65536:
        raise UserError(f"--port {flags.port}: give a number from 0 to 65535")
    from flatshift.experiments.workflows.generate import GenerativeRuns
    from flatshift.experiments.workflows.serve import Server

    overrides = [] if flags.device is None else [from_override("train.device", flags.device, "--device")]
    runs = GenerativeRuns(flags.runs, overrides=overrides)
    with Server(runs, flags.host, flags.port) as server:
        host, port = server.server_address[:2]
        if flags.host not in ("127.0.0.1", "localhost", "::1"):
            print(f"warning: {flags.host} lets other machines ask, and no key is asked for", file=sys.stderr)
        print(f"{', '.join(runs.names)} at http://{host!s}:{port}/v1; Ctrl-C ends it", file=sys.stderr, flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
    return 0
