"""Verifier `code` on programs and tests as models and data sets write them."""

import resource

import pytest

from reward.code.values import NotPlain
from reward.verdict import VerificationRequest, VerifierError
from reward.verifiers import code, json_answer
from tests.reward.test_code import ADD, right

NOT_RUN = [
    "class TestAdd:\n    def test_more(self): assert add(1, 2) == 3",
    "async def test_more(): assert add(1, 2) == 3",
    "import unittest\nclass T(unittest.TestCase):\n    async def test_more(self): self.assertEqual(add(1, 2), 3)",
    "def check(candidate): assert candidate(1, 2) == 3",
    "if __name__ == '__main__': assert add(1, 2) == 3",
    "def run(): assert add(1, 2) == 3\nif __name__ == '__main__': run()",
    "def test_more():\n    assert add(1, 2) == 3\n    yield",
    "import pytest\n@pytest.mark.parametrize('a', [1, 2])\ndef test_more(a): assert add(a, 1) == a + 1",
]


@pytest.mark.parametrize("tests", NOT_RUN)
@pytest.mark.parametrize("source", [ADD, "def add(a, b): return 0"])
def test_what_is_checked_where_nothing_runs_it_is_an_error_and_never_a_credit(tests, source):
    with pytest.raises(NotPlain, match=r"line \d+ of the tests: nothing runs what is checked there"):
        right(source, tests=f"assert add(0, 0) == 0\n{tests}")
    assert not right("def add(a, b): return 1", tests=f"assert add(0, 0) == 0\n{tests}")


def test_what_checks_nothing_need_not_be_run():
    tests = "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(add(1, 2), 3)\n"
    assert right(ADD, tests=tests + "def unused(): print(1)\nif __name__ == '__main__': unittest.main()")


@pytest.mark.parametrize(
    "tests", ["assert math.isclose(add(1, 2), 3)", "def test_it(): np.testing.assert_allclose(add(1, 2), 3)"]
)
def test_a_module_that_the_tests_do_not_import_is_not_taken_from_the_response(tests):
    cheat = "class math: isclose = staticmethod(lambda *a, **k: True)\ndef add(a, b): return 0"
    with pytest.raises(VerifierError, match=r"the tests use (math|np) and do not import it"):
        right(cheat, tests=tests)


def test_a_function_may_have_a_modules_name():
    assert right("def queue(x): return x + 1", tests="assert queue(1) == 2")


@pytest.mark.parametrize(
    ("source", "tests"),
    [
        ("def test_duplicate(x): return len(x) > len(set(x))", "assert test_duplicate([1, 1]) is True"),
        ("class Solution:\n    def add(self, a, b): return a + b", "test = Solution()\nassert test.add(1, 2) == 3"),
        (ADD, "def test(a, b, expected): assert add(a, b) == expected\ntest(1, 2, 3)"),
        (ADD, "from solution import add as plus\ndef test_it(): assert plus(1, 2) == 3"),
        (ADD, "from solution import *\ndef test_it(): assert add(1, 2) == 3"),
        ("from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
         "    after: 'P | None' = None\ndef f(a): return P(a).x", "assert f(3) == 3"),
        ("import pickle\nclass P: pass\ndef f(): return type(pickle.loads(pickle.dumps(P()))) is P", "assert f()"),
        ("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, [2])",
         "p = f()\nassert p.x == 1 and p == (1, [2]) and str(p) == 'P(x=1, y=[2])'"),
        ("from datetime import *\ndef f(): return [date(2020, 1, 2), datetime(2020, 1, 2, 3), timedelta(1)]",
         "from datetime import *\n"
         "assert f() == [date(2020, 1, 2), datetime(2020, 1, 2, 3), timedelta(1)]"),
        ("class Empty(Exception): pass\nclass Stack:\n    def pop(self): raise Empty('none', 3)",
         "try: Stack().pop()\nexcept Empty as e: assert e.args == ('none', 3)\nelse: assert False"),
        ("class Empty(LookupError):\n    def __str__(self): return 'none'\ndef f(): raise Empty",
         "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n"
         "        with self.assertRaisesRegex(Empty, 'none'): f()\n"
         "        with self.assertRaises(LookupError): f()"),
        ("class Bad(ValueError): pass\nclass Worse(Bad): pass\ndef f(): raise Worse('no')",
         "try: f()\nexcept (Bad, KeyError) as e: assert str(e) == 'no'\nelse: assert False"),
        ("import json\ndef f(s): return json.loads(s)",
         "import json\ntry: f('{')\nexcept json.JSONDecodeError as e: assert 'line 1' in str(e)\nelse: assert False"),
        ("def f(b): return b.decode()", "try: f(b'\\xff')\nexcept UnicodeDecodeError: pass\nelse: assert False"),
        ("def f(d): return d['k']", "try: f({})\nexcept KeyError as e: assert e.args[0] == 'k'\nelse: assert False"),
        ("def f():\n    a, b = 0, 1\n    while True:\n        yield a\n        a, b = b, a + b",
         "g = f()\nassert [next(g) for _ in range(7)] == [0, 1, 1, 2, 3, 5, 8]"),
        ("def f():\n    yield 1\n    raise ValueError",
         "g = f()\nassert next(g) == 1\ntry: next(g)\nexcept ValueError: pass\nelse: assert False"),
        ("class Node:\n    def __init__(self, x): self.x = x\ndef f():\n    yield Node(1)\n    yield Node(2)",
         "assert [node.x for node in f()] == [1, 2] and list(f())"),
        ("class Stack:\n    def __init__(self): self.items = {}\n    def __len__(self): return len(self.items)\n"
         "    def __getitem__(self, key): return self.items[key]\n"
         "    def __setitem__(self, key, value): self.items[key] = value\n"
         "    def __delitem__(self, key): del self.items[key]",
         "s = Stack()\ns['a'] = 1\ns['b'] = 2\ndel s['a']\nassert len(s) == 1 and s['b'] == 2\n"
         "try: s['a']\nexcept KeyError: pass\nelse: assert False"),
        ("import functools\n@functools.singledispatch\ndef f(x): return 'other'\n@f.register\n"
         "def _(x: int): return 'int'", "assert f(1) == 'int' and f('a') == 'other'"),
        ("import codecs\ndef f(s): return codecs.encode(s, 'rot13'), s.encode('utf-16-le'), s.encode('cp1252')",
         "assert f('a') == ('n', b'a\\0', b'a')"),
        ("def f(): return __import__('heapq').nsmallest(1, [2, 1])", "assert f() == [1]"),
        ("import argparse\ndef f(): return argparse.ArgumentParser().parse_args([])", "assert f() is not None"),
    ],
)  # fmt: skip
def test_what_plain_python_passes_passes_here(source, tests):
    assert right(source, tests=tests)


@pytest.mark.parametrize(
    ("source", "tests"),
    [
        ("class Empty(Exception): pass\ndef f(): raise Exception",
         "try: f()\nexcept Empty: pass\nelse: assert False"),
        ("class Empty(Exception): pass\ndef f(): return 1", "try: f()\nexcept Empty: pass\nelse: assert False"),
        ("from unittest import SkipTest\ndef f(): raise SkipTest",
         "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(), 1)"),
        ("def f(): yield 1", "assert list(f()) == [1, 2]"),
        ("def f():\n    while True: yield 1", "assert list(f()) == [1]"),
        ("class Shape: pass\ndef f(): return 3", "assert isinstance(f(), Shape)"),
    ],
)  # fmt: skip
def test_and_what_it_fails_fails(source, tests):
    assert not right(source, tests=tests, cpu_s=1)


def test_many_cases_take_one_start():
    cases = [{"input": f"{n}\n", "output": f"{2 * n}"} for n in range(100)]
    began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    assert right("print(int(input()) * 2)", cases=cases[:1])
    one = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    assert right("print(int(input()) * 2)", cases=cases)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - one < 40 * (one - began)
    assert not right("print(int(input()) * 2 if True else 0)", cases=[*cases, {"input": "1", "output": "3"}])


@pytest.mark.parametrize(
    "source",
    [
        "import os\nx = int(input())\nprint(x * 2 if x < 9 else 0)\nos.lseek(1, 0, 1)",
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, (1).to_bytes(8, 'big') + b'0')\n"
        "    except OSError: pass\nprint(int(input()) * 2)\nwhile True: pass",
        "import sys\nprint(int(sys.stdin.readline()) + 2)",
    ],
)
def test_no_case_helps_or_answers_for_another(source):
    assert not right(source, cases=[{"input": f"{n}\n", "output": f"{2 * n}"} for n in (2, 9)], cpu_s=1)


def test_each_case_begins_anew():
    source = "import os, math\nos.write(1, os.read(0, 2))\nmath.n = getattr(math, 'n', 0) + 1\nprint(math.n)"
    assert right(source, cases=[{"input": "ab", "output": "ab1"}, {"input": "c", "output": "c1"}])


def test_a_thread_runs_where_it_is_started():
    deep = "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**27)\n"
    deep += "def depth(n): return 0 if n == 0 else 1 + depth(n - 1)\ndef main(): print(depth(20_000))\n"
    deep += "thread = threading.Thread(target=main)\nthread.start()\nthread.join()"
    assert right(deep, cases=[{"input": "", "output": "20000"}])


def test_a_thought_that_was_cut_off_states_nothing():
    program, value = "```python\nprint(5)\n```\n", '{"a": 1}'
    assert code.last_program(f"<think>maybe\n{program}or not") is None
    assert code.last_program(f"<think>hm</think>\n{program}") == "print(5)\n"
    assert code.last_program("```python\nprint('<think>')\n```") == "print('<think>')\n"
    for response, right_one in ((f"<think>maybe {value} or", False), (f"<think>hm</think> {value}", True)):
        request = VerificationRequest(response=response, ground_truth='{"equals": {"a": 1}}')
        assert json_answer.judge(request).accuracy is right_one


HELPER = "def raises(fn, *a):\n    try: fn(*a)\n    except ValueError: return True\n    return False\n"


@pytest.mark.parametrize(
    ("source", "tests", "passes"),
    [
        ("def f(x): raise ValueError", f"{HELPER}assert raises(f, 3)", True),
        ("def f(x): raise ValueError", f"{HELPER}assert not raises(f, 3)", False),
        (ADD, "def fail(): assert False\nif add(1, 2) != 3: fail()", True),
        (ADD, "def test_a(): assert add(1, 2) == 4\ndef test_a(): assert add(1, 2) == 3", True),
        (ADD, "import unittest\nclass T(unittest.TestCase):\n    def help(self): assert False\n"
         "    def test(self): self.assertEqual(add(1, 2), 3)\n    @unittest.skip('')\n    def test_b(self): 1/0", True),
        (ADD, "def test_a():\n    'adds'\n    assert add(1, 2) == 3\nassert test_a.__doc__ == 'adds'", True),
        (ADD, "import functools\n@functools.cache\ndef test_a(): assert add(1, 2) == 4", False),
        ("def f(n):\n    for i in range(n): yield i", "assert list(f(100_000)) == list(range(100_000))", True),
        ("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(n): return [P(i, i) for i in range(n)]",
         "assert f(20_000)[-1].x == 19_999", True),
        ("from collections import namedtuple\nP = namedtuple('P', ['if', 'x'], rename=True)\ndef f(): return P(1, 2)",
         "assert f() == (1, 2) and f()._0 == 1", True),
        ("class queue:\n    def push(x): return x", "assert queue.push(1) == 1", True),
        ("import os\ndef f(x): os._exit(0)", "import pytest\nwith pytest.raises(Exception): f(1)", False),
    ],
)  # fmt: skip
def test_what_runs_tests_and_what_only_helps_them(source, tests, passes):
    assert right(source, tests=tests) is passes


@pytest.mark.parametrize(
    "source",
    [
        "import sys\nn = sys._getframe(1).f_locals['order']['file_bytes']\nprint('YES' if n == 65548 else 'NO')",
        "import os\ntry:\n    os.lseek(1, 65536 + 11, 0)\n    os.write(1, b'x')\n    os.ftruncate(1, 0)\n"
        "    print('YES')\nexcept OSError: print('NO')",
    ],
)
def test_the_limit_of_an_output_does_not_tell_how_long_the_expected_one_is(source):
    assert not right(source, cases=[{"input": "1", "output": "YES"}, {"input": "2", "output": "NO"}])
