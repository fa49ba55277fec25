"""Programs that a sandbox has to contain: each does harm, or says that it passed, unless it is held back.

`{outside}` is a directory of the user's, `{port}` a server on this machine, `{parent}` the process that started it.
None of them may pass, and none may leave anything behind.
"""

HOSTILE = {
    "ends early with success": "import os\nos._exit(0)",
    "raises SystemExit(0)": "raise SystemExit(0)",
    "never ends": "while True:\n    pass",
    "sleeps": "import time\ntime.sleep(1000)",
    "ignores every signal": (
        "import signal\nfor n in range(1, 32):\n    try:\n        signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError):\n        pass\nwhile True:\n    pass"
    ),
    "takes all memory": "blocks = []\nwhile True:\n    blocks.append(bytearray(1 << 26))",
    "forks without end": "import os\nwhile True:\n    os.fork()",
    "starts threads without end": (
        "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(100,)).start()"
    ),
    "writes a huge file": "with open('big', 'wb') as file:\n    while True:\n        file.write(bytes(1 << 20))",
    "writes many files": "for n in range(10**6):\n    open(f'file-{{n}}', 'w').write('x' * 4096)",
    "writes into the user's directory": "open('{outside}/planted', 'w').write('x')",
    "deletes the user's file": "import os\nos.remove('{outside}/kept')",
    "follows a link to the user's file": (
        "import os\nos.symlink('{outside}/kept', 'link')\nopen('link', 'a').write('x')"
    ),
    "makes mounts writable again": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nassert libc.unshare(0x10020000) == 0\n"
        "libc.mount(None, b'/', None, 0x1020, None)\nopen('{outside}/planted', 'w').write('x')"
    ),
    "calls this machine": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 2).send(b'here')",
    "asks a name server": "import socket\nsocket.getaddrinfo('example.org', 80)",
    "listens": "import socket\ns = socket.socket()\ns.bind(('0.0.0.0', 80))\ns.listen()\nassert False",
    "ends its parent": "import os, signal\nos.kill({parent}, signal.SIGTERM)\nos.kill(-1, 9)\nassert False",
    "leaves a process behind": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(5)\n"
        "        open('{outside}/planted', 'w').write('x')\nassert False"
    ),
    "crashes the interpreter": "import ctypes\nctypes.string_at(0)",
    "recurses without end": "import sys\nsys.setrecursionlimit(10**9)\ndef f():\n    f()\nf()",
    "floods its output": "import sys\nwhile True:\n    sys.stdout.write('x' * 10**6)\n    sys.stderr.write('x')",
    "opens files without end": "files = []\nwhile True:\n    files.append(open('/dev/null'))",
    "becomes root": "import os\nos.setuid(0)\nopen('/etc/planted', 'w').write('x')",
}
