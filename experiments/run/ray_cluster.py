"""Connection of a command to a Ray cluster (`--on ray[:ADDRESS]`), and the resources of its nodes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flatshift.finetune.errors import UserError
from flatshift.finetune.launch.spawn import THREAD_VARIABLES

_CONNECT_S = 4.0


def require_ray() -> Any:
    """Return the package ray. Raises UserError if it is not installed."""
    try:
        import ray
    except ModuleNotFoundError:
        raise UserError("--on ray needs the package ray; pip install 'flatshift[ray]'") from None
    return ray


@contextlib.contextmanager
def ray_cluster(address: str | None, *, threads: int | None = None) -> Iterator[Any]:
    """Connect to a cluster and yield the package ray; a connection that is there already stays.

    address: HOST:PORT; None: that of RAY_ADDRESS, or the cluster that this machine belongs to. threads: CPU threads of
    a worker; None: Ray's choice. Raises UserError if there is no cluster.
    """
    ray = require_ray()
    if ray.is_initialized():
        yield ray
        return
    named = address or os.environ.get("RAY_ADDRESS")
    address = named or _last_started_address()
    _check_reachable(address)
    on_stop = signal.getsignal(signal.SIGTERM)
    variables = {} if threads is None else dict.fromkeys(THREAD_VARIABLES, str(threads))
    try:
        ray.init(
            address=named or "auto",  # as `auto` Ray takes the token that `ray start` may have left here
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": variables},
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"--on ray: no Ray cluster at {address} ({reason}); start one with `ray start --head`, or set "
            "RAY_AUTH_MODE=token if it asks for a token"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():  # Ray's own handler ends the command at once
            signal.signal(signal.SIGTERM, on_stop)
    try:
        yield ray
    finally:
        ray.shutdown()


def _last_started_address() -> str:
    """Return the address that `ray start` left on this machine. Raises UserError if there is none."""
    # As `auto` does, but `ray.init` would wait without end for a cluster that was killed.
    file = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray" / "ray_current_cluster"
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        raise UserError(
            "--on ray: this machine belongs to no Ray cluster; start one with `ray start --head`, or name one as "
            "ray:HOST:PORT"
        ) from None


def _check_reachable(address: str) -> None:
    """Raise UserError if nothing listens at HOST:PORT: Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"--on ray:{address}: write ray:HOST:PORT, for example ray:head:6379")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"--on ray: no Ray cluster at {address} ({error}); start one with `ray start --head`") from None


def count_room(ray: Any, needs: Mapping[str, float], subject: str) -> list[int]:
    """Return how often each node of the cluster has the resources `needs` (Ray's name → amount), used ones included.

    Raises UserError if no node has them for one `subject`: Ray would wait for such a node for ever.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = [int(min(node.get(name, 0) // amount for name, amount in needs.items())) for node in nodes]
    if not any(room):
        most = {name: max((node.get(name, 0) for node in nodes), default=0) for name in needs}
        raise UserError(
            f"no node of the Ray cluster has {_describe(needs)} for a {subject}; the most on a node: {_describe(most)}"
        )
    return room


def _describe(resources: Mapping[str, float]) -> str:
    words = [
        f"{amount / 2**30:.1f} GiB of memory" if name == "memory" else f"{amount:g} {name}{'s' * (amount != 1)}"
        for name, amount in resources.items()
    ]
    return " and ".join(words)
