"""The code grader: what counts as the code, as a test, as the same output; right solutions pass, wrong ones do not."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from valor.rewards import code, compute_score
from valor.rewards.custom import CustomFunction
from valor.rewards.executor import RewardExecutor, Sample
from valor.sandbox import SandboxError, strongest_level

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Much time on the clock: this machine may be busy."""
    monkeypatch.setattr(code, "_seconds", 30.0)


def block(text: str) -> str:
    return f"Here it is:\n```python\n{textwrap.dedent(text).strip()}\n```\nGood luck!"


def humaneval(prompt: str, test: str, name: str) -> dict[str, str]:
    return {"prompt": prompt, "test": textwrap.dedent(test), "entry_point": name}


ADD = humaneval(
    'from typing import List\n\n\ndef total(values: List[int]) -> int:\n    """Sum of the values.\n    """\n',
    """
    METADATA = {}
    def check(candidate):
        assert candidate([1, 2, 3]) == 6
        assert candidate([]) == 0
    """,
    "total",
)
SQUARE = {"test_list": ["assert square(2) == 4", "assert square(-3) == 9", "assert square(0.5) == 0.25"]}
SUM = {"inputs": ["2\n1 2\n", "3\n1 2 3\n", "1\n-5\n"], "outputs": ["3\n", "6", "-5\n"]}
CALLS = {"fn_name": "pairs", "inputs": ["[1, 2]\n3", "[]\n0"], "outputs": ["[[1, 3], [2, 3]]", "[]"]}

# LeetCode's classes, in a prompt that the response does not repeat.
NODES = """
class ListNode:
    def __init__(self, val=0, next=None):
        self.val, self.next = val, next

def chain(values):
    head = None
    for value in reversed(values):
        head = ListNode(value, head)
    return head

def values(node):
    found = []
    while node:
        found.append(node.val)
        node = node.next
    return found
"""
REVERSED = humaneval(
    NODES,
    """
    def check(candidate):
        assert values(candidate(head=chain(list(range(2000))))) == list(range(2000))[::-1]
        assert candidate(None) is None and type(candidate(chain([1]))) is ListNode
    """,
    "Solution().reverse",
)
REVERSE = """
class Solution:
    def reverse(self, head):
        before = None
        while head:
            head.next, before, head = before, head, head.next
        return before
"""
PYTEST = """
import pytest
from solution import half

def test_even():
    assert half(4) == 2

@pytest.mark.parametrize("n, expected", [(2, 1), (6, 3)])
def test_more(n, expected):
    assert half(n) == expected

def test_odd():
    with pytest.raises(ValueError):
        half(3)
"""
UNITTEST = """
import unittest

class Halves(unittest.TestCase):
    def setUp(self):
        self.n = 4

    def test_even(self):
        self.assertEqual(half(self.n), 2)

if __name__ == "__main__":
    unittest.main()
"""
HALF = block("def half(n):\n    if n % 2: raise ValueError(n)\n    return n // 2")

# Different ways to be right.
RIGHT: dict[str, tuple[Any, str]] = {
    "completion": (ADD, "    return sum(values)\n"),
    "completion with a loop": (ADD, "    result = 0\n    for v in values:\n        result += v\n    return result\n"),
    "body in a block": (ADD, block("return sum(values)")),
    "whole function": (ADD, block("def total(values):\n    return sum(values)")),
    "whole function, hints without import": (
        ADD,
        block("def total(values: List[int]) -> int:\n    return sum(values)"),
    ),
    "with the future": (
        ADD,
        block("from __future__ import annotations\ndef total(values: Any):\n    return sum(values)"),
    ),
    "recursion": (ADD, block("def total(v):\n    return v[0] + total(v[1:]) if v else 0")),
    "lambda": (SQUARE, block("square = lambda x: x * x")),
    "helper": (SQUARE, block("def times(a, b):\n    return a * b\n\ndef square(x):\n    return times(x, x)")),
    "class": (SQUARE, block("class Squares:\n    def __call__(self, x): return x * x\nsquare = Squares()")),
    "numpy number": (SQUARE, block("import numpy as np\ndef square(x): return np.square(np.array(x))")),
    "it prints": (SQUARE, block("print('hello')\ndef square(x):\n    print(x)\n    return x * x")),
    "dataclass": (
        SQUARE,
        block(
            "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: float\ndef square(x): return A(x).x ** 2"
        ),
    ),
    "not the main program": (SQUARE, block("def square(x): return x * x\nif __name__ == '__main__':\n    1 / 0")),
    "input()": (SUM, block("input()\nprint(sum(map(int, input().split())))")),
    "sys.stdin": (SUM, block("import sys\nn, *v = map(int, sys.stdin.read().split())\nsys.stdout.write(str(sum(v)))")),
    "open(0)": (SUM, block("print(sum(map(int, open(0).read().split()[1:])))")),
    "buffer": (SUM, block("import sys\nd = sys.stdin.buffer.readlines()\nprint(sum(map(int, d[1].split())))")),
    "/dev/stdin": (SUM, block("print(sum(map(int, open('/dev/stdin').read().split()[1:])))")),
    "main function": (
        SUM,
        block(
            "def main():\n    n, v = input(), input()\n    print(sum(map(int, v.split())))\n"
            "if __name__ == '__main__':\n    main()"
        ),
    ),
    "output at exit": (
        SUM,
        block(
            "import atexit, io, os\nout = io.StringIO()\n"
            "atexit.register(lambda: os.write(1, out.getvalue().encode()))\n"
            "input()\nprint(sum(map(int, input().split())), file=out)"
        ),
    ),
    "a file of its own": (SUM, block("out = open(1, 'w')\ninput()\nout.write(str(sum(map(int, input().split()))))")),
    "exit status 0": (SUM, block("import sys\ninput()\nprint(sum(map(int, input().split())))\nsys.exit()")),
    "thread with a large stack": (
        SUM,
        block(
            """
            import sys, threading
            def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
            def main():
                depth(20000)
                input()
                print(sum(map(int, input().split())))
            sys.setrecursionlimit(10**6)
            threading.stack_size(128 << 20)
            threading.Thread(target=main).start()
            """
        ),
    ),
    "asyncio": (
        SUM,
        block(
            "import asyncio\nasync def main():\n    await asyncio.sleep(0)\n    input()\n"
            "    print(sum(map(int, input().split())))\nasyncio.run(main())"
        ),
    ),
    "a program without imports": (
        SUM,
        block("sys.stdin.readline()\nprint(reduce(int.__add__, map(int, input().split())))"),
    ),
    "function of values": (CALLS, block("def pairs(a, b):\n    return [(x, b) for x in a]")),
    "Solution": (
        CALLS,
        block("class Solution:\n    def pairs(self, a: List[int], b):\n        return [[x, b] for x in a]"),
    ),
    "Solution, with names that LeetCode imports": (
        {"functional": "def check(candidate):\n    assert candidate(n = 8, p = 3) == 2\n\ncheck(Solution().f)"},
        block(
            "class Solution:\n    def f(self, n: Optional[int], p: int) -> int:\n"
            "        assert ascii_lowercase and itemgetter and log10 and deepcopy and list(pairwise('ab'))\n"
            "        return pow(n, 1, p)"
        ),
    ),
    "APPS, wrapped": (
        {"fn_name": "top", "inputs": [[[1, 5, 2]], [[3]]], "outputs": [[5], [3]]},
        block("def top(values): return max(values)"),
    ),
    "a key and a float": (
        {"fn_name": "count", "inputs": ['"aab"'], "outputs": ['{"a": 0.6666667, "b": 0.3333333}']},
        block("def count(s): return {c: s.count(c) / len(s) for c in s}"),
    ),
    "writes into its argument": (
        ["v = [3, 1, 2]\norder(v)\nassert v == [1, 2, 3]", "d = {1: 2}\norder(d)\nassert d == {}"],
        block("def order(v):\n    v.sort() if isinstance(v, list) else v.clear()"),
    ),
    "objects of its own": (
        {"test_list": ["assert Stack().push(3).push(4).items == [3, 4]", "assert len(Stack().push(1)) == 1"]},
        block(
            """
            class Stack:
                def __init__(self): self.items = []
                def push(self, x):
                    self.items.append(x)
                    return self
                def __len__(self): return len(self.items)
            """
        ),
    ),
    "a tree that the tests build": (
        {"test_setup_code": "root = Node(1)\nroot.left = Node(2)", "test_list": ["assert depth(root) == 2"]},
        block(
            "class Node:\n    def __init__(self, v): self.v, self.left = v, None\n"
            "def depth(n): return 1 + depth(n.left) if n else 0"
        ),
    ),
    "true objects, and their text": (
        ["assert make(1)", "assert not make(0)", "assert str(make(2)) == '<2>'"],
        block(
            """
            class Thing:
                def __init__(self, x): self.x = x
                def __bool__(self): return self.x > 0
                def __str__(self): return f"<{self.x}>"
            def make(x): return Thing(x)
            """
        ),
    ),
    "generator and set": (
        ["assert list(evens(5)) == [0, 2, 4]", "assert set(evens(3)) == {0, 2}"],
        block("def evens(n): yield from range(0, n, 2)"),
    ),
    "raises as it should": (
        ["try:\n    half('x')\n    assert False\nexcept TypeError:\n    pass", "assert half(3) == 1.5"],
        block("def half(x): return x / 2"),
    ),
    "named like a builtin": (
        ["assert sum(10, 15) == 6", "assert sum(100, 150) == 93"],
        block("def sum(a, b):\n    return {10: 6, 100: 93}[a]"),
    ),
    "ended by exit": (SUM, block("input()\nprint(sum(map(int, input().split())))\nexit()")),
    "ended by quit": (SUM, block("input()\nprint(sum(map(int, input().split())))\nquit(0)")),
    "texts that are no JSON": (
        {"fn_name": "f", "inputs": ["a b\n3", ["cd", 1]], "outputs": ["a ba ba b", "cd"]},
        block("def f(text, n): return text * n"),
    ),
    "a chain of nodes": (REVERSED, block(REVERSE)),
    "a chain of nodes of its own": (REVERSED, block(NODES + REVERSE)),
    "a ring of nodes": (
        humaneval(
            NODES,
            """
            def check(candidate):
                a = ListNode(1, ListNode(2))
                assert not candidate(a)
                a.next.next = a
                assert candidate(a) and a.val == 3
            """,
            "ring",
        ),
        block("def ring(a):\n    a.val += 1\n    return a.next.next is a"),
    ),
    "tests of pytest": (PYTEST, HALF),
    "tests of pytest in a class": (
        "from solution import half\nclass TestHalf:\n    def test(self): assert half(2) == 1",
        HALF,
    ),
    "tests of unittest": (UNITTEST, HALF),
    "tests that name the function anew": ("from solution import half as h\ndef test_h(): assert h(2) == 1", HALF),
    "tests of a class with cases": (
        "import pytest\nfrom solution import *\nclass TestH:\n    def setup_method(self, method): self.n = 4\n"
        "    @pytest.mark.parametrize('n', [2, 4])\n    def test_h(self, n): assert half(n * self.n) == 2 * n",
        HALF,
    ),
    "asserts of a script": ("if __name__ == '__main__':\n    assert half(2) == 1", HALF),
    "cases of a problem": (
        {
            "language": "python",
            "test_cases": [{"type": "stdin_stdout", "input": "2\n", "output": "4\n", "fn_name": None}],
        },
        block("print(int(input()) ** 2)"),
    ),
    "cases of a function": (
        {"test_cases": [{"type": "function_call", "fn_name": "half", "input": [4], "output": [2]}]},
        HALF,
    ),
    "metadata as text": ([{"input": "4", "output": "2", "metadata": '{"func_name": "half"}'}], HALF),
    "values of the standard library": (
        [
            "import datetime\nassert later(datetime.date(2024, 2, 28)) == datetime.date(2024, 2, 29)",
            "from decimal import Decimal\nassert third(Decimal('0.3')) == Decimal('0.1')",
            "from collections import deque\nassert turned(deque([1, 2, 3])) == deque([3, 2, 1])",
            "assert point(1, 2).x == 1 and point(1, 2) == (1, 2)",
        ],
        block("""
            from datetime import timedelta
            from collections import namedtuple
            point = namedtuple('point', 'x y')
            def later(day): return day + timedelta(1)
            def third(x): return x / 3
            def turned(d):
                d.reverse()
                return d
        """),
    ),
    "a function of the test as argument": (
        ["assert twice(lambda x: x + 1, 3) == 5"],
        block("def twice(f, x): return f(f(x))"),
    ),
    "a type as argument": (
        ["assert drop([1, 'a'], str) == [1]"],
        block("def drop(v, kind): return [x for x in v if type(x) is not kind]"),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_solutions_pass(name: str) -> None:
    truth, response = RIGHT[name]
    result = code.grade("any", response, truth)
    assert (result["score"], result["passed"], result["verdict"]) == (1.0, 1.0, "passed")
    assert code.grade("any", response, json.dumps(truth))["score"] == 1.0


WRONG: dict[str, tuple[Any, str, str]] = {
    "wrong value": (ADD, "    return 6\n", "AssertionError"),
    "no code": (ADD, "", "no code"),
    "prose": (ADD, "I cannot do that.", "SyntaxError"),
    "another name": (SQUARE, block("def cube(x): return x * x * x"), "NameError: name 'square' is not defined"),
    "syntax": (SUM, block("print(1"), "SyntaxError"),
    "wrong output": (SUM, block("print(6)"), "test 1 of 3: wrong output"),
    "right output, then an error": (
        SUM,
        block("input()\nprint(sum(map(int, input().split())))\n1 / 0"),
        "ZeroDivisionError",
    ),
    "exit status": (
        SUM,
        block("import sys\ninput()\nprint(sum(map(int, input().split())))\nsys.exit(3)"),
        "exit status 3",
    ),
    "exit with a reason": (SUM, block("exit('no')"), "no"),
    "reads too much": (SUM, block("print(int(input()) + int(input()) + int(input()))"), "ValueError|EOFError"),
    "no end": (SUM | {"time_limit": 1}, block("while True: pass"), "test 1 of 3: more than 1 s of CPU time"),
    "a float where an integer was asked": (
        CALLS,
        block("def pairs(a, b): return [[x, b + 0.5] for x in a]"),
        "AssertionError",
    ),
    "tests of pytest": (PYTEST, block("def half(n): return n // 2"), "DID NOT RAISE"),
    "tests of unittest": (UNITTEST, block("def half(n): return n / 3"), "AssertionError"),
    "a chain of nodes that calls itself equal": (
        REVERSED,
        block("class Solution:\n    def reverse(self, head): return head"),
        "AssertionError",
    ),
    "a class of its own that is equal to all": (
        [
            "class P:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == o.x\n"
            "assert f(1) == P(2)",
        ],
        block("class P:\n    def __eq__(self, o): return True\n    x = 2\ndef f(x): return P()"),
        "AttributeError",
    ),
    "not wrapped": (
        {"fn_name": "f", "inputs": ["1", "2"], "outputs": ["[1]", "[2, 2]"]},
        block("def f(x): return x if x == 1 else [2, 2]"),
        "AssertionError",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_solutions_fail(name: str) -> None:
    truth, response, reason = WRONG[name]
    result = code.grade("any", response, truth)
    assert result["score"] == 0.0 and result["acc"] == 0.0
    assert re.search(reason, result["verdict"])


def test_the_part_that_passes_is_a_component_and_with_continuous_the_score() -> None:
    response = block("def square(x): return x * x if x != -3 else 0")
    result = code.grade("mbpp", response, SQUARE)
    assert (result["score"], result["passed"], result["format"]) == (0.0, pytest.approx(2 / 3), 1.0)
    result = code.grade("mbpp", response, SQUARE, continuous=True)
    assert (result["score"], result["acc"]) == (pytest.approx(2 / 3), 0.0)
    odd = block("input()\nv = list(map(int, input().split()))\nprint(sum(v) if len(v) > 1 else 'x')")
    assert code.grade("apps", odd, SUM)["passed"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("```python\na\n```", "", "a"),
        ("```python\na\n```\nor\n```py\nb\n```", "", "b"),
        ("```python\na\n```\nrun it:\n```bash\npip install x\n```\noutput:\n```\n4\n```", "", "a"),
        ("```\na\n```", "", "a"),
        ("~~~python\na\n~~~", "", "a"),
        ("````python\n'''\n```\n'''\n````", "", "'''\n```\n'''"),
        ("```Python 3\na\n```", "", "a"),
        ("1. So\n   ```python\n   if x:\n       y\n   ```\n", "", "if x:\n    y"),
        ("```python\ndef f(): 1\n```\nUse:\n```python\nprint(f())\n```", "f", "def f(): 1"),
        ("```python\ndef f(): 1\n```\nBetter:\n```python\ndef f(): 2\n```", "f", "def f(): 2"),
        ("<think>\n```python\nno\n```\n</think>\n```python\nyes\n```", "", "yes"),
        ("so <answer>```python\nyes\n```</answer>", "", "yes"),
        ("```python\na\nb", "", "a\nb"),
        ("    return 3\n", "", "    return 3\n"),
    ],
)
def test_extracted_code(text: str, name: str, expected: str) -> None:
    assert code.extract_code(text, name)[0] == expected


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1 2 3\n", "1 2 3", True),
        ("1  2 3 \r\n\n", "1 2 3\n", True),
        ("1\n2\n", "1 2\n", False),
        ("a\n\nb\n", "a\nb\n", True),
        ("", "", True),
        ("", "0", False),
        ("0.3333333", "0.33333331", True),
        ("0.3334", "0.3333", False),
        ("5.0", "5", True),
        ("5.0000001", "5", False),
        ("1e3", "1000.0", True),
        ("Yes", "YES", False),
        ("nan", "nan", True),
        ("nan", "0.5", False),
        ("inf", "1.0", False),
        ("12345678901234567891", "12345678901234567890", False),
        ("9" * 100000, "1.5", False),
    ],
)
def test_same_output(output: str, expected: str, same: bool) -> None:
    assert code.same_output(output, expected) is same


@pytest.mark.parametrize(
    "truth",
    [
        *(None, "", "42", "[]", "{}", {"answer": 3}, {"inputs": [], "outputs": []}, {"inputs": ["1"], "outputs": []}),
        *("some words", ["square(2)", "square"], "def check(candidate):\n    assert candidate(1) == 1\n"),
        *({"fn_name": "os.system", "inputs": ["1"], "outputs": ["1"]}, {"test": "f(1"}, ["assert f(1"]),
        "async def test_a():\n    assert f(1)",
        "class TestA:\n    def test_a(self, tmp_path):\n        assert f(1)",
        "import pytest\n@pytest.fixture(autouse=True)\ndef early(): ...\ndef test_a():\n    assert f(1)",
        *("def test(tmp_path):\n    assert f(1)", "import no_such_module\nassert f(1)"),
    ],
)
def test_a_ground_truth_without_tests_is_an_error(truth: Any) -> None:
    with pytest.raises(ValueError, match=r"ground truth|fn_name|Expecting"):
        code.grade("any", block("def square(x): return x * x"), truth)


def test_forms_of_ground_truths() -> None:
    cases = [{"input": "1\n", "output": "1", "testtype": "stdin"}, {"input": "2\n", "output": "2", "testtype": "stdin"}]
    assert code.read_tests(json.dumps(cases)) == code.ProgramTests(["1\n", "2\n"], ["1", "2"])
    calls = [{"input": "1", "output": "1", "testtype": "functional", "metadata": {"func_name": "f"}}]
    assert isinstance(tests := code.read_tests(calls), code.FunctionTests) and tests.names == ["f"]
    parquet = {"inputs": np.array(["1", "2"], object), "outputs": np.array(["1", "2"], object), "fn_name": None}
    assert code.read_tests(parquet) == code.ProgramTests(["1", "2"], ["1", "2"])
    lines = {"inputs": [["1", "2"]], "outputs": [["3", "4"]], "time_limit": 2.5}
    assert code.read_tests(lines) == code.ProgramTests(["1\n2"], ["3\n4"], seconds=3)
    numbers = {"inputs": [1, "2"], "outputs": [1.5, 4], "time_limit": "3", "test_list": None}
    assert code.read_tests(numbers) == code.ProgramTests(["1", "2"], ["1.5", "4"], seconds=3)
    mixed = {"inputs": None, "outputs": None, "test_imports": None, "test_list": ["assert f(1) == 1"]}
    assert code.read_tests(mixed) == code.read_tests({"test_list": mixed["test_list"]})


def test_the_registry_knows_it() -> None:
    for source in ("openai/openai_humaneval", "google-research-datasets/mbpp", "mbpp", "humaneval", "livecodebench"):
        result = compute_score(source, block("def square(x): return x * x"), SQUARE)
        assert isinstance(result, dict) and result["score"] == 1.0
    for source in (
        "codecontests",
        "apps",
        "codeforces",
        "taco",
        "codeparrot/apps",
        "deepmind/code_contests",
        "BAAI/TACO",
    ):
        assert code.grade.__module__ == "valor.rewards.code"
        assert compute_score(source, block("print(1)"), {"inputs": [""], "outputs": ["1"]})["score"] == 1.0  # type: ignore[index]


def test_same_verdict_in_main_thread_worker_thread_and_worker_process() -> None:
    jobs = [(truth, response) for truth, response in RIGHT.values()][::6]
    jobs += [(truth, response) for truth, response, _ in WRONG.values()][:6:2]
    here = [code.grade("apps", response, truth) for truth, response in jobs]
    threaded: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: threaded.extend(code.grade("apps", r, t) for t, r in jobs))
    thread.start()
    thread.join()
    with RewardExecutor(num_workers=2, timeout=60.0) as executor:
        elsewhere = executor.score([Sample("apps", response, truth) for truth, response in jobs])
    assert here == threaded
    assert [r.error for r in elsewhere] == [None] * len(jobs)
    assert [{"score": r.score, **r.components} for r in elsewhere] == here


def supervisors(of: psutil.Process) -> list[psutil.Process]:
    return [p for p in of.children(recursive=True) if "launcher" in _command(p)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended in between
        return ""


def until(condition: Any, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return bool(met)


def test_a_grader_that_is_killed_takes_its_sandbox_along(tmp_path: Path) -> None:
    script = tmp_path / "grade.py"
    script.write_text(
        "import pathlib\n"
        "from valor.rewards import code\n"
        "code.configure(600.0)\n"
        "code.grade('apps', 'print(1)', {'inputs': [''], 'outputs': ['1']})\n"
        "pathlib.Path('tried').touch()\n"
        "code.grade('apps', 'import time; time.sleep(500)', {'inputs': [''], 'outputs': ['1']})\n"
    )
    grader = psutil.Popen([sys.executable, str(script)], cwd=tmp_path)
    try:
        assert until((tmp_path / "tried").exists, 60.0)  # the trials that choose a level have supervisors as well
        assert until(lambda: len(supervisors(grader)) >= 2, 60.0)  # the supervisor and its child
        family = supervisors(grader)
        os.kill(grader.pid, signal.SIGKILL)
    finally:
        grader.kill()
        grader.wait()
    gone, alive = psutil.wait_procs(family, timeout=20.0)
    assert not alive and len(gone) >= 2


def test_a_hung_sample_is_stopped_by_the_pool_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with RewardExecutor(num_workers=1, timeout=3.0) as executor:
        executor.code_seconds = 600.0  # the grader itself would wait for it
        sleep = Sample("apps", "import time; time.sleep(500)", {"inputs": [""], "outputs": ["1"]})
        right = Sample("apps", block("print(1)"), {"inputs": [""], "outputs": ["1"]})
        results = executor.score([sleep, right])
        assert until(lambda: not supervisors(psutil.Process()))
    assert results[0].error == "no score within 3 s (reward.timeout)" and results[0].score == 0.0
    assert results[1].score == 1.0


def test_an_endless_solution_is_wrong_and_no_error_in_the_pool() -> None:
    with RewardExecutor(num_workers=1, timeout=5.0) as executor:
        [result] = executor.score([Sample("apps", "import time; time.sleep(500)", {"inputs": [""], "outputs": ["1"]})])
    assert result.error is None and result.score == 0.0
    assert result.components["verdict"] == "test 1 of 1: no end within 4 s"


def test_time_for_all_tests_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "_seconds", 1.5)
    tests = {"inputs": [""] * 50, "outputs": ["1"] * 50}
    result = code.grade("apps", block("import time\ntime.sleep(0.4)\nprint(1)"), tests)
    assert result["score"] == 0.0 and re.search(r"raise reward.timeout|no end within", result["verdict"])


def test_without_any_sandbox_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_works() -> str:
        raise SandboxError("code cannot be run safely on this machine")

    monkeypatch.setattr(code, "strongest_level", none_works)
    with pytest.raises(SandboxError, match="cannot be run safely"):
        code.grade("apps", block("print(1)"), {"inputs": [""], "outputs": ["1"]})


def test_the_command_names_the_level_in_use() -> None:
    shown = subprocess.run([sys.executable, "-m", "valor", "rewards", "sandbox"], capture_output=True, text=True)
    assert shown.returncode == 0
    assert re.search(rf"^{strongest_level()} +in use$", shown.stdout, re.MULTILINE)


def test_continuous_as_the_documentation_says_it() -> None:
    custom = CustomFunction("pkg://valor.rewards.code", "grade", {"continuous": True})
    response = block("def square(x): return x * x if x != -3 else 0")
    with RewardExecutor(num_workers=1, timeout=60.0, custom=custom) as executor:
        [result] = executor.score([Sample("any", response, SQUARE)])
    assert (result.error, result.score, result.correct) == (None, pytest.approx(2 / 3), False)


@pytest.mark.parametrize(
    ("expected", "right", "wrong"),
    [
        ("Infinity", "float('inf')", "1.0"),
        ("[1, Infinity]", "[1, float('inf')]", "[1, 7.0]"),
        ('{"a": -Infinity}', "{'a': -float('inf')}", "{'a': -1e308}"),
        ("4e-7", "4.0000001e-7", "0"),
        ("[4e-7]", "[4e-7]", "[0.0]"),
        ("0.0", "0.1 + 0.2 - 0.3", "1e-7"),
        ("1e9", "1e9 + 1", "1e9 + 2000"),
    ],
)
def test_numbers_are_compared_by_their_size(expected: str, right: str, wrong: str) -> None:
    truth = {"fn_name": "f", "inputs": ["1"], "outputs": [expected]}
    for value, score in ((right, 1.0), (wrong, 0.0)):
        assert code.grade("apps", f"```python\ndef f(x): return {value}\n```", truth)["score"] == score


def test_printed_numbers_are_compared_by_their_size() -> None:
    assert code.same_output("0.33333331", "0.33333333") and code.same_output("4.0000001e-7", "0.0000004")
    assert not code.same_output("0", "0.0000004") and not code.same_output("0.000001", "0.0")


LONG = "1" + "0" * 5000  # Python refuses to read or print an integer of more than 4,300 digits
NEXT = LONG[:-1] + "1"
PLUS = "```python\ndef f(n):\n    return n + 1\n```"
READS = "```python\nprint(int(input()) + 1)\n```"


@pytest.mark.parametrize(
    ("tests", "response", "right"),
    [
        ({"inputs": [LONG], "outputs": [NEXT]}, READS, 1),
        (f'{{"inputs": [[{LONG}]], "outputs": [[{NEXT}]]}}', READS, 1),
        ({"inputs": [[10**5000]], "outputs": [[10**5000 + 1]]}, READS, 1),
        ({"fn_name": "f", "inputs": [[10**5000]], "outputs": [10**5000 + 1]}, PLUS, 1),
        ({"fn_name": "f", "inputs": [[10**5000]], "outputs": [10**5000]}, PLUS, 0),
        ({"fn_name": "f", "inputs": [LONG], "outputs": [NEXT]}, PLUS, 1),
        (f'{{"fn_name": "f", "inputs": [[{LONG}]], "outputs": [[{NEXT}]]}}', PLUS, 1),
        ([f"assert f({LONG}) == {NEXT}"], PLUS, 1),
        ([f"assert f({LONG}) == {LONG}"], PLUS, 0),
        ({"test_list": ["assert f(X) == X + 1"], "test_setup_code": f"X = {LONG}"}, PLUS, 1),
    ],
)
def test_integers_of_any_length(tests, response, right):
    assert compute_score("apps", response, tests)["score"] == right
