"""Code that wants more than to solve its problem, at every level of isolation that this machine offers.

Two kinds: forgeries, which are wrong solutions that want to be graded as right, and break-outs, which print what they
get hold of or harm something outside. After each one nothing runs, and nothing was written.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from valor.rewards import code
from valor.sandbox import LEVELS, Limits, Sandbox, try_levels

pytestmark = pytest.mark.slow

FAILURES = dict(try_levels())
MARK = f"valor_attack_{secrets.token_hex(8)}"
SECRET = f"secret{secrets.token_hex(8)}"


@pytest.fixture(scope="module", params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    """Each level in turn."""
    if FAILURES[request.param]:
        pytest.skip(f"{request.param}: {FAILURES[request.param]}")
    return request.param


@pytest.fixture
def grader_of_level(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code grader with that level, and little patience."""
    monkeypatch.setattr(code, "strongest_level", lambda: level)
    monkeypatch.setattr(code, "_seconds", 20.0)


@pytest.fixture(scope="module", autouse=True)
def adopted() -> Iterator[None]:
    """Orphans of this process become its children: whatever runs away is found."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    yield
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


@pytest.fixture
def nothing_left(grader_of_level: None, tmp_path: Path) -> Iterator[None]:
    """After the test there is no new process, and no file where an attack could put one."""
    before = set(psutil.Process().children(recursive=True))
    yield
    end = time.monotonic() + 10.0
    while (left := set(psutil.Process().children(recursive=True)) - before) and time.monotonic() < end:
        psutil.wait_procs(left, timeout=0.1)
    assert not left
    places = [tmp_path, Path.cwd(), Path.home(), Path(tempfile.gettempdir()), Path("/dev/shm")]
    assert [place for place in places if place.is_dir() and (place / MARK).exists()] == []


def solve(response: str, **more: Any) -> dict[str, Any]:
    """Grade a response to: square a number."""
    truth = {"test_list": ["assert f(2) == 4", "assert f(3) == 9"], "time_limit": 1} | more
    return code.grade("mbpp", f"```python\n{response}\n```", truth)


# Finds the tests' text wherever Python lets one look, and takes the expected value from there.
HUNT = """
import gc, re, sys
def texts():
    frame = sys._getframe()
    while frame:
        yield from (str(v) for v in [*frame.f_locals.values(), *frame.f_globals.values(), frame.f_code.co_consts])
        frame = frame.f_back
    for thing in gc.get_objects():
        if isinstance(thing, (dict, list, tuple)):
            held = thing.values() if isinstance(thing, dict) else thing
            yield from (v if isinstance(v, str) else v.decode("latin1") for v in held if isinstance(v, (str, bytes)))
def f(x):
    hits = (re.search("assert f\\\\(%d\\\\) == (\\\\d)" % x, text) for text in texts())
    return next(int(hit[1]) for hit in hits if hit)
"""
MEMORY = """
import os, re
def search(pid, x):
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb") as memory:
        for line in maps:
            start, end = (int(v, 16) for v in line.split()[0].split("-"))
            if "rw" in line:
                memory.seek(start)
                if hit := re.search(rb"assert f\\(%d\\) == (\\d)" % x, memory.read(end - start)):
                    return int(hit[1])
def f(x):
    for pid in ["self", str(os.getppid()), *filter(str.isdigit, os.listdir("/proc"))]:
        try:
            if (value := search(pid, x)) is not None:
                return value
        except (OSError, ValueError, OverflowError):
            pass
"""
# Writes a verdict, or replies, to every file descriptor that it or another process has.
FORGE = """
import os
verdict = b'{"tuple": [2, ""]}'
reply = b'{"tuple": [true, 4, []]}'
def forge():
    places = [*range(64)]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        places += [f"/proc/{pid}/fd/{i}" for i in range(12)]
    for place in places:
        try:
            fd = place if isinstance(place, int) else os.open(place, os.O_WRONLY)
            for message in (verdict, reply):
                os.write(fd, b"%08x" % len(message) + message)
                os.write(fd, message)
        except OSError:
            pass
"""

WRONG = "def f(x): return 0"
FORGERIES = {
    "sys.exit before the tests": "import sys; sys.exit(0)",
    "os._exit before the tests": "import os; os._exit(0)",
    "os._exit in the function": "import os\ndef f(x): os._exit(0)",
    "SystemExit in the function": "def f(x): raise SystemExit(0)",
    "StopIteration": "def f(x): raise StopIteration(4)",
    "print the expected answer": "print('True\\n4\\n9\\nOK')\ndef f(x): print(x * x, 'passed 2 of 2')",
    "equal to everything": """
class A:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
def f(x): return A()
""",
    "a number equal to all": """
class A(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def f(x): return A(7)
""",
    "a list equal to all": """
class A(list):
    def __eq__(self, other): return True
    def __len__(self): return 0
def f(x): return A([1])
""",
    "SystemExit in ==": """
import sys
class A:
    def __eq__(self, other): sys.exit(0)
def f(x): return A()
""",
    "a remote-like object": """
class Remote:
    _target = "f"
    def __getattr__(self, name): return 4
    def __call__(self, *args): return 4
def f(x): return Remote()
""",
    "not implemented": "def f(x): return NotImplemented",
    "pickle trick": "import os\nclass A:\n    def __reduce__(self): return os.system, ('true',)\ndef f(x): return A()",
    "no AssertionError": f"import builtins\nbuiltins.AssertionError = type('A', (BaseException,), {{}})\n{WRONG}",
    "patched builtins": f"""
import builtins
for name in ("exec", "compile", "isinstance", "len", "getattr", "type", "open"):
    setattr(builtins, name, lambda *a, **k: True)
{WRONG}
""",
    "patched harness": f"""
import sys
for name in ("payload", "plain", "launcher", "walls", "__main__"):
    module = sys.modules.get(name)
    for key in list(vars(module)) if module else ():
        if callable(getattr(module, key)):
            setattr(module, key, lambda *a, **k: b'{{"tuple": [2, ""]}}')
{WRONG}
""",
    "patched grader": f"""
import sys
sys.path.insert(0, {str(Path(code.__file__).parents[2])!r})
import valor.rewards.code as grader
grader.grade = lambda *a, **k: {{"score": 1.0}}
{WRONG}
""",
    "patched unittest": f"import unittest\nunittest.TestCase.assertEqual = lambda *a: None\n{WRONG}",
    "hooks of Python": f"import sys\nsys.settrace(lambda *a: None)\nsys.excepthook = lambda *a: None\n{WRONG}",
    "names of the tests": f"def __same__(*a): return True\nassert_ = check = lambda *a: None\n{WRONG}",
    "endless data": "def f(x): return iter(int, 1)",
    "deep data": "def f(x):\n    v = []\n    for _ in range(10**5): v = [v]\n    return v",
    "huge data": "def f(x): return 'x' * (200 << 20)",
    "look at frames and objects": HUNT,
    "look into memory": MEMORY,
    "forged messages": f"{FORGE}\nforge()\ndef f(x): forge()",
    "forged at exit": f"{FORGE}\nimport atexit, os\natexit.register(forge)\ndef f(x): os._exit(forge() or 0)",
    "forged by a thread": f"{FORGE}\nimport threading\nthreading.Thread(target=forge).start()\n{WRONG}",
    "endless loop": """
def f(x):
    while True:
        try:
            while True: pass
        except BaseException: pass
""",
    "deaf to signals": """
import signal
for number in range(1, 65):
    try: signal.signal(number, lambda *_: None)
    except (OSError, ValueError): pass
def f(x):
    while True: pass
""",
    "crash": "import sys\ndef f(x):\n    import ctypes; ctypes.string_at(0)",
    "fork bomb": "import os\ndef f(x):\n    while True: os.fork()",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forgery_fails(name: str, nothing_left: None) -> None:
    result = solve(FORGERIES[name])
    assert result["score"] == 0.0 and result["verdict"] != "passed"
    assert result["passed"] == 0.0


def test_prompts_helpers_cannot_be_redefined(nothing_left: None) -> None:
    prompt = 'def poly(x):\n    return x - 2\n\ndef root():\n    """Where poly is zero."""\n'
    truth = {
        "test": "def check(candidate):\n    assert poly(candidate()) == 0\n",
        "entry_point": "root",
        "prompt": prompt,
    }
    fake = "```python\ndef poly(x): return 0\ndef root(): return 7\n```"
    assert code.grade("humaneval", fake, truth)["score"] == 0.0
    assert code.grade("humaneval", "    return 2\n", truth)["score"] == 1.0


def test_modules_of_the_tests_are_real(nothing_left: None) -> None:
    truth = ["assert math.isclose(f(2), 4.0)", "assert abs(f(2) - 4.0) < 1e-6", "assert isinstance(f(2), float)"]
    fake = (
        "class math:\n  isclose = lambda *a: True\nabs = lambda v: 0\nisinstance = lambda *a: True\ndef f(x): return 7"
    )
    assert code.grade("mbpp", f"```python\n{fake}\n```", truth)["passed"] == 0.0
    assert code.grade("mbpp", "```python\ndef f(x): return x * 2.0\n```", truth)["score"] == 1.0


BORROWED = {
    "a module by its short name": (["assert np.allclose(f(2), 4)"], "class np: allclose = lambda *a: True"),
    "a module of one's own": (["assert m.isclose(f(2), 4)"], "class m: isclose = lambda *a: True"),
    "a function of math": (["assert isclose(f(2), 4)"], "isclose = lambda *a: True"),
    "a function of numpy": (["assert allclose(f(2), 4)"], "allclose = lambda *a: True"),
    "a comparison": (["assert same_value(f(2), 4)"], "same_value = lambda *a: True"),
    "a comparison, denied": (["assert not differ(f(2), 4)"], "differ = lambda *a: False"),
    "an object that is true": (["assert m.close(f(2), 4)"], "class m:\n  class close:\n    def __init__(*a): pass"),
}


@pytest.mark.parametrize("name", BORROWED)
def test_what_a_test_does_not_define_is_not_taken_from_the_response(name: str, nothing_left: None) -> None:
    tests, forgery = BORROWED[name]
    assert code.grade("mbpp", f"```python\n{forgery}\ndef f(x): return 7\n```", tests)["score"] == 0.0


def test_helpers_of_the_response_can_be_handed_to_its_functions(nothing_left: None) -> None:
    solution = "class Node:\n  def __init__(self, v): self.v, self.left = v, None\n  def add(self, n): self.left = n\n"
    solution += (
        "def depth(n): return 1 + depth(n.left) if n else 0\ndef twice(x): return 2 * x\ndef half(x): return x / 2"
    )
    truth = {"test_setup_code": "root = Node(1)\nroot.add(Node(2))\nroot.left.left = Node(3)"}
    truth["test_list"] = ["assert depth(root) == 3", "assert half(twice(4)) == 4", "assert np.allclose(depth(root), 3)"]
    assert code.grade("mbpp", f"```python\n{solution}\n```", truth)["score"] == 1.0


def naive(response: str) -> bool:
    """What a harness says that runs code and tests in one process, and looks at its exit status."""
    script = f"{response}\nassert f(2) == 4\nassert f(3) == 9\n"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize(
    "name",
    [
        *("sys.exit before the tests", "os._exit in the function", "equal to everything", "a number equal to all"),
        *("look at frames and objects", "look into memory"),
    ],
)
def test_forgeries_fool_a_naive_harness(name: str) -> None:
    assert naive(FORGERIES[name])


class World:
    """A secret file, a secret in the environment, a process to kill, servers to reach."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.canary = folder, folder / "canary"
        self.canary.write_text(SECRET)
        self.canary.chmod(0o600)
        folder.chmod(0o755)
        os.environ["VALOR_TEST_SECRET"] = SECRET
        self.victim = subprocess.Popen(["sleep", "1000"])
        self.reached: list[str] = []
        self.servers = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)]
        self.servers[1].bind(("127.0.0.1", 0))
        self.servers += [socket.socket(socket.AF_UNIX, kind) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)]
        self.servers[2].bind(str(folder / "stream"))
        self.servers[2].listen()
        self.servers[3].bind(str(folder / "datagram"))
        for name in ("stream", "datagram"):
            (folder / name).chmod(0o777)
        for server in self.servers:
            threading.Thread(target=self.watch, args=[server], daemon=True).start()

    def watch(self, server: socket.socket) -> None:
        try:
            got = server.accept() if server.type == socket.SOCK_STREAM else server.recv(100)
            self.reached.append(repr(got))
        except OSError:
            pass

    def names(self) -> dict[str, Any]:
        """What the attacks are told of it."""
        return {
            "CANARY": str(self.canary),
            "FOLDER": str(self.folder),
            "VICTIM": self.victim.pid,
            "GRADER": os.getpid(),
            "TCP": self.servers[0].getsockname(),
            "UDP": self.servers[1].getsockname(),
            "MARK": MARK,
            "SOURCE": str(Path(code.__file__).parents[2]),
        }

    def check(self) -> None:
        """Nobody came out."""
        assert self.canary.read_text() == SECRET and self.canary.stat().st_mode & 0o777 == 0o600
        assert self.canary.stat().st_nlink == 1
        assert {p.name for p in self.folder.iterdir()} == {"canary", "stream", "datagram"}
        assert self.victim.poll() is None
        assert not self.reached

    def close(self) -> None:
        del os.environ["VALOR_TEST_SECRET"]
        self.victim.kill()
        self.victim.wait()
        for server in self.servers:
            server.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Things outside that an attack may be after."""
    world = World(tmp_path_factory.mktemp("world"))
    yield world
    world.close()


# Every attempt may be refused by itself; then the next one is made.
TRY = """
import os, signal, socket, sys, threading, time
attempts = 0
def attempt(action, *args):
    global attempts
    attempts += 1
    try:
        return action(*args)
    except BaseException as error:
        return f"refused: {type(error).__name__}"
def libc():
    import ctypes
    return ctypes.CDLL(None, use_errno=True)
"""

BREAK_OUTS = {
    "read /etc/shadow": "print(attempt(lambda: open('/etc/shadow').read()))",
    "read a file of the user's": """
print(attempt(lambda: open(CANARY).read()))
print(attempt(lambda: os.read(os.open(CANARY, 0), 99)))
""",
    "read it by a link": """
for make in (os.symlink, os.link):
    attempt(make, CANARY, MARK)
    print(attempt(lambda: open(MARK).read()))
for pid in ("self", GRADER):
    print(attempt(lambda: open(f"/proc/{pid}/root{CANARY}").read()))
    print(attempt(lambda: open(f"/proc/{pid}/cwd/../../../../../../{CANARY}").read()))
""",
    "read the environment": """
print(dict(os.environ))
for pid in ["self", str(GRADER), *filter(str.isdigit, attempt(os.listdir, "/proc"))]:
    print(attempt(lambda: open(f"/proc/{pid}/environ", "rb").read()))
""",
    "look into the grader": """
print(attempt(lambda: open(f"/proc/{GRADER}/mem", "rb").read(1)), attempt(os.listdir, f"/proc/{GRADER}/fd"))
print("ATTACHED" if attempt(lambda: libc().ptrace(16, GRADER, 0, 0)) == 0 else "")
print("ATTACHED" if attempt(lambda: libc().ptrace(16, os.getppid(), 0, 0)) == 0 else "")
""",
    "see other processes": """
print("VISIBLE" if "python" in str(attempt(lambda: open(f"/proc/{GRADER}/cmdline").read())) else "")
""",
    "inherited files": """
for fd in range(3, 64):
    if not isinstance(attempt(os.fstat, fd), str):
        print("INHERITED", fd, attempt(os.readlink, f"/proc/self/fd/{fd}"))
""",
    "write outside": """
for folder in (FOLDER, SOURCE, "/tmp", "/var/tmp", "/dev/shm", "/root", os.path.expanduser("~"), "."):
    attempt(lambda: open(f"{folder}/{MARK}", "w").write("x"))
    attempt(lambda: os.mkfifo(f"{folder}/{MARK}"))
    attempt(lambda: os.mknod(f"{folder}/{MARK}"))
attempt(lambda: open(CANARY, "w").write("x"))
attempt(lambda: os.write(os.open(CANARY, os.O_WRONLY), b"x"))
attempt(lambda: libc().open(CANARY.encode(), os.O_WRONLY | os.O_TRUNC))
""",
    "write by a link": """
attempt(os.symlink, FOLDER, MARK)
attempt(lambda: open(f"{MARK}/{MARK}", "w").write("x"))
attempt(os.symlink, CANARY, MARK + "2")
attempt(lambda: open(MARK + "2", "w").write("x"))
attempt(os.link, CANARY, f"{FOLDER}/{MARK}")
attempt(os.chdir, FOLDER)
attempt(lambda: open(MARK, "w"))
""",
    "destroy outside": """
import shutil
for act in (os.remove, os.unlink, os.rmdir, shutil.rmtree):
    attempt(act, CANARY)
    attempt(act, FOLDER)
attempt(os.truncate, CANARY, 0)
attempt(os.chmod, CANARY, 0o777)
attempt(os.rename, CANARY, CANARY + MARK)
attempt(os.utime, CANARY, (0, 0))
attempt(os.setxattr, CANARY, "user.x", b"x")
attempt(lambda: libc().chmod(CANARY.encode(), 0o777))
attempt(lambda: libc().unlink(CANARY.encode()))
""",
    "write a database": """
import sqlite3
attempt(lambda: sqlite3.connect(f"{FOLDER}/{MARK}").execute("create table t (x)"))
""",
    "run a program": """
import subprocess
attempt(lambda: os.system(f"touch {FOLDER}/{MARK}"))
print(attempt(lambda: subprocess.run(["cat", CANARY], capture_output=True)))
attempt(lambda: os.posix_spawn("/bin/cat", ["cat", CANARY], {}))
attempt(lambda: os.execv("/bin/cat", ["cat", CANARY]))
attempt(lambda: libc().execl(b"/bin/cat", b"cat", CANARY.encode(), None))
""",
    "network": """
import urllib.request
for family, kind, address in ((2, 1, TCP), (2, 2, UDP), (1, 1, f"{FOLDER}/stream"), (1, 2, f"{FOLDER}/datagram")):
    attempt(lambda: socket.socket(family, kind).connect(address))
    attempt(lambda: socket.socket(family, kind).sendto(b"x", address))
    attempt(lambda: socket.socketpair(1, kind)[0].sendto(b"x", address))
attempt(lambda: urllib.request.urlopen("http://%s:%d" % tuple(TCP), timeout=1))
""",
    "kill others": """
import resource
for pid in (VICTIM, GRADER, os.getppid()):
    attempt(os.kill, pid, 9)
    attempt(os.killpg, pid, 9)
    attempt(lambda: signal.pidfd_send_signal(os.pidfd_open(pid), 9))
    attempt(resource.prlimit, pid, resource.RLIMIT_CPU, (0, 0))
    attempt(lambda: libc().kill(pid, 9))
attempt(os.kill, -1, 9)
""",
    "signals by the kernel": """
def own(pid):
    import fcntl
    a, b = socket.socketpair()
    fcntl.fcntl(a, 10, 9)  # F_SETSIG: SIGKILL
    fcntl.fcntl(a, 8, pid)  # F_SETOWN
    fcntl.fcntl(a, 4, os.O_ASYNC | os.O_NONBLOCK)
    b.send(b"x")
for pid in (VICTIM, GRADER, os.getppid()):
    attempt(own, pid)
""",
    "new namespaces": """
attempt(lambda: libc().unshare(0x10000000))
attempt(lambda: libc().setns(0, 0))
attempt(lambda: libc().mount(b"none", b"/tmp", b"tmpfs", 0, 0))
attempt(os.chroot, FOLDER)
attempt(os.setuid, 0)
print(attempt(lambda: open(CANARY).read()))
""",
    "more than allowed": """
import resource
for name in ("CPU", "AS", "FSIZE"):
    print("RAISED" if attempt(resource.setrlimit, getattr(resource, f"RLIMIT_{name}"), (-1, -1)) is None else "")
""",
    "run away": """
for _ in range(3):
    if attempt(os.fork) == 0:
        attempt(os.setsid)
        attempt(os.fork)
        time.sleep(1000)
""",
}


@pytest.mark.parametrize("name", BREAK_OUTS)
def test_break_out_fails(name: str, level: str, world: World, nothing_left: None, record_property: Any) -> None:
    told = "\n".join(f"{k} = {v!r}" for k, v in world.names().items())
    program = f"{TRY}{told}\n{BREAK_OUTS[name]}\nprint(f'made it: {{attempts}}')"
    with Sandbox(level, Limits(cpu_seconds=2, wall_seconds=25.0)) as sandbox:
        [outcome] = sandbox.run_all(program, [""], time.monotonic() + 30.0)
    assert "made it" in outcome.stdout, outcome
    record_property("attempts", max(int(outcome.stdout.split()[-1]), 1))
    for loot in (SECRET, "root:", "ATTACHED", "VISIBLE", "INHERITED", "RAISED"):
        assert loot not in outcome.stdout
    world.check()


EXCESSES = {
    "endless loop": "while True: pass",
    "endless sleep": "import time\ntime.sleep(1000)",
    "endless output": "while True: print('x' * 1000)",
    "endless errors": "import sys\nwhile True: print('x' * 1000, file=sys.stderr)",
    "memory bomb": "x = []\nwhile True: x.append(bytearray(50 << 20))",
    "fork bomb": "import os\nwhile True: os.fork()",
    "thread bomb": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=[1000]).start()",
    "sleeping threads": "import threading, time\nfor _ in 'ab': threading.Thread(target=time.sleep, args=[99]).start()",
    "huge power": "print(9 ** 9 ** 9)",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return [f(x)]\nf(1)",
    "fill the disk": "for i in range(10**6):\n  with open(f'file{i}', 'wb') as f: f.write(bytes(1 << 20))",
    "many files": "for i in range(10**6): open(f'file{i}', 'w').close()",
    "one large file": "f = open('file', 'wb')\nwhile True: f.write(bytes(1 << 20))",
    "holes": "import os\nos.ftruncate(1, 1 << 40)",
    "memory files": "import os\nx = []\nwhile True: x.append(os.memfd_create('x')); os.write(x[-1], bytes(1 << 20))",
    "deaf daemon": "import os, signal, time\nfor s in (1, 2, 13, 15): signal.signal(s, signal.SIG_IGN)\n"
    "if os.fork(): os._exit(0)\nos.setsid()\ntime.sleep(1000)",
}


@pytest.mark.parametrize("name", EXCESSES)
def test_excess_ends(name: str, level: str, nothing_left: None) -> None:
    limits = Limits(cpu_seconds=1, wall_seconds=1.5 if "sleep" in name or "thread" in name else 120.0)
    free = psutil.virtual_memory().available
    start = time.monotonic()
    with Sandbox(level, limits) as sandbox:
        [outcome] = sandbox.run_all(EXCESSES[name], ["1\n"], start + 120.0)
    assert outcome.error is not None
    assert len(outcome.stdout) <= limits.output_mb << 20
    assert time.monotonic() - start < 110.0
    assert psutil.virtual_memory().available > free - (4 << 30)


THREADS = """
import threading, time
threading.stack_size(32768)
started = 0
try:
    for _ in range(3000):
        threading.Thread(target=time.sleep, args=[5], daemon=True).start()
        started += 1
except RuntimeError: pass
print(started, flush=True)
import os
os._exit(0)
"""


def threads_of_all() -> int:
    """Of all processes that are still there when they are asked."""
    found = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error, FileNotFoundError):
            found += process.num_threads()
    return found


def test_threads_have_a_limit(level: str, nothing_left: None) -> None:
    """As root too, wherever Python lies; others' threads count, of which there may be more or fewer a moment later."""
    before = threads_of_all()
    with Sandbox(level, Limits(wall_seconds=60.0)) as sandbox:
        [outcome] = sandbox.run_all(THREADS, [""], time.monotonic() + 60.0)
    most = 0 if os.geteuid() == 0 else max(before, threads_of_all())
    assert 0 <= int(outcome.stdout) <= 64 + most


HARMLESS = {
    "standard input": "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
    "open(0)": "print(sum(map(int, open(0).read().split())))",
    "/dev/stdin": "print(sum(map(int, open('/dev/stdin').read().split())))",
    "library": "import collections, decimal, fractions, heapq, itertools, re, statistics, typing\nprint(3)",
    "numpy": "import numpy as np\nprint(int(np.array([1, 2]).sum()))",
    "asyncio": "import asyncio\nasync def f():\n  await asyncio.sleep(0.01)\n  return 3\nprint(asyncio.run(f()))",
    "much memory": "x = bytearray(400 << 20)\nprint(3)",
    "own signal": "import signal as s, time\ns.signal(14, lambda *_: print(3))\ns.setitimer(0, 0.01)\ntime.sleep(0.1)",
    "exit": "import sys\nprint(3)\nsys.exit(0)",
}
THREAD = """
import sys, threading
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
def main(): print(3 + 0 * depth(20000))
sys.setrecursionlimit(10**6)
threading.stack_size(128 << 20)
threading.Thread(target=main).start()
"""


def test_harmless_programs_run(level: str, nothing_left: None) -> None:
    programs = dict(HARMLESS)
    if level != "rlimits":  # Linux counts threads as processes, and nothing else forbids those there
        programs["thread"] = THREAD
    for name, program in programs.items():
        with Sandbox(level, Limits(wall_seconds=30.0)) as sandbox:
            outcomes = list(sandbox.run_all(program, ["1 2\n", "1 2"], time.monotonic() + 60.0))
        assert outcomes == [("3\n", None, False)] * 2, name
