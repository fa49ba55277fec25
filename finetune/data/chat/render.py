"""Rendering of Jinja templates: those of strangers in a child process with limits of time, memory and output.

Jinja's sandbox keeps a template from Python's objects, but not from nested loops or `'a' * 3_000_000_000`. One child
serves all renderings of a process: every one is limited, as what a template does depends on the conversation.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any

from ...compute.limited_process import LimitedProcess

MAX_OUTPUT = 1 << 25
"""Characters of a rendered conversation."""


def render_jinja(request: dict[str, Any]) -> dict[str, Any]:
    """Return `text` and `blocks` of a rendering by transformers, or the reason of a `failure` or `syntax` error.

    request: the arguments of `render_jinja_template`.
    """
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered: Any = render_jinja_template(**request)
    except TemplateSyntaxError as error:
        return {"syntax": f"line {error.lineno}: {error}"}
    except Exception as error:  # a template may cause any of Python's errors
        return {"failure": (str(error).splitlines() or [""])[0] or type(error).__name__}
    (text,), blocks = rendered
    if len(text) > MAX_OUTPUT:
        return {"failure": f"it writes more than {MAX_OUTPUT:,} characters"}
    return {"text": text, "blocks": list(blocks[0]) if request["return_assistant_tokens_mask"] else []}


class _Renderer:
    """The child of this process, its lock, and what makes others of them after a fork."""

    lock = threading.Lock()
    child: LimitedProcess | None = None


def render_in_child(request: dict[str, Any]) -> dict[str, Any]:
    """Return what `render_jinja` does, computed in the child. Raises LimitExceeded; the next call starts another."""
    with _Renderer.lock:
        if _Renderer.child is None or _Renderer.child.owner != os.getpid():
            from transformers.utils import chat_template_utils  # noqa: F401 - before the fork, so that it has it

            _Renderer.child = LimitedProcess(render_jinja)
        try:
            return dict(_Renderer.child.ask(request))
        except BaseException:  # also an interruption, after which an answer would come to the next request
            close_renderer()
            raise


@atexit.register
def close_renderer() -> None:
    """End the child, if there is one."""
    if _Renderer.child is not None:
        _Renderer.child.close()
        _Renderer.child = None


def _replace_lock() -> None:
    _Renderer.lock = threading.Lock()


os.register_at_fork(after_in_child=_replace_lock)
