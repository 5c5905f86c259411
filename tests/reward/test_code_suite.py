"""The tests of verifier `code`: what they may ask of the tested code's objects, and what they may do themselves."""

import errno
import fcntl
import os
import resource
import socket
from pathlib import Path

import pytest

from reward.code import READS
from reward.verdict import VerifierError
from tests.reward.test_code import ADD, right

FORGED = """
class Forged:
    def yes(self, *_): return True
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = yes
    __hash__ = object.__hash__
    def __len__(self): return 4
    def __iter__(self): return iter([4])
    def __str__(self): return "5"
def f(x): return Forged()
"""


@pytest.mark.parametrize(
    "tests",
    [
        *(f"assert f(1) {operator} 4" for operator in ("==", "!=", "<", "<=", ">", ">=")),
        *(f"assert not f(1) {operator} 4" for operator in ("==", "!=", "<", "<=", ">", ">=")),
        *(f"assert f(1) {operator} {{4}}" for operator in ("in", "not in")),
        "assert 4 != f(1)",
        "assert f(1) not in [4]",
        "assert 4 not in f(1)",
        "assert f(1) == f(2)",
        "assert f(1) != f(2)",
        "assert [f(1)] != [4]",
        "assert (1, f(1)) != (1, 4)",
        "assert f(1)",
        "assert not f(1)",
        "assert list(f(1)) == [4]",
        "assert f'{f(1):>3}' != '4'",
        "try:\n    f(1) + 1\nexcept TypeError:\n    pass\nelse:\n    assert False",
        "try:\n    assert f(1) == 4\nexcept:\n    pass",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertNotEqual(f(1), 4)",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n"
        "        with self.assertRaises(Exception): f(1) == 4",
    ],
)
def test_nothing_that_an_object_of_the_tested_code_says_of_itself_is_believed(tests):
    assert not right(FORGED, tests=f"{tests}\nassert f(1) is not None")


LINKED = """
class Node:
    def __init__(self, value=0, next=None):
        self.value, self.next = value, next
    def add(self, x):
        self.value += x
        return self
def reverse(node):
    before = None
    while node:
        node.next, before, node = before, node, node.next
    return before
def same(x): return x
"""


@pytest.mark.parametrize(
    "tests",
    [
        "h = reverse(Node(1, Node(2, Node(3))))\nassert [h.value, h.next.value, h.next.next.value] == [3, 2, 1]",
        "assert reverse(Node(1, Node(2))).next.next is None",
        "a, b = Node(1), Node(2)\na.next = b\nassert a.next is b and reverse(a) is b and b.next is a",
        "a = Node(3)\nassert same(a) is a and a.add(2) is a and a.value == 5 and Node(3) is not a",
        "a = Node()\na.value = [1, {2}]\nassert a.value == [1, {2}] and not a.next and not hasattr(a, 'other')",
    ],
)
def test_objects_lead_to_others_and_are_changed_by_the_tests(tests):
    assert right(LINKED, tests=tests)


@pytest.mark.parametrize(
    "tests",
    [
        "assert same(Node()) is Node",
        "a = Node(1, Node(2))\nassert a.next == Node(2)",
        "a = Node(1, Node(2))\nassert a.next",
        "a = Node(1, Node(2))\nassert a.next is Node(2)",
        "a = Node(1)\ndel a.value",
    ],
)
def test_of_two_objects_only_identity_is_known(tests):
    assert not right(LINKED, tests=tests)


def test_objects_have_identity_and_a_text():
    assert right(FORGED, tests="x = f(1)\nassert x is x and x is not None\nassert str(x) == '5'\nprint(x, [x])")
    assert not right(FORGED, tests="assert str(f(1)) == '4'")


@pytest.mark.parametrize("error", ["ValueError", "Exception"])
def test_an_exception_is_an_answer(error):
    tests = f"import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertRaises({error}, f, 1)"
    assert right("def f(x): raise ValueError('no')", tests=tests)
    assert not right("def f(x): return 1", tests=tests)
    assert not right("pass", tests=tests)
    assert not right("import os\nos._exit(0)", tests=tests)


@pytest.mark.parametrize(
    "tests",
    [
        "open('MARK', 'w')",
        "open('MARK', 'a')",
        "import os\nos.remove('MARK')",
        "import os\nos.fork()",
        "import subprocess\nsubprocess.run(['true'])",
        "import socket\nsocket.socket()",
        "import os\nos.kill(os.getppid(), 0)",
        "import os\nos.close(os.dup(1))",
        "open(f'/proc/self/mem', 'r+b')",
    ],
)
def test_tests_may_compute_and_read_and_nothing_else(tests, tmp_path):
    """They come out of a data file, and a data file does not choose code to run."""
    mark = tmp_path / "mark"
    mark.write_text("here")
    assert not right(ADD, tests=f"{tests.replace('MARK', str(mark))}\nassert add(1, 1) == 2")
    assert mark.read_text() == "here"


def test_tests_hold_no_descriptor_of_their_judge():
    """The worker's is the line to the pool, on which verdicts are given."""
    tests = (
        "import os, stat\ndef is_socket(fd):\n    try: return stat.S_ISSOCK(os.fstat(fd).st_mode)\n"
        "    except OSError: return False\nassert [fd for fd in range(add(999, 1)) if is_socket(fd)] == []"
    )
    with socket.socket():
        assert right(ADD, tests=tests)


@pytest.mark.parametrize(
    "tests",
    [
        "import math, random, time, unittest.mock, colorsys\ntime.sleep(0.01)\nassert math.isclose(add(0.1, 0.2), 0.3)",
        "from datetime import datetime\nassert add(1, datetime.strptime('2', '%d').day) == 3",
        "from pathlib import Path\nassert add(Path('MARK').read_text(), '!') == 'here!'\n"
        "assert list(Path('MARK').parent.iterdir())",
        "import numpy as np\nnp.testing.assert_allclose(add(1.0, 2.0), 3.0)",
    ],
)
def test_tests_may_import_what_is_installed(tests, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # as in the pool: no process of it may start a thread
    monkeypatch.setenv(READS, str(tmp_path))
    mark = tmp_path / "mark"
    mark.write_text("here")
    assert right(ADD, tests=tests.replace("MARK", str(mark)))


def test_a_program_may_read_all_its_input_at_once():
    source = """import io, os
input = io.BytesIO(os.read(0, os.fstat(0).st_size)).readline
print(sum(int(input()) for _ in range(int(input()))))"""
    long = [str(n) for n in range(30_000)]
    assert right(source, cases=[{"input": "\n".join([str(len(long)), *long]), "output": str(sum(range(len(long))))}])


@pytest.mark.parametrize("module", ["venv.__main__", "unittest.__main__", "lib2to3.__main__", "this", "antigravity"])
def test_what_a_program_imports_does_nothing_before_the_lock(module):
    """`venv.__main__` made a folder of the sandbox's first argument."""
    assert right(f"try:\n    import {module}\nexcept BaseException: pass\ndef f(): return 1", tests="assert f() == 1")
    assert not Path("/functions").exists()


def test_the_standard_library_can_be_imported_behind_the_first_lock():
    names = """math random statistics collections itertools functools heapq bisect re json datetime decimal fractions
        string typing dataclasses enum copy operator asyncio concurrent.futures multiprocessing threading queue hashlib
        secrets uuid zlib sqlite3 csv io os.path pathlib tempfile logging unittest xml.etree.ElementTree urllib.parse
        http.client ssl socket ctypes array struct cmath zoneinfo"""
    source = "".join(f"import {name}\n" for name in names.split()) + "def f(): return uuid.uuid4().version"
    assert right(source, tests="assert f() == 4", cpu_s=20)


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("def f(x): x.sort()", "x = [3, 1]\nf(x)\nassert x == [1, 3]"),
        ("def f(m):\n  for row in m: row.reverse()", "m = [[1, 2], [3, 4]]\nf(m)\nassert m == [[2, 1], [4, 3]]"),
        ("def f(d, *, key): d[key] = 1; key_gone = d.pop('a')", "d = {'a': 0}\nf(d, key='b')\nassert d == {'b': 1}"),
        ("def f(a, s):\n  s.add(4)\n  a.append(5)", "a, s = [], {1}\nf(a, s)\nassert (a, s) == ([5], {1, 4})"),
        (
            "def f(d): d['x'] += 1",
            "from collections import defaultdict\nd = defaultdict(int)\nd['x'] = 2\nf(d)\nassert d['x'] == 3",
        ),
        ("def f(q): q.rotate(1)", "from collections import deque\nq = deque([1, 2])\nf(q)\nassert list(q) == [2, 1]"),
        ("class S:\n  def go(self, x): x[:] = [1]", "x = [0]\nS().go(x)\nassert x == [1]"),
    ],
)
def test_what_is_changed_in_place_is_seen(code, tests):
    assert right(code, tests=tests)


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("def f(x): x.sort(reverse=True)", "x = [3, 1, 4]\nf(x)\nassert x == [1, 3, 4]"),
        ("def f(x):\n  x.clear()\n  return []", "x = [3, 1]\nassert f(x) == sorted(x)"),
        ("def f(x):\n  x.append(1)\n  return 0", "x = [3]\nf(x)\nassert x == [3, 1]"),
        (
            "def f(x):\n  class L(list):\n    __eq__ = lambda *_: True\n  x[:] = [L()]",
            "x = [3]\nf(x)\nassert x == [[1]]",
        ),
        ("def f(x): x.append(object())", "x = [3]\nf(x)\nassert len(x) == 2"),
    ],
)
def test_nothing_else_is(code, tests):
    assert not right(code, tests=tests)


def test_the_tests_have_no_descriptor_of_the_worker_even_above_the_limit():
    """A limit that was lowered after the descriptor was opened; one that is huge takes no time."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull, "w") as line:
        high = fcntl.fcntl(line, fcntl.F_DUPFD, 600)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, limits[1]))
    try:
        closed = f"import os\ntry: os.fstat({high})\nexcept OSError: pass\nelse: assert False\nassert add(2, 3) == 5"
        assert right(ADD, tests=closed)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(high)


@pytest.mark.parametrize("call", ["subprocess.Popen", "os.fork", "os.memfd_create"])
def test_where_no_process_can_be_started_nothing_is_wrong(call, monkeypatch):
    """The run stops, and does not learn that right code is wrong."""

    def full(*_, **__):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(call, full)
    truth = (
        {"cases": [{"input": "", "output": "5"}]} if call == "os.memfd_create" else {"tests": "assert add(2, 3) == 5"}
    )
    with pytest.raises(VerifierError, match=r"does not start .*temporarily unavailable"):
        right(ADD, **truth)
