"""Programs of a model: right ones pass, hostile ones are contained."""

from __future__ import annotations

import pytest

from benchmarks.hostile_programs import FORGERIES, FORGERY_TEST, HOSTILE, is_contained
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate import sandbox
from flatshift.finetune.evaluate.sandbox import ResourceLimits, check_sandbox_available, run_program, run_programs
from flatshift.finetune.evaluate.text_metrics import pass_at_k


def _contained() -> bool:
    try:
        return check_sandbox_available()
    except UserError:
        return False


needs_namespaces = pytest.mark.skipif(not _contained(), reason="this system gives no namespaces")
QUICK = (
    "ends early with success", "never ends", "holds System V shared memory", "reads the user's file", "lists processes",
    "writes to a terminal by its number", "has inherited descriptors", "calls a socket by its path",
    "sends from a pair to a path", "forks once", "makes a namespace of users", "makes the library writable",
    "says what its callers hold", "equals everything", "is a float that equals everything", "stops an iteration",
    "replies with the test's operations", "kills itself", "finds the test",
)  # fmt: skip
SHORT = ResourceLimits(seconds=1.0)

# as HumanEval and MBPP have them: a program, its test
RIGHT = {
    "a function under check": (
        "from typing import List\ndef f(xs: List[float]) -> bool:\n    return sorted(xs) == xs",
        "METADATA = {}\ndef check(candidate):\n    assert candidate([1.0, 2.0]) == True\n"
        "    assert not candidate([2.0, 1.0])\ncheck(f)",
    ),
    "a helper of the prompt": (
        "import math\ndef poly(xs, x):\n    return sum(c * math.pow(x, i) for i, c in enumerate(xs))\n"
        "def root(xs):\n    return -xs[0] / xs[1]",
        "import copy\ndef check(candidate):\n    xs = [1, 2]\n"
        "    assert math.fabs(poly(xs, candidate(copy.deepcopy(xs)))) < 1e-4\ncheck(root)",
    ),
    "plain data of every kind": (
        "import collections, datetime, decimal, fractions\ndef same(x):\n    return x\ndef count(x):\n"
        "    return collections.Counter(x)\nP = collections.namedtuple('P', 'a b')",
        "from datetime import date\nfrom decimal import Decimal\nfrom fractions import Fraction\n"
        "for x in (1, 2**70, -2**90000, 1.5, float('inf'), 'é\\ud800', b'x', bytearray(b'y'), None, True, 1j, "
        "range(3), (1, [2]), {1, 2}, frozenset('a'), {(1, 2): {'a': [None]}}, int, Decimal('1.10'), Fraction(1, 3), "
        "date(2026, 1, 2)):\n    y = same(x)\n    assert y == x and type(y) is type(x), x\n"
        "assert count('aab') == {'a': 2, 'b': 1} and P(1, 2) == (1, 2)",
    ),
    "types and functions as arguments": (
        "def drop(xs, kind):\n    return [x for x in xs if not isinstance(x, kind)]\n"
        "def twice(f, x):\n    return f(f(x))\ndef adder(n):\n    return lambda x: x + n",
        "assert drop((4, 7.7), float) == [4] and twice(lambda x: x * 3, 2) == 18 and adder(2)(3) == 5\n"
        "assert twice(adder(1), 0) == 2 and sorted([3, 1], key=adder(1)) == [1, 3]",
    ),
    "objects of the program": (
        "class Node:\n    def __init__(self, data):\n        self.data, self.left = data, None\n"
        "    def __eq__(self, other):\n        return self.data == other.data\n    def __add__(self, other):\n"
        "        return Node(self.data + other.data)\n    def __len__(self):\n        return 3\n"
        "root = Node(1)\nroot.left = Node(2)\ndef height(node):\n    return 1 + height(node.left) if node else 0\n"
        "Node.__bool__ = lambda self: True",
        "assert height(root) == 2 and root.left.data == 2 and Node(2) == root.left and Node(3) != root.left\n"
        "root.left.left = Node(9)\nassert height(root) == 3 and len(root) == 3 and (root + root.left).data == 3\n"
        "assert isinstance(root, Node) and not isinstance(1, Node)",
    ),
    "iterations, changes in place, state": (
        "calls = 0\ndef count(n):\n    global calls\n    calls += 1\n    yield from range(n)\n"
        "def sort(xs):\n    xs.sort()\ndef put(d, *, key):\n    d[key] = [key]",
        "assert list(count(3)) == [0, 1, 2] and sum(count(4)) == 6 and calls == 2\nit = count(1)\n"
        "assert next(it) == 0 and next(it, None) is None\nxs, d = [3, 1, 2], {}\nsort(xs)\nput(d, key='a')\n"
        "assert xs == [1, 2, 3] and d == {'a': ['a']}",
    ),
    "errors": (
        "class Base(ValueError):\n    pass\nclass Empty(Base):\n    pass\n"
        "def first(xs):\n    if not xs:\n        raise Empty('nothing')\n"
        "    return xs[0]\ndef key(d):\n    return d['k']\ndef text(b):\n    return b.decode()",
        "def error(f, *args):\n    try:\n        f(*args)\n    except Exception as e:\n        return e\n"
        "assert type(error(first, [])) is not ValueError and isinstance(error(first, []), ValueError)\n"
        "assert str(error(first, [])) == 'nothing' and isinstance(error(key, {}), KeyError)\n"
        "assert isinstance(error(text, b'\\xff'), ValueError)\n"
        "try:\n    first([])\nexcept Base as e:\n    assert type(e) is Empty",
    ),
    "libraries and its own files": (
        "import asyncio, bisect, hashlib, heapq, itertools, re, ssl, sqlite3, string, tempfile, threading, zoneinfo\n"
        "async def later():\n    await asyncio.sleep(0.01)\n    return 5\ndef f():\n"
        "    with tempfile.TemporaryFile() as file:\n        file.write(b'x')\n    open('own', 'w').write('y')\n"
        "    threads = [threading.Thread(target=hashlib.sha256) for _ in range(2)]\n"
        "    [t.start() or t.join() for t in threads]\n    return asyncio.run(later()), open('own').read()",
        "assert f() == (5, 'y')",
    ),
    "a function under the name of one of Python's": (
        "def sum(a, b):\n    return a * b",
        "import math\ndef close(x, y):\n    return math.isclose(x, y)\nassert close(sum(2, 3), 6)",
    ),
    "a main part": ("if __name__ == '__main__':\n    value = 3", "assert value == 3"),
}
WRONG = {
    "a wrong answer": ("def f(): return 1", "assert f() == 2"),
    "no such name": ("", "assert f() == 2"),
    "another meaning of what the test uses": ("def f(): return 1\ndef abs(x): return 0", "assert abs(f() - 2) < 1"),
    "that beside a function under the name of one of Python's": (
        "def sum(a, b): return 1\ndef abs(x): return 0",
        "assert abs(sum(2, 3) - 5) < 1",
    ),
    "bad syntax": ("def f(:", "pass"),
    "bad syntax of the test": ("", "assert ("),
    "a missing import": ("import nothing_of_the_kind", "pass"),
    "an error": ("1 / 0", "pass"),
    "an error under test": ("def f(): return 1 / 0", "f()"),
    "a test that ends early": ("", "raise SystemExit(0)"),
}


@needs_namespaces
def test_right_programs_pass() -> None:
    assert dict(zip(RIGHT, run_programs([*RIGHT.values()], workers=2), strict=True)) == dict.fromkeys(RIGHT, "passed")


@needs_namespaces
def test_wrong_programs_fail() -> None:
    found = run_programs([*WRONG.values()], SHORT, workers=2)
    assert dict(zip(WRONG, found, strict=True)) == dict.fromkeys(WRONG, "failed")


@needs_namespaces
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in (*HOSTILE, *FORGERIES)]
)
def test_hostile_programs_are_contained(name: str) -> None:
    assert is_contained(name)


@needs_namespaces
def test_the_forgeries_have_a_right_answer() -> None:
    right = "def answer(n):\n    return [k + 1 for k in n] if isinstance(n, list) else n + (n if n == 'word' else 1)"
    assert run_program(right, FORGERY_TEST, SHORT) == "passed"


@needs_namespaces
def test_time_and_memory_are_limited_while_a_test_runs() -> None:
    sleeps = "import time\ndef f(): time.sleep(100)"
    assert run_program(sleeps, "f()", SHORT) == "timed out"
    assert run_program("", "while True: pass", SHORT) == "timed out"
    takes = "def f(): return len(bytearray(300 << 20))"
    assert run_program(takes, "assert f()", SHORT) == "passed"
    assert run_program(takes, "assert f()", ResourceLimits(memory=256 << 20)) == "failed"


def test_nothing_is_run_where_it_cannot_be_contained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_can_run", lambda *, contained: not contained)
    with pytest.raises(UserError, match="no namespaces"):
        check_sandbox_available()
    assert check_sandbox_available(unsafe=True) is False
    assert run_program("def f(): return 1", "assert f() == 1", contained=False) == "passed"
    assert run_program("def f(): return 2", "assert f() == 1", contained=False) == "failed"


def test_pass_at_k_is_unbiased() -> None:
    # the mean over all ways to draw k of n samples, by hand
    assert pass_at_k(5, 2, 1) == pytest.approx(2 / 5)
    assert pass_at_k(5, 2, 2) == pytest.approx(1 - 3 / 10)
    assert pass_at_k(5, 0, 3) == 0.0 and pass_at_k(5, 3, 3) == 1.0
    with pytest.raises(ValueError, match="pass@6 of 5"):
        pass_at_k(5, 1, 6)
