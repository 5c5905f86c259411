"""Verifier `code`: what it credits, and every way to credit that was not earned."""

import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from reward.code import seccomp
from reward.code.values import NotPlain, decode, encode
from reward.verdict import Judgement, VerificationRequest, VerifierError
from reward.verifiers import code

ROOT = Path(__file__).parents[2]
ADD = "def add(a, b):\n    return a + b"
SUITE = "assert add(2, 3) == 5\nassert add(-1, 1) == 0"


def judge(source: str, **truth: object) -> Judgement:
    response = f"Here:\n```python\n{source}\n```\nDone."
    return code.judge(VerificationRequest(response=response, ground_truth=json.dumps(truth)))


def right(source: str, **truth: object) -> bool:
    return judge(source, **truth).accuracy


@pytest.mark.parametrize(
    ("source", "tests"),
    [
        (ADD, SUITE),
        (ADD, "def test_add():\n    assert add(2, 3) == 5"),
        (ADD, "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(add(2, 3), 5)"),
        ("def f(): return (1, [2], {3: 'x'}, {4}, 1.5, None, True, b'y', 2**80, 1j)",
         "assert f() == (1, [2], {3: 'x'}, {4}, 1.5, None, True, b'y', 2**80, 1j)"),
        ("def f(n):\n    for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2]"),
        ("def f(x):\n    if x < 0: raise ValueError('no')\n    return x",
         "try:\n    f(-1)\nexcept ValueError as e:\n    assert 'no' in str(e)\nelse:\n    assert False\n"
         "assert f(1) == 1"),
        ("class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
         "    def pop(self): return self.items.pop()",
         "s = Stack()\ns.push(4)\ns.push(5)\nassert s.items == [4, 5]\nassert s.pop() == 5\nassert s.pop() == 4"),
        ("class P:\n    def __init__(self, x): self.x = x\ndef total(a, b): return a.x + b.x",
         "assert total(P(1), P(2)) == 3"),
        ("LIMIT = 7", "assert LIMIT == 7"),
        ("from collections import Counter\nimport re, math, datetime\n"
         "def f(s): return Counter(re.findall('[a-z]', s))", "assert f('aab') == {'a': 2, 'b': 1}"),
        ("from datetime import datetime\ndef f(s): return datetime.strptime(s, '%Y-%m-%d').day",
         "assert f('2020-02-03') == 3"),
        ("from fractions import Fraction\nfrom decimal import Decimal\n"
         "def f(): return Fraction(-1, 3), Decimal('0.10')",
         "from fractions import Fraction\nfrom decimal import Decimal\n"
         "assert f() == (Fraction(-1, 3), Decimal('0.1')) and str(f()[1]) == '0.10'"),
        ("from collections import deque\nfrom itertools import permutations\n"
         "def f(): return deque([1]), permutations('ab'), {1: [2]}.keys(), {1: [2]}.items(), {1: [2]}.values()",
         "a, b, c, d, e = f()\nassert list(a) == [1] and len(list(b)) == 2 and 1 in c and list(d) == [(1, [2])]\n"
         "assert list(e) == [[2]]"),
        ("class Bad(ValueError): pass\ndef f(): raise Bad('no')",
         "try:\n    f()\nexcept ValueError as e:\n    assert str(e) == 'no'\nelse:\n    assert False"),
    ],
)  # fmt: skip
def test_right_code_passes(source, tests):
    assert judge(source, tests=tests) == Judgement(accuracy=True, extracted=f"{source}\n"[:200], rule="code")


def test_humanevals_form():
    check = "def check(candidate):\n    assert candidate(2, 3) == 5"
    assert right(ADD, tests=check, entry="add")
    assert not right(ADD.replace("+", "-"), tests=check, entry="add")
    assert not right(ADD, tests=check, entry="plus")
    method = "class Solution:\n    def add(self, a, b): return a + b"
    assert right(method, tests=check, entry="Solution().add")
    assert not right(method.replace("+", "-"), tests=check, entry="Solution().add")
    with pytest.raises(VerifierError, match="the entry is no name or expression"):
        right(ADD, tests=check, entry="add(")


PROGRAM = "a, b = map(int, input().split())\nprint(a + b)"
CASES = [{"input": "2 3\n", "output": "5\n"}, {"input": "-1 1", "output": "0"}]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (PROGRAM, True),
        ("import sys\nfor line in sys.stdin:\n    print(sum(map(int, line.split())), ' \\n')", True),
        (PROGRAM + "\nexit()", True),
        ("from __future__ import annotations\n" + PROGRAM, True),
        (PROGRAM + "\nraise SystemExit(1)", False),
        (PROGRAM + "\n1 / 0", False),
        (PROGRAM.replace("+", "-"), False),
        (PROGRAM + "\nprint('more')", False),
        ("print(5)\nprint(0)", False),
        ("print('x' * 10**9)", False),
        ("import os\nos._exit(0)", False),
    ],
)
def test_programs_are_judged_by_their_output(source, expected):
    assert right(source, cases=CASES) is expected


FORGERIES = {
    "prints": "print('passed')\nprint('{\"passed\": true}')",
    "exits": "import sys\nsys.exit(0)",
    "exits at once": "import os\nos._exit(0)",
    "exits when called": "def add(a, b):\n    import os\n    os._exit(0)",
    "raises SystemExit when called": "def add(a, b):\n    raise SystemExit(0)",
    "exits at exit": "import atexit, os\natexit.register(lambda: os._exit(0))",
    "overwrites builtins": "import builtins\nbuiltins.AssertionError = Exception\nbuiltins.len = lambda x: 5\n"
    "builtins.__build_class__ = None\ndef add(a, b): return None",
    "equals everything": "class Any:\n    def __eq__(self, other): return True\n    def __bool__(self): return True\n"
    "def add(a, b): return Any()",
    "is an int that equals everything": "class N(int):\n    def __eq__(self, other): return True\n"
    "    __hash__ = int.__hash__\ndef add(a, b): return N(1)",
    "is a list that equals everything": "class L(list):\n    def __eq__(self, other): return True\n"
    "def add(a, b): return L()",
    "traces": "import sys\nsys.settrace(lambda frame, event, arg: os._exit(0))\ndef add(a, b): return None",
    "looks up the stack": "import sys\ndef add(a, b):\n    frame = sys._getframe()\n    while frame:\n"
    "        frame.f_globals.update(passed=True, AssertionError=Exception)\n"
    "        frame = frame.f_back\n    return None",
    "looks for the tests in memory": "import gc\ndef add(a, b):\n"
    "    found = [o for o in gc.get_objects() if isinstance(o, str) and 'assert add' in o]\n"
    "    return 5 if found else None",
    "looks for the tests in its modules": "import sys\n"
    "def add(a, b):\n    return 5 if 'unittest' in sys.modules else None",
    "writes to every descriptor": "import os, struct\nm = b'{\"passed\": true}'\nfor fd in range(64):\n    try:\n"
    "        os.write(fd, struct.pack('>Q', len(m)) + m)\n    except OSError: pass",
    "answers before it is asked": "import os, sys, struct\nm = b'{\"value\": true}'\nfor _ in range(9):\n"
    "    os.write(int(sys.orig_argv[-1]), struct.pack('>Q', len(m)) + m)\ndef add(a, b): return None",
    "ends the loop of the tests": "def add(a, b): raise StopIteration",
    "raises the assertion itself": "def add(a, b): raise AssertionError",
    "defines the tests' names": "def test_add(): pass\ndef check(candidate): pass\ndef add(a, b): pass\n"
    "def all(x): return True\ndef isinstance(*x): return True",
    "sends what is no frame": "import os, sys\nos.write(int(sys.orig_argv[-1]), b'\\xff' * 100)\n"
    "def add(a, b): return 5",
    "nests without end": "def add(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "is endless": "import itertools\ndef add(a, b): return (i for i in itertools.count())",
    "kills": "import os, signal\nfor pid in (os.getppid(), -1):\n    os.kill(pid, signal.SIGKILL)\n"
    "def add(a, b): return None",
    "is empty": "",
    "is no Python": "def add(a, b) return 5",
    "holds a null byte": "\x00",
    "breaks the compiler": "(" * 5000 + ")" * 5000,
    "breaks the stack": "import sys\nsys.setrecursionlimit(10**9)\ndef add(a, b): return add(a, b)",
    "breaks the interpreter": "import ctypes\nctypes.string_at(0)",
    "handles every signal": "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, lambda *_: None)\n"
    "    except (OSError, ValueError): pass\ndef add(a, b): return None",
    "takes ten gigabytes": "hoard = bytearray(10 << 30)\ndef add(a, b): return a + b",
    "reads how it was started": "import os, sys\ndef add(a, b):\n"
    "    told = ' '.join(sys.orig_argv) + str(dict(os.environ))\n"
    "    return a + b if 'assert' in told or 'tests' in told else None",
    "reads what others hold": "import os\ndef add(a, b):\n    for pid in ('self', os.getppid()):\n"
    "        for name in ('cmdline', 'environ', 'mem', 'maps', 'fd/3', 'fd/0'):\n            try:\n"
    "                if b'assert' in open(f'/proc/{pid}/{name}', 'rb').read(1 << 20): return a + b\n"
    "            except (OSError, OverflowError): pass",
    "searches its own memory": "import ctypes, json, sys\ndef add(a, b):\n    here = id(json) & ~0xfff\n"
    "    return a + b if b'assert add' in ctypes.string_at(here, 4096) else None",
    "starts a bomb of processes": "import os\ndef add(a, b):\n    for _ in range(1000):\n        try: os.fork()\n"
    "        except OSError: pass",
    "leaves a thread": "import threading\ndef add(a, b):\n    threading.Thread(target=add, args=(a, b)).start()\n"
    "    return 5",
    "sends another's frames": "import json\njson.dumps = lambda *a, **k: '{\"value\": 5}'\n"
    "def add(a, b): return None",
    "patches the equality of numbers": "import builtins\nclass int(int):\n    def __eq__(self, other): return True\n"
    "builtins.int = int\ndef add(a, b): return int(0)",
    "answers with a number without end": "def add(a, b): return 1 << (1 << 27)",
    "answers with a range": "def add(a, b): return range(10**18)",
    "writes over the judge": "import os, reward\nopen(reward.__file__, 'w').write('')\ndef add(a, b): return None",
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_what_was_not_earned_is_not_credited(name):
    tests = SUITE + "\nassert all(map(add, [1], [2])) and [*map(add, [1], [2])] == [3]"
    judged = judge(FORGERIES[name], tests=tests, cpu_s=1)
    assert not judged.accuracy, judged


@pytest.mark.parametrize("name", ["prints", "exits", "exits at exit", "writes to every descriptor", "is empty"])
def test_what_a_program_did_not_earn_is_not_credited(name):
    assert not right(FORGERIES[name], cases=CASES)


def test_a_loop_that_the_tested_code_ends_is_no_pass():
    """`all(map(f, xs))` is true when f raises StopIteration at once; here it is another error."""
    assert not right("def f(x): raise StopIteration", tests="assert all(map(f, [1, 2]))\nassert all(map(f, []))")


PROBES = {
    "fork": "os.fork()",
    "subprocess": "subprocess.run(['true'])",
    "thread": "_thread.start_new_thread(print, ())",
    "tcp": "socket.create_connection(('127.0.0.1', PORT))",
    "udp": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "unix": "socket.socketpair()",
    "read a file": "open('/etc/passwd').read()",
    "read itself": "open('/proc/self/environ').read()",
    "read the parent": "open(f'/proc/{os.getppid()}/mem').read()",
    "list a folder": "os.listdir('/')",
    "write a file": "open('/tmp/forged', 'w')",
    "remove a file": "os.remove('MARK')",
    "rename": "os.rename('MARK', 'MARK2')",
    "make a folder": "os.mkdir('/tmp/forged.d')",
    "change a mode": "os.chmod('MARK', 0)",
    "kill": "os.kill(os.getppid(), 9)",
    "kill a group": "os.killpg(os.getpgid(0), 9)",
    "raise a limit": "resource.setrlimit(resource.RLIMIT_CPU, (-1, -1))",
    "outlive": "libc.prctl(1, 0, 0, 0, 0) == 0 or 1 / 0",
    "trace": "libc.ptrace(16, os.getppid(), 0, 0) == 0 or 1 / 0",
    "read memory": "libc.process_vm_readv(os.getppid(), 0, 0, 0, 0, 0) == 0 or 1 / 0",
    "execute": "os.execv('/bin/true', ['true'])",
    "run what it wrote": "mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC)",
    "make memory executable": "libc.mprotect(ctypes.c_void_p(id(libc) & ~0xfff), 4096, 7) == 0 or 1 / 0",
    "ask the judge": "import reward.code.seccomp",
    "io_uring": "libc.syscall(425, 8, libc) >= 0 or 1 / 0",
    "32-bit calls": "libc.syscall(0x40000000 + 39) >= 0 or 1 / 0",
    "name spaces": "libc.unshare(0x10000000) == 0 or 1 / 0",
}


@pytest.mark.parametrize("name", PROBES)
def test_the_sandbox_refuses(name, tmp_path):
    """The probe answers True if it could; the tests ask for that, so a pass is a hole."""
    mark = tmp_path / "mark"
    mark.write_text("here")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        probe = PROBES[name].replace("MARK", str(mark)).replace("PORT", str(listener.getsockname()[1]))
        imports = "import os, socket, subprocess, _thread, resource, ctypes, mmap\nlibc = ctypes.CDLL(None)\n"
        source = f"{imports}def probe():\n    {probe}\n    return True"
        assert not right(source, tests="assert probe() is True")
        refused = f"{imports}def probe():\n    try:\n        {probe}\n    except Exception: return 'refused'"
        dies = name in ("32-bit calls",)
        assert right(refused, tests="assert probe() == 'refused'") is not dies
    assert mark.read_text() == "here"


def test_time_is_bounded_and_nothing_is_left():
    before = _children()
    for source in ("import time\ntime.sleep(100)", "def add(a, b):\n    while True: pass"):
        start = time.monotonic()
        judged = judge(source, tests=SUITE, cpu_s=1)
        assert (judged.accuracy, judged.rule) == (False, "code-timeout")
        assert time.monotonic() - start < 20
    assert judge("while True: pass", cases=CASES, cpu_s=1).rule == "code-timeout"
    ignores = (
        "import signal, time\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except: pass\n"
    )
    assert not right(ignores + "while True: pass", tests=SUITE, cpu_s=1)
    assert _children() == before


def _children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()}


def test_memory_is_bounded():
    assert not right("x = bytearray(4 << 30)\ndef add(a, b): return a + b", tests=SUITE)
    assert right(ADD + "\ntry:\n    x = bytearray(4 << 30)\nexcept MemoryError: pass", tests=SUITE)


def test_the_pool_runs_it_beside_others(make_pool):
    from tests.reward.test_pool import verify

    truth = json.dumps({"tests": SUITE})
    requests = [
        VerificationRequest(response=f"```python\n{source}\n```", ground_truth=truth, verifier="code")
        for source in (ADD, FORGERIES["exits"], "while True: pass")
    ]
    cheap = VerificationRequest(response="Answer: 1", ground_truth="1")
    verdicts = verify(make_pool(workers=1, timeout_s=20.0), *requests, cheap)
    assert [verdict.accuracy for verdict in verdicts] == [True, False, False, True]
    assert not any(verdict.error for verdict in verdicts)
    assert verdicts[2].rule == "code-timeout"


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```\nor\n```py\nb\n```", "b\n"),
        ("```python\na\n```\n```json\n{}\n```", "a\n"),
        ("```\na\n```\n```\nb\n```", "b\n"),
        ("```python\na\n```\nprints\n```\n4\n```", "a\n"),
        ("  ```Python3 title=x\n  a\n  ```", "a\n"),
        ('```python\ns = """a\n   \nb"""\n```', 's = """a\n   \nb"""\n'),
        ("1. So:\n\n   ```python\n   def f():\n       return 1\n   ```", "def f():\n    return 1\n"),
        ("```python\na", None),
        ("a = 1", None),
        ("", None),
    ],
)
def test_the_last_closed_block_counts(response, program):
    assert code.last_program(response) == program


@pytest.mark.parametrize(
    ("truth", "reason"),
    [
        ("", "must be a JSON object"),
        ("{}", "must be a JSON object"),
        ('{"tests": "assert f()", "cases": []}', "must be a JSON object"),
        ('{"tests": "assert f(", "cpu_s": 1}', "no Python"),
        ('{"tests": "assert 1 == 1"}', "nothing that a response could define"),
        ('{"tests": "x = f()", "entry": "f"}', "no check"),
        ('{"tests": "assert f()", "cpu_s": 0}', "cpu_s"),
        ('{"tests": "assert f()", "timeout": 3}', "timeout"),
        ('{"cases": []}', "not empty"),
        ('{"cases": [{"input": "1"}]}', "input"),
    ],
)
def test_a_truth_of_another_form_is_an_error_before_any_response(truth, reason):
    with pytest.raises(VerifierError, match=reason):
        code.judge(VerificationRequest(response="", ground_truth=truth))


def test_tests_that_pass_a_function_of_their_own_are_an_error():
    with pytest.raises(NotPlain, match="function"):
        judge("def f(g): return g(1)", tests="assert f(lambda x: x) == 1")


def test_where_no_process_can_be_confined_nothing_is_run(monkeypatch):
    """The check is inside the sandboxed process; here its word that it is open."""
    from reward.code import sandbox

    monkeypatch.setattr(sandbox, "receive", lambda *_: {"open": "no filter for Plan 9"})
    with pytest.raises(VerifierError, match="cannot be run safely here: no filter for Plan 9"):
        judge(ADD, tests=SUITE)


def test_the_filter_knows_its_machine(monkeypatch):
    monkeypatch.setattr(seccomp.platform, "machine", lambda: "aarch64")
    with pytest.raises(seccomp.LockError, match="aarch64"):
        seccomp.lock()


@pytest.mark.parametrize(
    "value",
    [0, -1, 2**53, -(2**70), True, None, "\ud83d", 0.1, float("inf"), [], (), {}, set(), {(1,): [frozenset({2})]}],
)
def test_values_pass_exactly(value):
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value
    assert type(back) is type(value)


def test_what_is_no_value_is_refused():
    with pytest.raises(NotPlain):
        encode(threading.Lock())
    for content in ([1], {}, {"z": 1}, {"t": [1], "l": []}, 1.5, {"o": 1}, {"D": "1e99999999"}):
        with pytest.raises((ValueError, TypeError)):
            decode(content)


@pytest.mark.parametrize("tag", ["n", "d", "f", "c", "b", "B", "q", "D", "r", "l", "Q", "dk", "di", "dv", "i", "?"])
def test_no_other_content_raises_what_is_not_documented(tag):
    for inner in (5, "x", "1/0", "1/2/3", None, [1], [[1, 2, 3]], {}, {"q": 5}):
        with suppress(ValueError, TypeError, KeyError, ArithmeticError):
            decode({tag: inner})
