"""Programs that try to get out, to stay, to take everything, or to be judged right without being right."""

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest
from conftest import ROOT

from sdpo_trl.environments.answers import same_value
from sdpo_trl.environments.code_feedback import feedback_text
from sdpo_trl.environments.code_tests import CodeTest, judge, run_test
from sdpo_trl.environments.pool import SandboxPool
from sdpo_trl.environments.sandbox import Limits, Program, Sandbox, SandboxError, SandboxUnavailable

needs_bwrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is missing: apt-get install bubblewrap"
)
LIMITS = Limits(cpu_seconds=0.6, wall_seconds=4.0, memory_bytes=256 << 20, disk_bytes=8 << 20)


@pytest.fixture(scope="module")
def sandbox():
    return Sandbox(LIMITS)


def text(code: str) -> str:
    return textwrap.dedent(code)


DEAD_BEFORE: set[str] = set()  # what other work on the machine had left when the test began


def inside(folder) -> list[str]:
    """Processes of sandboxes that show `folder`, whoever their parents are, and what is left of dead ones."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state = (entry / "stat").read_text()
                dead = state.rpartition(")")[2].split()[0] == "Z"
                ours = "(bwrap)" in state or "(python" in state
                if (dead and ours and entry.name not in DEAD_BEFORE) or (
                    not dead and str(folder) in (entry / "mountinfo").read_text()
                ):
                    found.append(entry.name)
            except OSError:
                continue
    return found


def nothing_inside(folder) -> bool:
    """Also of other work on the machine there may be a dead process for a moment."""
    deadline = time.monotonic() + 5
    while inside(folder) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not inside(folder)


@pytest.fixture
def marked(tmp_path):
    """A folder that sandboxes can show, by which their processes are found."""
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    DEAD_BEFORE.clear()
    DEAD_BEFORE.update(inside(tmp_path))
    return tmp_path


def run(sandbox, code, **fields):
    return sandbox.run(Program(text(code), **fields))


def children() -> set[str]:
    """Processes below this one, zombies included, whichever thread started them."""
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread may end meanwhile; its children are then another's
            found.update((task / "children").read_text().split())
    return found


# A process outside. One whose parent has ended has number 1 as its parent, which inside is the program itself.
OUTER = os.getppid() if os.getppid() > 1 else os.getpid()


@needs_bwrap
def test_an_endless_loop_meets_the_cpu_limit(sandbox):
    ended = run(sandbox, "while True: pass")
    assert ended.status == "time"
    assert 0.6 <= ended.cpu_seconds < 1.2 and ended.seconds < 4
    assert not children()


@needs_bwrap
@pytest.mark.parametrize(
    "code", ["import time; time.sleep(60)", "import threading; threading.Lock().acquire(); x = 1"]
)
def test_a_program_that_waits_meets_the_wall_limit(code):
    quick = Sandbox(Limits(wall_seconds=0.7))
    ended = run(quick, code if "sleep" in code else "import threading\nl = threading.Lock()\nl.acquire()\nl.acquire()")
    assert ended.status == "time"
    assert 0.6 < ended.seconds < 2 and ended.cpu_seconds < 0.5
    assert not children()


@needs_bwrap
def test_signals_cannot_be_used_to_outlive_the_limits(sandbox):
    code = """
        import signal
        for number in range(1, 65):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        try:
            while True: pass
        except BaseException:
            while True: pass
    """
    ended = run(sandbox, code)
    assert ended.status == "time" and ended.seconds < 3


@needs_bwrap
def test_processes_are_refused_by_default(sandbox):
    code = """
        import os, subprocess
        for start in (os.fork, lambda: subprocess.run(["/bin/true"]), lambda: os.posix_spawn("/bin/true", ["t"], {})):
            try:
                start()
                print("started")
            except OSError as error:
                print(type(error).__name__)
    """
    assert set(run(sandbox, code).stdout.split()) == {"BlockingIOError"}


@needs_bwrap
def test_a_fork_bomb_stays_within_its_tasks_and_dies_whole(marked):
    """Where processes are allowed: the kernel counts them, and the namespace dies with its first process."""
    limits = Limits(processes=8, cpu_seconds=1, wall_seconds=1.5, memory_bytes=256 << 20)
    sandbox = Sandbox(limits, read_only=[str(marked)])
    code = """
        import os, signal, sys
        made = 0
        while True:
            try:
                if os.fork() == 0:
                    os.setsid()
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                else:
                    made += 1
                    print(made, flush=True)
            except OSError:
                pass
    """
    ended = run(sandbox, code)
    assert ended.status in ("time", "output")
    assert 1 <= max(map(int, ended.stdout.split())) <= 8
    assert not children() and nothing_inside(marked)


@needs_bwrap
def test_threads_work_up_to_the_limit(sandbox):
    code = """
        import threading, time
        alive = 0
        try:
            for _ in range(10_000):
                threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
                alive += 1
        except RuntimeError:
            pass
        print(alive, flush=True)
        import os; os._exit(0)
    """
    ended = run(sandbox, code)
    assert ended.status == "ok" and 10 <= int(ended.stdout) <= LIMITS.tasks


@needs_bwrap
@pytest.mark.parametrize(
    "code",
    [
        "x = bytearray(4 << 30)",
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "x = 'a'\nwhile True: x += x",
        "import mmap\nx = [mmap.mmap(-1, 32 << 20) for _ in range(100)]\nraise MemoryError",
    ],
)
def test_a_memory_hog_meets_the_memory_limit(sandbox, code):
    ended = run(sandbox, code)
    assert ended.status == "memory" or "Cannot allocate memory" in ended.stderr
    assert ended.seconds < 3


@needs_bwrap
def test_memory_that_the_address_space_does_not_count_is_refused(sandbox):
    code = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            os.memfd_create("x")
            print("memfd")
        except PermissionError:
            print("refused")
        print("segment" if libc.shmget(0, 1 << 30, 0o1600) >= 0 else "refused")
        print("queue" if libc.msgget(0, 0o1600) >= 0 else "refused")
        try:
            open("/dev/shm/x", "wb")
            print("shm")
        except OSError:
            print("refused")
    """
    assert run(sandbox, code).stdout.split() == ["refused"] * 4


@needs_bwrap
def test_the_buffers_of_open_files_hold_some_megabytes(sandbox):
    """Of a pipe at most one each; of a socket what the machine allows, unless the program cannot ask for more."""
    code = """
        import fcntl, os, socket
        held, kept = 0, []
        def fill(write):
            global held
            try:
                while True:
                    held += write(bytes(1 << 16))
            except BlockingIOError:
                pass
        try:
            while True:
                both = socket.socketpair()
                kept += both
                for one in both:
                    one.setblocking(False)
                    try:
                        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
                        print("larger")
                    except PermissionError:
                        pass
                    fill(one.send)
        except OSError as error:
            print(error.errno, held < 32 << 20)
    """
    assert run(sandbox, code).stdout.split() == ["24", "True"]


@needs_bwrap
def test_the_temporary_folder_is_small(sandbox):
    code = """
        written = 0
        try:
            for number in range(1000):
                with open(f"/tmp/{number}", "wb") as file:
                    written += file.write(bytes(1 << 20))
        except OSError as error:
            print(error.errno, written)
    """
    error, written = map(int, run(sandbox, code).stdout.split())
    assert error == 28 and written <= LIMITS.disk_bytes  # no space left


@needs_bwrap
def test_a_flood_of_empty_files_is_ended(sandbox):
    ended = run(sandbox, "for number in range(10**7): open(f'/tmp/{number}', 'w').close()")
    assert ended.status == "files" and ended.seconds < 2


@needs_bwrap
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_gigabytes_of_output_are_cut_off(sandbox, stream):
    ended = run(sandbox, f"import sys\nwhile True: sys.{stream}.write('x' * (1 << 20))")
    assert ended.status == "output" and ended.seconds < 3
    assert len(ended.stdout) + len(ended.stderr) <= LIMITS.output_bytes + (2 << 16)


@needs_bwrap
def test_closing_the_streams_neither_hangs_nor_passes(sandbox):
    closing = "import os\nfor number in (0, 1, 2): os.close(number)\n"
    assert run(sandbox, closing + "print(42)").status == "error"
    ended = run(Sandbox(Limits(wall_seconds=0.7)), closing + "import time; time.sleep(60)")
    assert ended.status == "time" and ended.seconds < 2
    calls = run(sandbox, "import os\nos.closerange(0, 64)\ndef f(): return 42", function="f")
    assert calls.status == "error" and "42" not in calls.stdout


@needs_bwrap
def test_the_hosts_files_and_environment_are_out_of_sight(sandbox, tmp_path, monkeypatch):
    secret = "s3cr3t-" + os.urandom(8).hex()
    (tmp_path / "key").write_text(secret)
    monkeypatch.setenv("HF_TOKEN", secret)
    home = os.path.expanduser("~")
    code = f"""
        import os
        print(dict(os.environ))
        for path in ({str(tmp_path / "key")!r}, "/etc/passwd", "/etc/shadow", "/etc/hostname", "/proc/1/environ",
                     "/proc/{os.getpid()}/environ", "/proc/{OUTER}/cmdline", {str(ROOT / "README.md")!r}):
            try:
                print(path, open(path, "rb").read())
            except OSError:
                print("unseen")
        for path in ("/home", "/work", "/var", "/etc", "/run", "/sys", "/mnt", "/boot", "/tmp", {home!r}):
            print(path, sorted(os.listdir(path)) if os.path.isdir(path) else "none")
        print(sorted(name for name in os.listdir("/proc") if name.isdigit()))
    """
    shown = run(sandbox, code).stdout
    assert secret not in shown and "HF_TOKEN" not in shown
    assert shown.count("unseen") == 7  # all but its own environment, which is the empty one above
    assert "/tmp []" in shown and "/home none" in shown and "/work none" in shown and "['1']" in shown
    assert "/etc ['ld.so.cache']" in shown or "/etc none" in shown


@needs_bwrap
def test_no_descriptor_of_the_host_is_inherited(sandbox):
    """A folder of the host left open would lead out by `..`."""
    code = """
        import os
        for number in range(3, 4096):
            try:
                print(number, os.fstat(number))
            except OSError:
                pass
        print(sorted(os.listdir("/proc/self/fd")))
    """
    assert run(sandbox, code).stdout == "['0', '1', '2', '3']\n"  # the last one lists them


@needs_bwrap
def test_nothing_outside_the_temporary_folder_can_be_written(sandbox, tmp_path):
    places = ["/", "/usr", "/usr/bin", "/etc", "/dev", "/dev/shm", "/proc", "/bin", sys.base_prefix, str(tmp_path)]
    code = f"""
        import os
        for place in {places}:
            acts = (lambda: open(place + "/x", "w"), lambda: os.mkdir(place + "/y"), lambda: os.chmod(place, 0o777))
            for act in acts:
                try:
                    act()
                    print("did", place)
                except OSError:
                    pass
        open("/tmp/{tmp_path.name}", "w").write("here")
        print(open("/tmp/{tmp_path.name}").read())
    """
    assert run(sandbox, code).stdout == "here\n"
    assert run(sandbox, "import os; print(os.listdir('/tmp'))").stdout == "[]\n"  # gone with its sandbox
    assert list(tmp_path.iterdir()) == [] and not os.path.exists(f"/tmp/{tmp_path.name}")


@needs_bwrap
def test_there_is_no_network(sandbox):
    code = """
        import asyncio, os, socket
        for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, getattr(socket, "AF_VSOCK", 40), 38):
            try:
                socket.socket(family, socket.SOCK_STREAM)
                print("socket", family)
            except OSError:
                print("refused")
        for family in (socket.AF_INET, 16, 30, 40):  # the kernel would load what it needs for them, such as TIPC
            try:
                socket.socketpair(family, socket.SOCK_STREAM)
            except PermissionError:
                print("refused")
        print([line.split(":")[0].strip() for line in open("/proc/net/dev")][2:])
        asyncio.run(asyncio.sleep(0))  # what needs no network works
        print("done")
    """
    assert run(sandbox, code).stdout.splitlines() == ["refused"] * 9 + ["['lo']", "done"]


@needs_bwrap
def test_a_server_on_this_machine_cannot_be_reached(sandbox):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket; print(socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1))"
        ended = run(sandbox, code)
        server.settimeout(0.05)
        with pytest.raises(TimeoutError):
            server.accept()
    assert ended.status == "error" and "Error" in ended.stderr


@needs_bwrap
def test_signals_do_not_reach_other_processes(sandbox):
    caught = []
    former = signal.signal(signal.SIGUSR1, lambda *_: caught.append(1))
    try:
        code = f"""
            import os, signal
            print(os.getpid(), os.getppid())
            for pid in ({os.getpid()}, {OUTER}, -1, 0 - {os.getpid()}):
                try:
                    os.kill(pid, signal.SIGUSR1)
                    print("sent")
                except OSError as error:
                    print(type(error).__name__)
        """
        lines = run(sandbox, code).stdout.splitlines()
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert lines[0] == "1 0" and "sent" not in lines[1:3] and not caught


@needs_bwrap
def test_new_namespaces_mounts_and_tracing_are_refused(sandbox):
    code = """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        def attempt(name, *arguments):
            ctypes.set_errno(0)
            print(name, getattr(libc, name)(*arguments), ctypes.get_errno())
        attempt("unshare", 0x10000000)
        attempt("mount", b"none", b"/tmp", b"tmpfs", 0, None)
        attempt("umount2", b"/proc", 2)
        attempt("chroot", b"/tmp")
        attempt("ptrace", 0, 0, 0, 0)
        attempt("setuid", 0)
    """
    lines = run(sandbox, code).stdout.splitlines()
    assert len(lines) == 6 and all(line.split()[1] == "-1" for line in lines), lines
    status = run(sandbox, "print(open('/proc/self/status').read())").stdout
    assert "NoNewPrivs:\t1" in status and "Seccomp:\t2" in status
    assert all(f"{name}:\t0000000000000000" in status for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb", "CapInh"))


@needs_bwrap
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers and the machine code are those of x86-64")
def test_limits_cannot_be_raised_nor_the_filter_dodged(sandbox):
    code = """
        import ctypes, mmap, resource
        for kind in ("AS", "CPU", "FSIZE", "NOFILE", "NPROC", "CORE"):
            number = getattr(resource, "RLIMIT_" + kind)
            soft, hard = resource.getrlimit(number)
            try:
                resource.setrlimit(number, (hard + 1, hard + 1))
                print("raised", kind)
            except (ValueError, OSError):
                print(soft == hard)
        libc = ctypes.CDLL(None, use_errno=True)
        print(libc.syscall(425, 8, None), ctypes.get_errno())  # io_uring_setup
        print(libc.syscall(435, None, 0), ctypes.get_errno())  # clone3
        print(libc.syscall(41 | 0x40000000, 2, 1, 0), ctypes.get_errno())  # socket, by its x32 number
        print("before", flush=True)
        # mov eax, 359 (socket, by its 32-bit number); int 0x80; ret
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(bytes.fromhex("b867010000cd80c3"))
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        ctypes.CFUNCTYPE(ctypes.c_int)(address)()
        print("after", flush=True)
    """
    ended = run(sandbox, code)
    assert ended.stdout.split("\n") == [*["True"] * 6, "-1 1", "-1 38", "-1 38", "before", ""]
    assert ended.status == "error" and ended.exit_code in (-31, 128 + 31)  # SIGSYS


FORGERIES = {
    "says so": "print('all tests passed'); print('{\"passed\": true, \"result\": true}')",
    "exits": "import sys; sys.exit(0)",
    "exits hard": "import os; os._exit(0)",
    "replaces print": "import builtins, sys\nbuiltins.print = lambda *a, **k: sys.stdout.write('42' * 0)\nprint(42)",
    "replaces exit": "import sys, os\nsys.exit = os._exit = sys.excepthook = lambda *a: None\nraise 1",
    "replaces open": "import builtins, io\nbuiltins.open = io.open = lambda *a, **k: io.StringIO('42')",
    "closes": "import os; os.close(1)",
    "floods": "print('42\\n' * 1000)",
}


@needs_bwrap
@pytest.mark.parametrize("name", FORGERIES)
def test_a_script_cannot_forge_its_verdict(sandbox, name):
    outcome = run_test(FORGERIES[name], CodeTest("6 7", "42"), None, sandbox.run, 1e-6)
    assert outcome.kind in ("wrong", "error")


FORGED_CALLS = {
    "exits": "import os\ndef f(x): os._exit(0)",
    "exits at import": "raise SystemExit(0)",
    "always equal": "class E:\n def __eq__(s, o): return True\n __hash__ = None\ndef f(x): return E()",
    "equal integer": "class E(int):\n def __eq__(s, o): return True\n __hash__ = int.__hash__\ndef f(x): return E(41)",
    "equal list": "class E(list):\n def __eq__(s, o): return True\ndef f(x): return E([41])",
    "equal float": "def f(x): return float('nan')",
    "infinite": "def f(x): return float('inf')",
    "truth": "def f(x): return True",
    "claims": "def f(x): return {'passed': True, 'result': 42, 'reward': 1}",
    "replaces json": 'import json, sys\njson.dumps = lambda *a, **k: \'{"result": "anything"}\'\ndef f(x): return 0',
    "writes to each descriptor": (
        "import os\nfor n in range(3, 64):\n try: os.write(n, b'{\"passed\": true}')\n except OSError: pass\n"
        "def f(x): os._exit(0)"
    ),
    "two results": (
        "import os\nfor n in range(3, 64):\n try: os.write(n, b'{\"result\": 42}\\n')\n except OSError: pass\n"
        "def f(x): return 42"
    ),
    "deep": "def f(x):\n v = []\n for _ in range(900): v = [v]\n return v",
    "deep text": "import os\nfor n in range(3, 9):\n try: os.write(n, b'[' * 99999)\n except: pass\nos._exit(0)",
    "long integer": "def f(x): return 10 ** 6000",
    "no function": "g = 42",
    "patches the frame": "import sys\nsys._getframe(1).f_locals['value'] = 42\ndef f(x): return 41",
}


@needs_bwrap
@pytest.mark.parametrize("name", FORGED_CALLS)
def test_a_function_cannot_forge_its_verdict(sandbox, name):
    outcome = run_test(FORGED_CALLS[name], CodeTest([6], 42), "f", sandbox.run, 1e-6)
    assert outcome.kind in ("wrong", "error", "no result")
    assert run_test("def f(x): return 7 * x", CodeTest([6], 42), "f", sandbox.run, 1e-6).kind is None


def test_plain_data_alone_is_compared():
    """What an object with its own `__eq__` could do, had it got as far as the comparison."""

    class Equal:
        def __eq__(self, other):
            return True

        __hash__ = None

    assert Equal() == 42 and not same_value(42, Equal()) and not same_value([42], [Equal()])


@needs_bwrap
def test_the_answers_never_enter_the_sandbox(sandbox):
    """The program looks through all it can reach, memory included, for two answers of its own tests."""
    answers = [os.urandom(12).hex() for _ in range(3)]
    code = """
        import gc, os, sys
        def f(index):
            seen = []
            frame = sys._getframe()
            while frame:
                seen.append(repr(frame.f_globals) + repr(frame.f_locals))
                frame = frame.f_back
            seen += [repr(o) for o in gc.get_objects() if isinstance(o, (str, bytes, list, dict, tuple))]
            seen += [repr(sys.argv), repr(os.environ), open("/proc/self/cmdline").read(), open("/proc/mounts").read()]
            for line in open("/proc/self/maps"):
                span, rights = line.split()[:2]
                low, high = (int(part, 16) for part in span.split("-"))
                if "w" in rights:
                    try:
                        with open("/proc/self/mem", "rb") as memory:
                            memory.seek(low)
                            seen.append(repr(memory.read(high - low)))
                    except OSError:
                        pass
            print(len(seen), "MARK" + str(7 * 191), file=sys.stderr)
            everything = "".join(seen)
            return ["MARK" + "1337" in everything] + [word in everything for word in @]
    """
    # Each half alone goes in, so that the search itself does not bring the answer.
    halves = "[" + ", ".join(f"''.join([{a[:12]!r}, {a[12:]!r}])" for a in answers) + "]"
    found = []

    def watched(program):
        found.append(sandbox.run(program))
        return found[-1]

    tests = [CodeTest([index], answer) for index, answer in enumerate(answers)]
    verdict = judge(text(code).replace("@", halves), tests[:1], tests[1:], "f", watched, stop_early=False)
    assert verdict.passed == 0 and verdict.ran == 3
    for ended in found:
        assert ended.status == "ok", ended.stderr
        assert json.loads(ended.stdout)["result"][1:] == [False] * 3


@needs_bwrap
def test_threads_left_behind_do_not_hold_a_result_up_and_do_not_stay(sandbox):
    code = """
        import threading, time
        def forever():
            while True: time.sleep(0.01)
        def f(x):
            for _ in range(8): threading.Thread(target=forever).start()
            return 7 * x
    """
    ended = run(sandbox, code, function="f", arguments=[6])
    assert ended.status == "ok" and json.loads(ended.stdout) == {"result": 42} and ended.seconds < 2
    assert not children()
    ended = run(Sandbox(Limits(wall_seconds=0.7)), text(code) + "print(f(6))")  # a script is over when its threads are
    assert ended.status == "time" and not children()


@needs_bwrap
def test_odd_bytes_in_the_output_stay_data(sandbox):
    code = """
        import sys
        sys.stdout.buffer.write(b"a\\x00b\\xff\\xfe\\xed\\xb2\\x80\\n\\x1b[31m")
        sys.stderr.buffer.write(b"\\x00\\xff" * 3)
    """
    ended = run(sandbox, code)
    assert ended.status == "ok" and ended.stdout.startswith("a\x00b\ufffd")
    ended.stdout.encode("utf-8")
    assert run(sandbox, "print('\\ud800')").status == "error"
    call = CodeTest([], "fine")
    for value in ("'\\ud800\\x00'", "'\\ud800' * 10 + chr(0)", "['\\udfff']"):
        verdict = judge(f"def f(): return {value}", [call], [], "f", sandbox.run, stop_early=True)
        feedback = feedback_text(verdict, True)
        feedback.encode("utf-8")  # as a tokenizer or a file would
        assert "\x00" not in feedback and "wrong answer" in feedback
    odd = "def f(): raise ValueError('\\ud800\\x00' + chr(27))"
    verdict = judge(odd, [call], [], "f", sandbox.run, stop_early=True)
    feedback_text(verdict, True).encode("utf-8")
    assert run(sandbox, "print(1)\x00").status == "error"
    assert run(sandbox, "x = '\ud800'").status == "error"  # a lone surrogate in the code itself


@needs_bwrap
def test_input_reaches_the_program_unchanged(sandbox):
    data = "é\u2028\x00" + "x" * 300_000 + "\n"
    ended = run(sandbox, "import sys; d = sys.stdin.buffer.read(); print(len(d), hash(d) == hash(d))", stdin=data)
    assert ended.stdout.split()[0] == str(len(data.encode()))
    assert run(sandbox, "print('read nothing')", stdin="y" * 3_000_000).stdout == "read nothing\n"
    assert run(sandbox, "print(exit, quit, __name__); exit()").stdout.endswith("__main__\n")


@needs_bwrap
def test_a_traceback_shows_the_programs_lines_alone(sandbox):
    ended = run(sandbox, "def g(x):\n    return 1 / x\ng(0)\n")
    assert ended.status == "error" and "return 1 / x" in ended.stderr and "ZeroDivisionError" in ended.stderr
    assert 'File "<string>"' not in ended.stderr and "exec(" not in ended.stderr


@needs_bwrap
def test_folders_can_be_shown(marked):
    (marked / "helper.py").write_text("value = 42")
    shown = Sandbox(LIMITS, read_only=[str(marked)])
    code = f"import helper\nprint(helper.value)\nopen({str(marked / 'x')!r}, 'w')"
    ended = run(shown, code)
    assert ended.stdout == "42\n" and ended.status == "error" and "Read-only" in ended.stderr


@needs_bwrap
def test_a_pool_keeps_the_order_and_ends_what_outlives_its_limit(sandbox):
    codes = ["while True: pass" if i % 7 == 3 else f"print({i})" for i in range(14)]
    start = time.monotonic()
    ended = SandboxPool(sandbox, workers=2, progress=True).run([Program(code) for code in codes])
    assert [e.status for e in ended] == ["time" if i % 7 == 3 else "ok" for i in range(14)]
    assert all(e.stdout == f"{i}\n" for i, e in enumerate(ended) if e.status == "ok")
    assert time.monotonic() - start < 10 and not children()


@needs_bwrap
def test_an_exception_or_an_interrupt_stops_the_pool_at_once():
    slow = SandboxPool(Sandbox(Limits(wall_seconds=30)), workers=2)

    def task(item, run):
        if item == 1:
            time.sleep(0.3)
            raise KeyboardInterrupt
        return run(Program("import time; time.sleep(30)"))

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        slow.map(task, [0, 1, 2, 3])
    assert time.monotonic() - start < 3 and not children()


@needs_bwrap
def test_the_sandbox_dies_with_a_killed_parent(marked):
    code = f"""
        import sys
        sys.path.insert(0, {str(ROOT)!r})
        from sdpo_trl.environments.sandbox import Limits, Program, Sandbox
        sandbox = Sandbox(Limits(wall_seconds=30), read_only=[{str(marked)!r}])
        print("ready", flush=True)
        sandbox.run(Program("import time; time.sleep(30)"))
    """

    with subprocess.Popen([sys.executable, "-c", text(code)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 5
        while not inside(marked) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert inside(marked)
        parent.kill()
    assert nothing_inside(marked)


def test_without_bubblewrap_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailable, match="apt-get install bubblewrap"):
        Sandbox()


def broken_bwrap(folder) -> str:
    fake = folder / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    for above in (folder, folder.parent, folder.parent.parent):
        above.chmod(0o755)  # as root, another user starts it
    return f"{folder}:/usr/bin:/bin"


def test_a_bubblewrap_that_cannot_work_is_found_at_the_start(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", broken_bwrap(tmp_path))
    with pytest.raises(SandboxUnavailable, match=r"No permissions to create new namespace.*user namespaces"):
        Sandbox()


@needs_bwrap
def test_a_sandbox_that_fails_later_says_nothing_about_the_program(sandbox, monkeypatch, tmp_path):
    """It is an error of the run, never a verdict: no program was started."""
    monkeypatch.setenv("PATH", broken_bwrap(tmp_path))
    with pytest.raises(SandboxError, match="could not start a program: bwrap: No permissions"):
        run(sandbox, "print(1)")


def test_unsafe_warns_and_still_limits(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "s3cr3t")
    with pytest.warns(UserWarning, match="without a sandbox"):
        plain = Sandbox(LIMITS, unsafe=True)
    assert run(plain, "import os; print(os.environ.get('HF_TOKEN'), open('x', 'w').write('y'))").stdout == "None 1\n"
    assert run(plain, "while True: pass").status == "time"
    assert run(plain, "x = bytearray(4 << 30)").status == "memory"
    assert run(plain, "while True: print('x' * 9999)").status == "output"
    assert run(plain, "def f(x): return 7 * x", function="f", arguments=[6]).stdout == '{"result": 42}'
    ended = run(plain, "import os, time\nif os.fork() == 0: time.sleep(30)\nprint('parent')")
    assert ended.status == "ok" and ended.stdout == "parent\n" and ended.seconds < 2
    assert not children()


@pytest.mark.parametrize("field", ["cpu_seconds", "wall_seconds", "memory_bytes", "tasks", "output_bytes"])
def test_limits_are_checked(field):
    with pytest.raises(ValueError, match=field):
        Limits(**{field: 0})


MIXTURE = [
    "print(42)",
    "raise ValueError",
    "import os; os._exit(3)",
    "open('/tmp/x', 'w').write('y' * 9999); print(1)",
    "import threading, time; threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
    "import os; os.kill(1, 9); os.abort()",
    "print('x' * 100_000)",
    "import os; os.close(1)",
]


def leave_nothing_behind(marked: Path, count: int) -> None:
    """`count` programs of eight kinds: afterwards no process, file, descriptor or memory more than before."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    pool = SandboxPool(Sandbox(LIMITS, read_only=[str(marked)]), workers=2)
    pool.run([Program(MIXTURE[i % len(MIXTURE)]) for i in range(40)])  # warm: threads' stacks, the allocator
    files, descriptors, memory = set(os.listdir("/tmp")), len(os.listdir("/proc/self/fd")), resident()
    for start in range(0, count, 100):
        kinds = [MIXTURE[i % len(MIXTURE)] for i in range(start, min(count, start + 100))]
        ended = pool.run([Program(kind) for kind in kinds])
        for kind, end in zip(kinds, ended, strict=True):
            assert end.status in ("ok", "error") and end.stdout == ("42\n" if "42" in kind else end.stdout)
    assert not children() and nothing_inside(marked)
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert not [name for name in set(os.listdir("/tmp")) - files if "sdpo" in name or name == "x"]
    assert resident() - memory < 24 << 20


@needs_bwrap
def test_two_hundred_programs_leave_nothing_behind(marked):
    leave_nothing_behind(marked, 200)


@needs_bwrap
@pytest.mark.slow
def test_ten_thousand_programs_leave_nothing_behind(marked):
    leave_nothing_behind(marked, 10_000)


def test_the_unsafe_warning_is_the_only_one():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Sandbox(LIMITS, unsafe=True)
    assert [str(w.message)[:30] for w in caught] == ["Programs run without a sandbox"]


@needs_bwrap
def test_processes_share_the_memory_where_they_are_allowed():
    sandbox = Sandbox(Limits(processes=4, wall_seconds=4, memory_bytes=512 << 20))
    code = """
        import os, subprocess, sys
        print(subprocess.run(["/bin/echo", "a child"], capture_output=True, text=True).stdout.strip())
        read, write = os.pipe()
        for _ in range(3):
            if os.fork() == 0:
                try:
                    kept = bytearray(120 << 20)
                    os.write(write, b"had ")
                except MemoryError:
                    os.write(write, b"refused ")
                os._exit(0)
        for _ in range(3):
            os.wait()
        print(os.read(read, 99).decode())
    """
    assert run(sandbox, code).stdout == "a child\nrefused refused refused \n"


@needs_bwrap
def test_a_crash_starts_no_handler_of_the_host_and_offers_itself_to_the_oom_killer(sandbox):
    code = """
        import resource
        print(resource.getrlimit(resource.RLIMIT_CORE), open("/proc/self/oom_score_adj").read().strip())
        import os; os.abort()
    """
    ended = run(sandbox, code)
    assert ended.status == "error" and (ended.exit_code < 0 or ended.exit_code > 128)
    flushed = run(sandbox, text(code).replace("import os; os.abort()", ""))
    assert flushed.stdout == "(1, 1) 1000\n"


@needs_bwrap
def test_of_the_interpreters_folder_only_what_it_needs_is_shown(sandbox):
    if Path(sandbox.python).is_relative_to("/usr"):
        pytest.skip("the interpreter is part of the system here")
    prefix = Path(sandbox.python).parent.parent
    shown = run(sandbox, f"import os; print(*os.listdir({str(prefix)!r}))").stdout.split()
    assert {"bin", "lib"} <= set(shown) <= {"bin", "lib", "lib64"}


@needs_bwrap
def test_a_huge_odd_output_is_read_quickly(sandbox):
    start = time.monotonic()
    verdict = judge("print(chr(0) * 4_000_000)", [CodeTest("", "x")], [], None, sandbox.run, stop_early=True)
    feedback = feedback_text(verdict, False)
    assert time.monotonic() - start < 3 and len(feedback) <= 1500 and "\\x00\\x00" in feedback
