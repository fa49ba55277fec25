"""Process of one side, program or test, of the sandbox (`flatshift.finetune.evaluate.sandbox`); started by its path.

Arguments: 1 to contain it, the limits, the descriptor of the channel to the other side, and for the test that of the
report. Its source comes by standard input.

The program serves calls. The test makes them, and finds each name it does not define itself in the program. Values
cross as JSON: plain data by value (subclasses as what they extend), all else as a handle to the side that owns it. A
handle has no comparison and no arithmetic with plain data, so that no object of the program decides whether it is the
value that the test expects.
"""

import ast
import builtins
import contextlib
import ctypes
import errno
import importlib
import json
import operator
import os
import resource
import signal
import struct
import sys
from typing import Any

_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC, _NEWUSER = 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000
_NEWPID, _NEWNET = 0x20000000, 0x40000000
_BIND, _REC, _PRIVATE, _DETACH = 0x1000, 0x4000, 0x40000, 2
_RDONLY, _NOSUID, _NODEV, _NOEXEC = 1, 2, 4, 8
_MOUNT_SETATTR, _AT_RECURSIVE = 442, 0x8000
_SET_PDEATHSIG, _SET_SECCOMP, _CAPBSET_DROP, _SET_NO_NEW_PRIVS = 1, 22, 24, 38
_NOBODY = 65534
_libc = ctypes.CDLL(None, use_errno=True)

_DENIED = """
fork 57 - vfork 58 - execve 59 221 execveat 322 281 unshare 272 97 setns 308 268
socket 41 198 connect 42 203 bind 49 200 listen 50 201 accept 43 202 accept4 288 242
shmget 29 194 shmat 30 196 msgget 68 186 semget 64 190 mq_open 240 180 memfd_create 319 279
ptrace 101 117 process_vm_readv 310 270 process_vm_writev 311 271 kcmp 312 272
add_key 248 217 request_key 249 218 keyctl 250 219 bpf 321 280 perf_event_open 298 241 userfaultfd 323 282
seccomp 317 277 io_setup 206 0 vmsplice 278 75 fanotify_init 300 262 lookup_dcookie 212 18
mount 165 40 umount2 166 39 pivot_root 155 41 chroot 161 51 name_to_handle_at 303 264 open_by_handle_at 304 265
swapon 167 224 swapoff 168 225 acct 163 89 quotactl 179 60 nfsservctl 180 42 syslog 103 116 personality 135 92
init_module 175 105 finit_module 313 273 delete_module 176 106 kexec_load 246 104 kexec_file_load 320 294
reboot 169 142 settimeofday 164 170 clock_settime 227 112 adjtimex 159 171 clock_adjtime 305 266
sethostname 170 161 setdomainname 171 162 iopl 172 - ioperm 173 - modify_ldt 154 -
mbind 237 235 set_mempolicy 238 237 migrate_pages 256 238 move_pages 279 239
"""
"""Names and numbers of system calls that fail with EPERM, on x86-64 and aarch64."""
_CLONE, _CLONE_THREAD = (56, 220), 0x10000
_NEW_CALLS = 424  # the same numbers everywhere from here on
_NEW_ALLOWED = 436, 437, 439, 441, 449, 452, 454, 455, 456  # close_range, openat2, faccessat2, epoll_pwait2, futexes


def _check_result(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), what)


def _enter_namespaces(root: bool, size: int) -> None:
    """Enter new namespaces; root, which builds from files that only it may read, enters one of users afterwards."""
    user, group = os.geteuid(), os.getegid()
    others = _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS | _NEWCGROUP
    _check_result(_libc.unshare(others if root else others | _NEWUSER), "unshare")
    if not root:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123
                file.write(text)
    _build_root(size)


def _build_root(size: int) -> None:
    """Change to a read-only root of Python's library, the system's shared libraries and three devices, with a small
    /tmp."""
    _check_result(_libc.mount(None, b"/", None, _REC | _PRIVATE, None), "private mounts")
    bases = sys.base_prefix, sys.base_exec_prefix, "/usr", ""
    folders = {f"{base}/{name}" for base in bases for name in ("lib", "lib64")}
    sources = {path: os.path.realpath(path) for path in sorted(folders | {"/usr/share/zoneinfo", "/etc/ld.so.cache"})}
    _mount_tmpfs("/tmp", "size=1m,mode=755")
    os.mkdir("/tmp/old")  # noqa: PTH102
    _check_result(_libc.pivot_root(b"/tmp", b"/tmp/old"), "pivot_root")
    os.chdir("/")
    for path, source in sources.items():
        if os.path.exists(f"/old{source}"):  # noqa: PTH110
            _bind(f"/old{source}", path, _RDONLY | _NOSUID | _NODEV)
    for name in ("null", "zero", "urandom"):
        _bind(f"/old/dev/{name}", f"/dev/{name}", _RDONLY | _NOSUID | _NOEXEC)
    _check_result(_libc.umount2(b"/old", _DETACH), "old root")
    os.rmdir("/old")  # noqa: PTH106
    os.mkdir("/tmp")  # noqa: PTH102
    _mount_tmpfs("/tmp", f"size={size},nr_inodes=1000,mode=1777")
    _set_mount_attributes("/", _RDONLY, 0)


def _mount_tmpfs(place: str, options: str) -> None:
    flags = _NOSUID | _NODEV | _NOEXEC
    _check_result(_libc.mount(b"tmpfs", place.encode(), b"tmpfs", flags, options.encode()), place)


def _bind(source: str, path: str, attributes: int) -> None:
    if os.path.isdir(source):  # noqa: PTH112
        os.makedirs(path, exist_ok=True)  # noqa: PTH103
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
        os.close(os.open(path, os.O_CREAT))
    _check_result(_libc.mount(source.encode(), path.encode(), None, _BIND | _REC, None), path)
    _set_mount_attributes(path, attributes, _AT_RECURSIVE)


def _set_mount_attributes(place: str, attributes: int, flags: int) -> None:
    settings = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(settings))
    path = ctypes.c_char_p(place.encode())
    changed = _libc.syscall(_MOUNT_SETATTR, -100, path, ctypes.c_uint(flags), ctypes.byref(settings), size)
    _check_result(changed, "read-only mounts")


def _drop_privileges(root: bool) -> None:
    """Drop all capabilities permanently; root first becomes nobody, in a user namespace that counts its own threads."""
    if root:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        _check_result(_libc.unshare(_NEWUSER), "unshare")
    _check_result(_libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "parent")
    for capability in range(64):
        _libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0)
    _check_result(_libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _check_result(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capabilities")


def _filter_system_calls() -> None:
    """Refuse the system calls of `_DENIED`, newer ones than are known here, and new processes: threads only, so that
    the limit of one address space is the limit of all memory."""
    machine = ("x86_64", "aarch64").index(os.uname().machine)
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, denied, unknown = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
    lines = [(load, 0, 0, 4), (equal, 1, 0, (0xC000003E, 0xC00000B7)[machine]), (give, 0, 0, kill), (load, 0, 0, 0)]
    for number in _NEW_ALLOWED:
        lines += [(equal, 0, 1, number), (give, 0, 0, allow)]
    lines += [(at_least, 0, 1, _NEW_CALLS), (give, 0, 0, unknown)]
    for number in (int(text) for text in _DENIED.split()[1 + machine :: 3] if text != "-"):
        lines += [(equal, 0, 1, number), (give, 0, 0, denied)]
    lines += [(equal, 0, 3, _CLONE[machine]), (load, 0, 0, 16), (any_bit, 1, 0, _CLONE_THREAD), (give, 0, 0, denied)]
    code = b"".join(struct.pack("=HBBI", *line) for line in [*lines, (give, 0, 0, allow)])
    buffer = ctypes.create_string_buffer(code)  # named: it must live until the kernel has read it
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    _check_result(_libc.prctl(_SET_SECCOMP, 2, program, 0, 0), "system call filter")


def _set_limits(contained: int, seconds: int, memory: int, threads: int, size: int) -> None:
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: size,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    if contained:  # otherwise all processes of the user count
        limits |= {resource.RLIMIT_NPROC: threads, resource.RLIMIT_MSGQUEUE: 0}
    for what, most in limits.items():
        with contextlib.suppress(*(() if contained else (ValueError, OSError))):
            resource.setrlimit(what, (most, most))


class _Remote:
    """Object of the other side. Operations on it are carried out there."""

    __slots__ = ("_channel", "_handle")

    def __init__(self, channel: "_Channel", handle: int) -> None:
        object.__setattr__(self, "_channel", channel)
        object.__setattr__(self, "_handle", handle)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._channel.request(self._handle, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._channel.operate("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._channel.operate("setattr", self, name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Remote) and bool(self._channel.operate("eq", self, other))

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, _Remote) and bool(self._channel.operate("isinstance", instance, self))


def _forward_operator(name: str, alike: bool) -> None:
    def operate(self: _Remote, *args: Any) -> Any:
        if alike and not all(isinstance(arg, _Remote) for arg in args):
            return NotImplemented
        return self._channel.operate(name, self, *args)

    setattr(_Remote, f"__{name}__", operate)


_UNARY = "len iter next str repr hash bool int float abs neg getitem setitem delitem"
_BINARY = "add sub mul truediv floordiv mod pow and or lt le gt ge"
for _name in f"{_UNARY} {_BINARY}".split():
    _forward_operator(_name, alike=_name in _BINARY.split())


class _Channel:
    """Connection to the other side: each requests calls from the other, and serves calls while it waits."""

    def __init__(self, descriptor: int, operations: Any) -> None:
        self._reader = open(descriptor, "rb", closefd=False)  # noqa: SIM115
        self._writer = open(descriptor, "wb", closefd=False)  # noqa: SIM115
        self._objects: list[Any] = [operations]
        """Objects that the other side has a handle for. The first carries out operations on the others; the test's is
        None, so that a program can only call the functions it was given."""
        self._exceptions: dict[str, type[Exception]] = {}

    def operate(self, name: str, *args: Any) -> Any:
        return self.request(0, (name, *args), {}, may_stop=name == "next")

    def request(self, handle: int, args: tuple, kwargs: dict, *, may_stop: bool = False) -> Any:
        """Have the other side call its object of that handle. Lists, sets and dictionaries that it changed are changed
        here."""
        named = {name: self._encode(value) for name, value in kwargs.items()}
        self._send(["call", handle, [self._encode(arg) for arg in args], named])
        while (message := self._receive())[0] == "call":
            self._serve(message)
        try:
            kind, content, more = message
            if kind == "value":
                value = self._decode(content)
                for index, data in more:
                    _replace_content(args[index], self._decode(data))
            else:
                error = self._build_exception(content, more, may_stop)
        except Exception:
            os._exit(1)  # a reply against the rules must not look like an error that a test expects
        if kind != "value":
            raise error
        return value

    def serve(self) -> None:
        """Serve calls until the other side ends."""
        while True:
            self._serve(self._receive())

    def _serve(self, message: list) -> None:
        _, handle, args, kwargs = message
        reply: list
        try:
            values = [self._decode(arg) for arg in args]
            result = self._objects[handle](*values, **{k: self._decode(v) for k, v in kwargs.items()})
            after = [[i, self._encode(value)] for i, value in enumerate(values) if isinstance(value, _MUTABLE)]
            reply = ["value", self._encode(result), [[i, data] for i, data in after if data != args[i]]]
        except Exception as error:
            reply = ["error", [kind.__name__ for kind in type(error).__mro__], str(error)]
        self._send(reply)

    def _send(self, message: list) -> None:
        try:
            self._writer.write(json.dumps(message).encode() + b"\n")
            self._writer.flush()
        except OSError:
            os._exit(1)

    def _receive(self) -> list:
        try:
            message = json.loads(self._reader.readline())
        except Exception:
            os._exit(1)  # the other side has ended, or floods this one
        return message if isinstance(message, list) else os._exit(1)

    def _encode(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, float, str)):
            return value
        if isinstance(value, int):
            return int(value) if -(1 << 62) < value < 1 << 62 else ["int", hex(value)]
        for kind in (list, tuple, set, frozenset):
            if isinstance(value, kind):
                return [kind.__name__, *map(self._encode, value)]
        if isinstance(value, dict):
            return ["dict", *(self._encode(item) for pair in value.items() for item in pair)]
        if isinstance(value, (bytes, bytearray)):
            return ["bytes" if isinstance(value, bytes) else "bytearray", value.hex()]
        if isinstance(value, complex):
            return ["complex", value.real, value.imag]
        if isinstance(value, range):
            return ["range", value.start, value.stop, value.step]
        if _BY_TEXT.get(name := type(value).__name__) == type(value).__module__:
            return [name, value.isoformat() if hasattr(value, "isoformat") else str(value)]
        if isinstance(value, type) and value.__module__ == "builtins" and hasattr(builtins, value.__name__):
            return ["type", value.__name__]
        if isinstance(value, type) and issubclass(value, Exception):
            return ["exception", *(kind.__name__ for kind in value.__mro__)]
        if isinstance(value, _Remote):
            return ["yours", value._handle]
        if self._objects[0] is None and not callable(value):
            raise TypeError(f"a test passes plain data and functions to the program, and no {type(value).__name__}")
        self._objects.append(value)
        return ["mine", len(self._objects) - 1]

    def _decode(self, data: Any) -> Any:
        if not isinstance(data, list):
            return data if not isinstance(data, dict) else os._exit(1)
        kind, *content = data
        if kind in ("list", "tuple", "set", "frozenset"):
            return getattr(builtins, kind)(map(self._decode, content))
        if kind == "dict":
            items = map(self._decode, content)
            return dict(zip(items, items, strict=True))
        if kind == "int":
            return int(content[0], 16)
        if kind in ("bytes", "bytearray"):
            return getattr(builtins, kind).fromhex(*content)
        if kind in ("complex", "range"):
            return getattr(builtins, kind)(*content)
        if kind in _BY_TEXT:
            known = getattr(importlib.import_module(_BY_TEXT[kind]), kind)
            return getattr(known, "fromisoformat", known)(*content)
        if kind == "type" and isinstance(known := getattr(builtins, content[0]), type):
            return known
        if kind == "exception":
            return self._build_exception_class(content)
        if kind == "yours" and content[0] > 0:
            return self._objects[content[0]]
        if kind == "mine":
            return _Remote(self, content[0])
        raise ValueError(kind)

    def _build_exception(self, names: list[str], text: str, may_stop: bool) -> Exception:
        kind = self._build_exception_class(names)
        if issubclass(kind, (StopIteration, StopAsyncIteration)) and not may_stop:
            return RuntimeError(text)  # as Python has it in generators: it would end an iteration of the test's
        for base in kind.__mro__:
            with contextlib.suppress(TypeError):  # some take more than a text
                return base(text)
        return Exception(text)

    def _build_exception_class(self, names: list[str]) -> type[Exception]:
        """Return the class whose method resolution order has these names; one that Python lacks is made."""
        kind = Exception
        for name in reversed(names[: names.index("Exception")]):
            known = getattr(builtins, name, None)
            if not (isinstance(known, type) and issubclass(known, Exception)):
                known = self._exceptions.setdefault(name, type(name, (kind,), {}))
            kind = known
        return kind


_MUTABLE = list, set, dict, bytearray
_BY_TEXT = {"Decimal": "decimal", "Fraction": "fractions"} | dict.fromkeys(("date", "datetime", "time"), "datetime")
"""Classes passed as text, and their modules."""


def _replace_content(target: Any, value: Any) -> None:
    target.clear()
    (target.extend if isinstance(target, (list, bytearray)) else target.update)(value)


class _TestNames(dict):
    """Global names of a test; one that it does not define is the program's, except Python's own (`all`, `abs`): the
    program may have replaced those to pass. Only if `tested` is one of them the program's is taken."""

    def __init__(self, channel: _Channel, tested: str | None) -> None:
        super().__init__(__name__="__main__", __builtins__=builtins)
        self._channel, self._tested = channel, tested

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name) and name != self._tested:
            raise KeyError(name)
        return self._channel.operate("global", name)


def _run_program(code: str, descriptor: int) -> None:
    space = {"__name__": "__main__", "__builtins__": builtins}

    def operate(name: str, *args: Any) -> Any:
        if name == "global":
            return space[args[0]]
        operation = vars(operator).get(f"__{name}__") or getattr(builtins, name)
        return operation(*args)

    exec(compile(code, "<program>", "exec"), space)
    _Channel(descriptor, operate).serve()


_DEFINITIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler


def _find_tested_builtin(code: str, channel: _Channel) -> str | None:
    """Return the one name of Python's own that the program defines and the test uses, if the test uses no other name of
    the program (MBPP has a program `sum`)."""
    nodes = list(ast.walk(ast.parse(code)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    defined = {node.name for node in nodes if isinstance(node, _DEFINITIONS)}
    defined |= {(node.asname or node.name).partition(".")[0] for node in nodes if isinstance(node, ast.alias)}
    defined |= {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    free = {node.id for node in names} - defined
    if free - vars(builtins).keys():
        return None
    found = []
    for name in free:
        with contextlib.suppress(Exception):
            channel.operate("global", name)
            found.append(name)
    return found[0] if len(found) == 1 else None


def _run_test(code: str, descriptor: int, report: int) -> None:
    channel = _Channel(descriptor, None)
    channel.operate("len", ())  # answered once the program has reached its last line
    exec(compile(code, "<test>", "exec"), _TestNames(channel, _find_tested_builtin(code, channel)))
    os.write(report, b"passed")


def _main() -> int:
    contained, seconds, memory, threads, size, channel, *report = map(int, sys.argv[1:])
    sys.argv[:] = ["program"]
    code = sys.stdin.buffer.read().decode("utf-8")
    root = os.geteuid() == 0
    if contained:
        _enter_namespaces(root, size)
    child = os.fork()  # first process of its namespace: all others end with it
    if child:
        os.closerange(0, 64)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
        signal.alarm(seconds + 1)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGXCPU)
        return 124 if killed else os.waitstatus_to_exitcode(status) != 0
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    os.close(null)
    if contained:
        os.chdir("/tmp")
        _drop_privileges(root)
    _set_limits(contained, seconds, memory, threads, size)
    if contained:
        _filter_system_calls()
    if report:
        _run_test(code, channel, *report)
    else:
        _run_program(code, channel)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(_main())
