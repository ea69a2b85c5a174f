"""Tools that stay in their folder whatever they are asked, and say what to do instead."""

import ctypes
import os
import shutil
import socket
import threading
import time

import psutil
import pytest

from sdpo_trl.environments import SandboxUnavailable
from sdpo_trl.online.paths import WorkspaceError
from sdpo_trl.online.shell import Approval, Shell
from sdpo_trl.online.tools import WorkspaceTools, workspace_tools
from sdpo_trl.online.workspace import Workspace

needs_bwrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is missing: apt-get install bubblewrap"
)
C = ctypes.CDLL(None)
SECRET = "the secret of the folder above"


@pytest.fixture
def place(tmp_path):
    """A working folder with every kind of way out of it, and what lies outside."""
    outside, inside = tmp_path / "outside", tmp_path / "work"
    (outside / "deep").mkdir(parents=True)
    (outside / "secret.txt").write_text(SECRET)
    (outside / "deep" / "secret.txt").write_text(SECRET)
    (inside / "sub").mkdir(parents=True)
    (inside / "sub" / "a.txt").write_text("one\ntwo\nthree\n")
    (inside / "link.txt").symlink_to(outside / "secret.txt")
    (inside / "relative.txt").symlink_to("../outside/secret.txt")
    (inside / "linked").symlink_to(outside)
    (inside / "sub" / "up").symlink_to("../../outside")
    (inside / "chain").symlink_to("linked")
    (inside / "loop").symlink_to("loop")
    (inside / "dangling").symlink_to(outside / "made.txt")
    (inside / "self").symlink_to(".")
    (inside / "root").symlink_to("/")
    os.mkfifo(inside / "pipe")
    server = socket.socket(socket.AF_UNIX)
    folder = os.open(inside, os.O_RDONLY)  # a socket's address has few characters
    server.bind(f"/proc/self/fd/{folder}/socket")
    os.close(folder)
    yield inside
    server.close()


def outside_of(place):
    """All that lies outside, with its content."""
    folder = place.parent / "outside"
    return {str(path): path.read_text() if path.is_file() else "" for path in sorted(folder.rglob("*"))}


ATTACKS = {
    "parent": "../outside/secret.txt",
    "parent in the middle": "sub/../../outside/secret.txt",
    "parent after a dot": "./../outside/secret.txt",
    "only a parent": "..",
    "parent at the end": "sub/..",
    "absolute": "{outside}/secret.txt",
    "two slashes": "/{outside}/secret.txt",
    "absolute into the folder": "{inside}/sub/a.txt",
    "link to a file": "link.txt",
    "relative link": "relative.txt",
    "link to a folder": "linked/secret.txt",
    "link in a folder": "sub/up/secret.txt",
    "link to a link": "chain/deep/secret.txt",
    "link to itself": "loop",
    "link to nothing": "dangling",
    "link to the folder": "self/sub/a.txt",
    "link to the root": "root/etc/passwd",
    "through a process": "root/proc/self/cwd/x",
    "new file behind a link": "linked/new.txt",
    "new folder behind a link": "linked/new/new.txt",
    "pipe": "pipe",
    "socket": "socket",
    "file as a folder": "sub/a.txt/b",
    "NUL": "sub/a.txt\0.png",
    "line feed": "sub/a\n.txt",
    "escape": "\x1b[2Jx",
    "lone surrogate": "\ud800",
    "line separator": "a\u2028b",
    "home": "~/x",
    "home of another": "~root/x",
    "backslashes": "..\\outside\\secret.txt",
    "empty": "",
    "the folder": ".",
    "a folder": "sub",
    "slash at the end": "sub/new.txt/",
    "long name": "x" * 300,
    "long path": "a/" * 100 + "b",
    "git": ".git/hooks/pre-commit",
    "git in capitals": "sub/.GIT/config",
}
PATH_TOOLS = {
    "read_file": {},
    "write_file": {"text": "owned"},
    "edit_file": {"old": "secret", "new": "owned"},
    "edit_lines": {"first": 1, "last": 1, "text": "owned"},
}


def functions(place, **options):
    return {tool.__name__: tool for tool in workspace_tools(place, **options)}


def quickly(call):
    """What it gives or raises, within seconds: a pipe would block."""
    got = []

    def run():
        try:
            got.append(call())
        except BaseException as error:
            got.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(5)
    assert got, "it hangs"
    return got[0]


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("tool", PATH_TOOLS)
def test_no_path_leads_outside(place, tool, attack):
    before, listed = outside_of(place), sorted(os.listdir(place.parent))
    path = ATTACKS[attack].format(outside=place.parent / "outside", inside=place)
    arguments = {"path": path, **PATH_TOOLS[tool]}
    got = quickly(lambda: functions(place)[tool](**arguments))
    assert isinstance(got, WorkspaceError), got
    assert " Hint: " in str(got) and SECRET not in str(got) and len(str(got)) < 1500
    str(got).encode()  # it can be shown, and told to a model
    preview = quickly(lambda: WorkspaceTools(place).preview({"name": tool, "arguments": arguments}))
    if tool != "read_file":
        assert isinstance(preview, WorkspaceError) or (tool == "write_file" and "git" in attack)
    assert outside_of(place) == before and sorted(os.listdir(place.parent)) == listed
    assert (place / "sub" / "a.txt").read_text() == "one\ntwo\nthree\n"
    assert not [name for name in os.listdir(place) if name.endswith(".tmp")]


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("tool", ["glob", "grep"])
@pytest.mark.parametrize("tail", ["", "/*", "/**"])
def test_no_pattern_leads_outside(place, tool, attack, tail):
    before = outside_of(place)
    pattern = ATTACKS[attack].format(outside=place.parent / "outside", inside=place) + tail
    tools = functions(place)
    got = quickly(lambda: tools["glob"](pattern) if tool == "glob" else tools["grep"](".", pattern))
    assert isinstance(got, (str, WorkspaceError))
    assert SECRET not in str(got) and "secret.txt" not in str(got).replace(pattern, "").replace(repr(pattern), "")
    if isinstance(got, WorkspaceError):
        assert " Hint: " in str(got)
    assert outside_of(place) == before


def test_listing_and_searching_all_follow_no_link(place):
    tools = functions(place)
    listed = tools["glob"]("**").split("\n")
    assert "sub/" in listed and "sub/a.txt" in listed and "linked  (a symbolic link, not followed)" in listed
    assert "pipe  (a pipe, not followed)" in listed
    assert not [
        line for line in listed if "secret" in line or line.startswith(("linked/", "self/", "root/", "chain/"))
    ]
    assert tools["grep"](".") == "sub/a.txt:1: one\nsub/a.txt:2: two\nsub/a.txt:3: three"


SHELL_ATTACKS = [
    "cat ../outside/secret.txt", "cat {outside}/secret.txt", "cat link.txt", "cat linked/deep/secret.txt",
    "echo owned > ../outside/secret.txt", "echo owned > {outside}/new.txt", "echo owned > link.txt",
    "echo owned > dangling", "rm -rf ../outside linked/ {outside}", "mv sub ..", "ln sub/a.txt ../outside/hard",
    "cp -r linked copy; cat copy/*", "cat /proc/1/root{outside}/secret.txt", "ls /proc/*/cwd/../outside",
    "umount -l {inside}; cat {outside}/secret.txt", "mount --bind / sub && cat sub{outside}/secret.txt",
    "unshare -r cat {outside}/secret.txt", "nsenter -t 1 -m cat {outside}/secret.txt", "chroot /proc/1/root ls",
    "python3 -c \"open('{outside}/new.txt', 'w')\"", "cat /etc/shadow", "echo x > /usr/owned", "echo x > /owned",
]  # fmt: skip


@needs_bwrap
@pytest.mark.parametrize("attack", SHELL_ATTACKS)
def test_an_approved_command_stays_in_the_folder(place, attack):
    before, listed = outside_of(place), sorted(os.listdir(place.parent))
    command = attack.format(outside=place.parent / "outside", inside=place)
    try:
        got = functions(place, approve=lambda text: True)["shell"](command, seconds=5)
    except WorkspaceError as error:
        got = str(error)
        assert " Hint: " in got
    assert SECRET not in got and "root:x" not in got
    assert outside_of(place) == before and sorted(os.listdir(place.parent)) == listed
    assert not os.path.exists("/usr/owned") and not os.path.exists("/owned")


@needs_bwrap
def test_a_command_writes_in_the_folder_and_knows_nothing_of_the_host(place, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    shell = functions(place, approve=lambda text: True)["shell"]
    assert shell("echo new > sub/b.txt; cat sub/a.txt; env; echo $((6 * 7))").endswith("42")
    assert (place / "sub" / "b.txt").read_text() == "new\n"
    assert "hf_secret" not in shell("env; cat /proc/*/environ | tr '\\0' '\\n'")
    assert shell("cat") == "(no output)"  # nothing waits for an input that nobody types
    with pytest.raises(WorkspaceError, match=r"^out\nerr\nExit status 3\. Hint:"):
        shell("echo out; echo err >&2; exit 3")


def processes() -> str:
    return "\n".join(" ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"]))


@needs_bwrap
def test_limits_end_a_command_and_all_that_it_started(place):
    shell = functions(place, approve=lambda text: True)["shell"]
    start = time.monotonic()
    with pytest.raises(WorkspaceError, match=r"^begun\nIt was killed after 1 seconds. Hint:"):
        shell("echo begun; sleep 61.5 & sleep 61.5", seconds=1)
    assert time.monotonic() - start < 4
    with pytest.raises(WorkspaceError, match="more than 1048576 bytes") as caught:
        shell("yes", seconds=20)
    assert len(str(caught.value)) < 17_000
    assert "sleep 61.5" not in processes()
    shell("sleep 62.5 > /dev/null 2>&1 &")
    assert "sleep 62.5" not in processes()


@needs_bwrap
def test_no_command_runs_without_a_yes_of_its_own(place):
    approval = Approval()
    shell = functions(place, approve=approval)["shell"]
    command = "echo ran >> sub/ran.txt"

    def refused(text=command):
        with pytest.raises(WorkspaceError, match=r"not approved, and nothing ran\. Hint:"):
            shell(text)

    refused()
    with approval.granting(command):
        refused("echo other")  # which also uses the yes up
        refused()
    with approval.granting():
        refused()
    with approval.granting("true", command):
        refused()  # out of order
    with approval.granting(command):
        shell(command)
        refused()
    refused()
    assert (place / "sub" / "ran.txt").read_text() == "ran\n"
    for answer in (False, None, 1, "yes"):  # a yes is `True`
        with pytest.raises(WorkspaceError, match="not approved"):
            functions(place, approve=lambda text, answer=answer: answer)["shell"](command)
    assert (place / "sub" / "ran.txt").read_text() == "ran\n"
    assert "shell" not in functions(place)


@needs_bwrap
def test_a_command_can_be_stopped(place):
    shell = Shell(Workspace(place), lambda text: True)
    threading.Timer(0.3, shell.stop).start()
    start = time.monotonic()
    with pytest.raises(WorkspaceError, match=r"^begun\nIt was stopped\. Hint:"):
        shell.run("echo begun; sleep 20", 20, 1000)
    assert time.monotonic() - start < 5
    assert shell.run("echo next", 20, 1000) == "next"
    shell.stop()  # just before it starts
    with pytest.raises(WorkspaceError, match="It was stopped"):
        shell.run("sleep 20", 20, 1000)
    shell.stop()
    shell.ready()
    assert shell.run("echo next", 20, 1000) == "next"


def test_without_bubblewrap_a_shell_is_refused_or_asked_for_as_unsafe(place, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SandboxUnavailable, match="apt-get install bubblewrap"):
        workspace_tools(place, approve=lambda text: True)
    with pytest.warns(UserWarning, match="without a sandbox"):
        shell = Shell(Workspace(place), lambda text: text == "pwd", unsafe=True)
    assert shell.run("pwd", 5, 1000) == str(place)
    with pytest.raises(WorkspaceError, match="not approved"):
        shell.run("ls", 5, 1000)
    with pytest.raises(ValueError, match="no effect"):
        workspace_tools(place, unsafe_shell=True)


@pytest.mark.parametrize("tool", PATH_TOOLS)
def test_a_link_made_between_check_and_use_leads_nowhere(place, tool):
    """Somebody swaps a folder, and a file, with links to outside, again and again."""
    before = outside_of(place)
    real, decoy = place / "spot", place / "decoy"
    real.mkdir()
    (real / "secret.txt").write_text("harmless secret")
    decoy.symlink_to(place.parent / "outside")
    stop = threading.Event()

    def swap():
        exchange = 2  # RENAME_EXCHANGE: there is always one of the two
        while not stop.is_set():
            assert C.renameat2(-100, os.fsencode(real), -100, os.fsencode(decoy), exchange) == 0

    thread = threading.Thread(target=swap)
    thread.start()
    call, seen = functions(place)[tool], set()
    arguments = {"path": "spot/secret.txt", **PATH_TOOLS[tool]}
    if tool == "edit_file":
        arguments |= {"old": "harmless", "new": "harmless "}
    try:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and len(seen) < 2:
            for _ in range(50):
                try:
                    got = call(**arguments)
                    seen.add("done")
                except WorkspaceError as error:
                    got = str(error)
                    seen.add("refused")
                assert SECRET not in got
    finally:
        stop.set()
        thread.join()
    assert seen == {"done", "refused"}  # the swap was met, and it was not only met
    assert outside_of(place) == before


def test_a_file_that_becomes_a_link_or_a_pipe_is_not_opened(place, monkeypatch):
    """The same, made certain: the swap happens right after the check."""
    tools = WorkspaceTools(place)
    victim = place / "sub" / "a.txt"
    real_stat = os.stat

    def swap_after(kind):
        def stat(name, *args, **kwargs):
            found = real_stat(name, *args, **kwargs)
            if name == "a.txt":
                victim.unlink()
                os.mkfifo(victim) if kind == "pipe" else victim.symlink_to(place.parent / "outside" / "secret.txt")
            return found

        return stat

    for kind in ("link", "pipe"):
        victim.unlink(missing_ok=True)
        victim.write_text("one\n")
        monkeypatch.setattr(os, "stat", swap_after(kind))
        got = quickly(lambda: tools.read_file("sub/a.txt"))
        monkeypatch.setattr(os, "stat", real_stat)
        assert isinstance(got, WorkspaceError) and SECRET not in str(got)
    victim.unlink()
    victim.write_text("one\n")
    monkeypatch.setattr(os, "stat", swap_after("link"))
    tools.workspace.write("sub/a.txt", b"mine")  # the link is replaced, not followed
    monkeypatch.setattr(os, "stat", real_stat)
    assert not victim.is_symlink() and victim.read_text() == "mine"
    assert (place.parent / "outside" / "secret.txt").read_text() == SECRET


def test_a_second_name_of_an_outside_file_is_not_written_through(place):
    os.link(place.parent / "outside" / "secret.txt", place / "hard.txt")
    functions(place)["write_file"]("hard.txt", "mine")
    assert (place / "hard.txt").read_text() == "mine"
    assert (place.parent / "outside" / "secret.txt").read_text() == SECRET


@needs_bwrap
def test_what_the_session_keeps_is_closed_to_its_tools(place):
    (place / "runs" / "own").mkdir(parents=True)
    (place / "runs" / "own" / "journal").write_text(SECRET)
    workspace = Workspace(place, closed=["runs/own"])
    tools = {
        tool.__name__: tool for tool in WorkspaceTools(workspace, Shell(workspace, lambda text: True)).functions()
    }
    for tool, more in PATH_TOOLS.items():
        for path in ("runs/own/journal", "./runs//own/journal", "runs/own/new"):
            with pytest.raises(WorkspaceError, match="of the session's own files"):
                tools[tool](path=path, **more)
    assert "own" not in tools["glob"]("**") and "runs/" in tools["glob"]("**")
    assert tools["grep"]("secret", "**").startswith("No line") and tools["grep"]("secret", "runs/own/*")[:2] == "No"
    assert tools["shell"]("ls runs/own; ls runs") == "own"
    with pytest.raises(WorkspaceError, match="Read-only"):
        tools["shell"]("rm -r runs/own/journal; echo x > runs/own/journal")
    assert (place / "runs" / "own" / "journal").read_text() == SECRET


def test_only_a_folder_can_be_worked_in(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError):
        workspace_tools(tmp_path / "missing")
    with pytest.raises(NotADirectoryError):
        workspace_tools(tmp_path / "file")
    with pytest.raises(ValueError, match="whole file system"):
        workspace_tools("/")
