"""Process in which a program runs (`flatshift.finetune.evaluate.sandbox`); started by its path.

Arguments: the file descriptor and word that report that the last line was reached, the scratch directory, the limits.
"""

import ctypes
import os
import pathlib
import resource
import signal
import sys

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_BIND, _REC, _PRIVATE, _NOSUID, _NODEV, _NOEXEC = 0x1000, 0x4000, 0x40000, 2, 4, 8
_MOUNT_SETATTR, _AT_RECURSIVE, _ATTR_RDONLY = 442, 0x8000, 1
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_NO_NEW_PRIVS, _CAPBSET_DROP = 1, 4, 38, 24
_NOBODY = 65534
_libc = ctypes.CDLL(None, use_errno=True)


def _check_result(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), what)


def _enter_namespaces(scratch: str, size: int) -> None:
    """Enter new namespaces in which only this user exists; root first becomes the user nobody."""
    others = _NEWUSER | _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS
    root = os.geteuid() == 0
    if root:
        _check_result(_libc.unshare(_NEWNS), "unshare")
        _check_result(_libc.mount(None, b"/", None, _REC | _PRIVATE, None), "private mounts")
        _expose_python(sys.base_prefix)
        _make_read_only(scratch, f"size={size},nr_inodes=1000,mode=700,uid={_NOBODY},gid={_NOBODY}")
        _set_mount_attributes(b"/proc", 0, _ATTR_RDONLY)  # for the uid maps below; user nobody cannot write others
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        _check_result(_libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0), "dumpable")  # else /proc/self stays root's
    user, group = os.geteuid(), os.getegid()
    _check_result(_libc.unshare(others), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123
            file.write(text)
    if not root:
        _check_result(_libc.mount(None, b"/", None, _REC | _PRIVATE, None), "private mounts")
        _make_read_only(scratch, f"size={size},nr_inodes=1000,mode=700")


def _expose_python(directory: str) -> None:
    """Make Python's own files readable for the user nobody, even in a home directory that only root can enter."""
    parts = directory.strip("/").split("/")
    above = ["/" + "/".join(parts[:n]) for n in range(1, len(parts) + 1)]
    closed = next((path for path in above if not pathlib.Path(path).stat().st_mode & 0o001), None)
    if closed is None:
        return
    place = os.open(directory, os.O_PATH)
    _check_result(_libc.mount(b"tmpfs", closed.encode(), b"tmpfs", _NOSUID | _NODEV, b"size=64k,mode=755"), "cover")
    os.makedirs(directory, exist_ok=True)  # noqa: PTH103
    _check_result(
        _libc.mount(f"/proc/self/fd/{place}".encode(), directory.encode(), None, _BIND | _REC, None), "python"
    )
    os.close(place)


def _make_read_only(scratch: str, options: str) -> None:
    """Make every file system read-only, except a small tmpfs at `scratch`."""
    _set_mount_attributes(b"/", _ATTR_RDONLY, 0)
    flags = _NOSUID | _NODEV | _NOEXEC
    _check_result(_libc.mount(b"tmpfs", scratch.encode(), b"tmpfs", flags, options.encode()), "scratch")


def _set_mount_attributes(place: bytes, on: int, off: int) -> None:
    attributes = (ctypes.c_uint64 * 4)(on, off, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    changed = _libc.syscall(
        _MOUNT_SETATTR, -100, ctypes.c_char_p(place), ctypes.c_uint(_AT_RECURSIVE), ctypes.byref(attributes), size
    )
    _check_result(changed, "read-only mounts")


def _drop_capabilities() -> None:
    """Drop all capabilities permanently."""
    for capability in range(64):
        _libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0)
    _check_result(_libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _check_result(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capabilities")


def _set_limits(seconds: int, memory: int, processes: int, size: int) -> None:
    for what, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_FSIZE, size),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def _run_code(code: str, pipe: int, word: str) -> None:
    """Run the program, then write the word: a program that ends earlier writes nothing."""
    space = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(code, "<program>", "exec"), space)
    os.write(pipe, word.encode())


def _main() -> int:
    pipe, word, scratch = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    seconds, memory, processes, size = map(int, sys.argv[4:])
    sys.argv[:] = ["program"]
    code = sys.stdin.buffer.read().decode("utf-8")
    _enter_namespaces(scratch, size)
    child = os.fork()  # first process of its namespace: all others end with it
    if child:
        os.close(pipe)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
        signal.alarm(seconds + 1)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGXCPU)
        return 124 if killed else 0 if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0 else 1
    _check_result(_libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "parent")
    os.chdir(scratch)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    _drop_capabilities()
    _set_limits(seconds, memory, processes, size)
    _run_code(code, pipe, word)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(_main())
