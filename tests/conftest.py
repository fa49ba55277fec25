"""Every process of the tests: one compute thread (bits depend on the count), this source tree, a limit in CPU time."""

import gc
import hashlib
import os
import signal
import types
from pathlib import Path

import pytest

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH")])
)

os.fsync = lambda handle: None  # saves that only a power cut could lose; a killed process loses none of them

CPU_S = 240.0
"""What one test may compute, with the processes it waits for; `timeout` (wall time) is only there for what hangs."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """Hold every test but the slow ones to `CPU_S`, however long the machine makes it wait."""
    before = sum(os.times()[:4])
    result = yield
    spent = sum(os.times()[:4]) - before
    if spent > CPU_S and item.get_closest_marker("slow") is None:
        pytest.fail(f"{spent:.0f} CPU-seconds, over {CPU_S:.0f}: make it smaller, or mark it slow")
    return result


@pytest.fixture(scope="session")
def check_server():
    """One process for the checks of all modules that use `warm_checks`."""
    from tests.support.warm_checks import Server

    server = Server()
    yield server
    server.end()


@pytest.fixture(scope="module")
def warm_checks(check_server):
    """Check exported folders in forked children of one process with the imports done (`tests.support.warm_checks`)."""
    from flatshift.experiments.workflows import folder_check

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_check, "subprocess", types.SimpleNamespace(run=check_server.run))
        yield


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama on disk."""
    from tests.support.finetune_models import save_backbone

    return save_backbone("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def source(llama: Path) -> Path:
    """The backbone of a module that has none of its own."""
    return llama


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Backbones by kind, of a module that has none of its own."""
    from tests.support.finetune_models import save_backbone

    return {kind: save_backbone(kind, tmp_path_factory.mktemp(kind)) for kind in ("llama", "gpt2")}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random BERT on disk, with its tokenizer."""
    from tests.support.objective_models import save_encoder

    return save_encoder(tmp_path_factory.mktemp("encoder"))


def _shipped() -> dict[str, str]:
    """SHA-256 of every file of the shipped backbones."""
    place = Path(__file__).resolve().parent.parent / "finetune" / "backbones"
    return {
        str(file.relative_to(place)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(place.rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
    }


@pytest.fixture(scope="session", autouse=True)
def frozen_backbones():
    """Frozen means frozen: no command of the suite changes, adds or removes a file of the shipped backbones."""
    before = _shipped()
    yield
    after = _shipped()
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    assert not changed, f"the suite changed the shipped backbones: {', '.join(changed)}"


@pytest.fixture(autouse=True)
def stop_signals():
    """Restore the handlers of stop signals: a rank that fails ignores them, and one that ran in the process of a test
    would leave this to all later ones and their children (whose pools of workers then never end)."""
    from flatshift.finetune.errors import STOP_SIGNALS

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """Hide what collection and earlier modules made from the garbage collector.

    Every training ends with a search for garbage, which takes seconds in a worker that has run thousands of tests.
    """
    gc.collect()
    gc.freeze()
