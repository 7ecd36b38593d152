"""What keeps code in: limits, Landlock, seccomp, and Python's audit hook where the system has none of them.

A process puts these around itself before it runs anything of others. A step holds or raises, and none can be undone
from inside. Standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

_SPARE_THREADS, _NOBODY = 64, 65534
_LIBC = ctypes.CDLL(None, use_errno=True)
# prctl(2)
_PDEATHSIG, _DUMPABLE, _KEEPCAPS, _SECCOMP, _FILTER, _NO_NEW_PRIVS = 1, 4, 8, 22, 2, 38
_CAPABILITY_VERSION, _READ_ALL, _ACCESS_ALL = 0x20080522, 1 << 2, 1 << 1  # CAP_DAC_READ_SEARCH, CAP_DAC_OVERRIDE
# landlock(7)
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ_TREE, _READ_FILE, _READ_WRITE_FILE = 0b1101, 0b100, 0b110
# seccomp: what libseccomp calls SCMP_ACT_ALLOW, SCMP_ACT_ERRNO, SCMP_CMP_LE, SCMP_CMP_EQ, SCMP_CMP_MASKED_EQ
_ALLOW, _ERRNO, _LE, _EQ, _MASKED_EQ = 0x7FFF0000, 0x50000, 3, 4, 7
_CLONE_THREAD, _F_SETLKW, _F_DUPFD_CLOEXEC, _SOCK_STREAM = 0x10000, 7, 1030, 1
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # terminal or not, bytes there, blocking, cloexec
_OPEN_FOR_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

# Anything else does not exist (ENOSYS): sockets, processes, programs, mounts, tracing, permissions, keys, what is new.
_SYSCALLS = """
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek _llseek close close_range dup dup2 dup3
ftruncate ftruncate64 fsync fdatasync fadvise64 poll ppoll select pselect6 _newselect pipe pipe2 eventfd eventfd2
epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 sendto recvfrom sendmsg recvmsg shutdown
getsockname getpeername getsockopt setsockopt fstat fstat64 stat stat64 lstat lstat64 newfstatat fstatat64 statx statfs
fstatfs access faccessat faccessat2 readlink readlinkat getdents getdents64 getcwd chdir fchdir umask mmap mmap2 munmap
mremap mprotect madvise mincore msync mlock munlock brk membarrier futex futex_time64 futex_waitv set_robust_list
get_robust_list rseq set_tid_address arch_prctl set_thread_area get_thread_area gettid getpid getppid getpgrp getpgid
getsid getuid geteuid getgid getegid getresuid getresgid getgroups exit exit_group rt_sigaction rt_sigprocmask
rt_sigreturn sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack pause alarm setitimer getitimer
timer_create timer_settime timer_gettime timer_delete timer_getoverrun timerfd_create timerfd_settime timerfd_gettime
nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times getrusage getrlimit ugetrlimit setrlimit
sysinfo uname getrandom getcpu sched_yield sched_getaffinity sched_getparam sched_getscheduler sched_get_priority_max
sched_get_priority_min getpriority get_mempolicy restart_syscall wait4 waitid
"""


def hide() -> None:
    """No process of this user can look into this one."""
    if sys.platform == "linux":
        _call("prctl", _DUMPABLE, 0, 0, 0, 0)


def enclose(
    level: str,
    *,
    readable: Sequence[str],
    seccomp: bytes | None,
    cpu_seconds: int,
    memory_mb: int,
    output_mb: int,
    uid: int,
) -> None:
    """Close this process in; from here on it may run anything. Levels: see valor.sandbox.levels.

    `readable` are the files and folders that can be read, `seccomp` the filter (None at the level rlimits), `uid` the
    user to become when this one is root.
    """
    if level not in ("landlock", "seccomp", "rlimits"):
        raise ValueError(f"no level '{level}'")
    if seccomp is None and level != "rlimits":
        raise FileNotFoundError("libseccomp is not installed")
    parent, capability = os.getppid(), 0
    other_threads = _threads_of_all() if seccomp else 0  # the system counts every one of this user's
    memory = memory_mb << 20
    _limit(CPU=cpu_seconds, AS=memory, DATA=memory, FSIZE=output_mb << 20)
    if os.geteuid() == 0:
        capability = _leave_root(uid, readable, files_are_guarded=level == "landlock")
        other_threads = 0 if os.geteuid() == uid else other_threads
    _limit(NPROC=other_threads + _SPARE_THREADS if seccomp else 1)  # only the filter tells threads from processes
    if sys.platform == "linux":
        capabilities = (ctypes.c_uint32 * 6)(capability, capability)
        _call("capset", (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), capabilities)
        _call("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)
    die_with_parent(parent)
    if level == "landlock":
        _landlock(readable)
    if seccomp is not None:
        _seccomp(seccomp)
    if level != "landlock":
        _guard_python(readable)


def die_with_parent(parent: int) -> None:
    """SIGKILL when the process that started this one ends, or has ended. Lost with every change of user."""
    if sys.platform == "linux":
        _call("prctl", _PDEATHSIG, 9, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def _threads_of_all() -> int:
    with open("/proc/loadavg") as file:
        return int(file.read().split()[3].partition("/")[2])


def _limit(**limits: int) -> None:
    limits |= {"NOFILE": 64, "STACK": 64 << 20, "CORE": 0, "MSGQUEUE": 0, "MEMLOCK": 0}
    for name, value in limits.items():
        which = getattr(resource, f"RLIMIT_{name}", None)
        if which is not None and not (name in ("AS", "DATA") and sys.platform == "darwin"):  # has them, refuses them
            hard = resource.getrlimit(which)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (value, value))


def _leave_root(uid: int, readable: Sequence[str], *, files_are_guarded: bool) -> int:
    """Become another user: root's threads have no limit. Returns the capability to keep.

    A new user who could not read Python (in /root, say) keeps that of reading everything, where the kernel guards the
    files. PermissionError: there is no way.
    """
    private = [path for path in readable if not _open_to_all(path)]
    capability = _capability_to_read() if private and files_are_guarded else 0
    if private and not capability:
        raise PermissionError(f"code must not run as root, and another user cannot read {private[0]}")
    if capability:
        _call("prctl", _KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    try:
        os.setresgid(uid, uid, uid)
    except OSError:  # a container with few users
        uid = _NOBODY
        os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    return capability


def _capability_to_read() -> int:
    """Of those that this process has."""
    capabilities = (ctypes.c_uint32 * 6)()
    _call("capget", (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), capabilities)
    return capabilities[1] & _READ_ALL or capabilities[1] & _ACCESS_ALL


def _open_to_all(path: str) -> bool:
    while path != "/":
        if not os.stat(path).st_mode & (0o001 if os.path.isdir(path) else 0o004):
            return False
        path = os.path.dirname(path)
    return True


def _landlock(readable: Iterable[str]) -> None:
    """Nothing in the file system can be opened but `readable`, for reading; no TCP, no signals to others (as far as the
    kernel's version knows these)."""
    version = max(0, _LIBC.syscall(_CREATE_RULESET, None, 0, 1))
    files = (1 << 13) - 1 | sum(1 << bit for bit, since in ((13, 2), (14, 3), (15, 5)) if version >= since)
    handled = [files, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0]  # file system, network, scope
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = _call("syscall", _CREATE_RULESET, (ctypes.c_uint64 * 3)(*handled), ctypes.c_size_t(size), 0)
    rules = [(path, _READ_TREE if os.path.isdir(path) else _READ_FILE) for path in readable]
    rules += [(path, _READ_WRITE_FILE) for path in _DEVICES if os.path.exists(path)]
    for path, rights in rules:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = rights.to_bytes(8, sys.byteorder) + parent.to_bytes(4, sys.byteorder)
        _call("syscall", _ADD_RULE, ruleset, 1, rule, 0)
        os.close(parent)
    _call("syscall", _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


class _Compare(ctypes.Structure):
    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def seccomp_filter() -> bytes | None:
    """The kernel's program that allows only what one computing process needs: threads but no fork, no sockets, no
    signals to anyone, no file opened for writing. None without libseccomp."""
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return None
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(_ERRNO | errno.ENOSYS))

    def allow(name: str, *conditions: tuple[int, ...]) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        compare = (_Compare * len(conditions))(*(_Compare(*c) for c in conditions))
        if number != -1:  # -1: this machine or libseccomp has no such call
            _check(library.seccomp_rule_add_array(context, _ALLOW, number, len(conditions), compare))

    for name in _SYSCALLS.split():
        allow(name)
    allow("open", (1, _MASKED_EQ, _OPEN_FOR_WRITING, 0))
    allow("openat", (2, _MASKED_EQ, _OPEN_FOR_WRITING, 0))
    for name in ("fcntl", "fcntl64"):  # without those that make the kernel send signals to others
        allow(name, (1, _LE, _F_SETLKW))
        allow(name, (1, _EQ, _F_DUPFD_CLOEXEC))
    for request in _IOCTLS:
        allow("ioctl", (1, _EQ, request))
    allow("clone", (0, _MASKED_EQ, _CLONE_THREAD, _CLONE_THREAD))
    allow("prlimit64", (0, _EQ, 0))
    allow("socketpair", (1, _MASKED_EQ, 0xF, _SOCK_STREAM))  # asyncio
    reader, writer = os.pipe()
    with open(reader, "rb") as program:
        try:
            _check(library.seccomp_export_bpf(context, writer))
        finally:
            os.close(writer)
            library.seccomp_release(context)
        return program.read()


def _check(negative_errno: int) -> None:
    if negative_errno < 0:
        raise OSError(-negative_errno, f"libseccomp: {os.strerror(-negative_errno)}")


def _seccomp(program: bytes) -> None:
    instructions = ctypes.create_string_buffer(program, len(program))
    count_and_address = (ctypes.c_size_t * 2)(len(program) // 8, ctypes.addressof(instructions))
    _call("prctl", _SECCOMP, _FILTER, count_and_address, 0, 0)


_REFUSED = (
    *("subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill", "pty."),
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.ch", "os.lch"),
    *("os.setxattr", "os.removexattr", "os.utime", "os.lockf", "shutil.", "resource.", "ctypes.", "fcntl.", "sqlite3."),
    *("socket.bind", "socket.connect", "socket.get", "socket.send", "socket.set", "gc.", "signal.pthread_kill"),
)
_UNAUDITED = (  # what Python does without asking its hooks
    *("mkfifo", "mknod", "pidfd_send_signal", "pidfd_open", "setpriority", "unshare", "setns"),
    *("sched_setaffinity", "sched_setparam", "sched_setscheduler"),
)


def _guard_python(readable: Sequence[str]) -> None:
    """Refuse from within Python what nothing outside refuses. Stops clumsy code and common tricks, not an expert."""
    roots = (*(f"{os.path.realpath(path)}/" for path in readable), os.path.realpath("/dev/stdin"))
    # Names of its own: those of modules and builtins can be given another meaning.
    refused, is_a, texts, real, plain = _REFUSED, isinstance, (str, bytes), os.path.realpath, os.fsdecode
    writing, error = _OPEN_FOR_WRITING, PermissionError

    def audit(event: str, args: tuple[Any, ...]) -> None:
        looks_here = event.startswith("object.") and args[0] is audit
        if looks_here or event.startswith(refused) or (event == "import" and args[0] in ("ctypes", "_ctypes")):
            raise error(f"{event}: not allowed in the sandbox")
        if event == "open" and is_a(args[0], texts):
            path = plain(real(args[0]))
            if args[2] & writing or not path.startswith(roots):
                raise error(f"{path}: not allowed in the sandbox")

    for module in map(__import__, ("_signal", "posix", "os")):
        for name in _UNAUDITED:
            if hasattr(module, name):
                delattr(module, name)
    sys.addaudithook(audit)


def _call(name: str, *args: Any) -> int:
    result = getattr(_LIBC, name)(*args)
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result
