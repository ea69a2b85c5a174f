"""What a person looked at is what runs, and what they see is what is there."""

import contextlib
import io
import shutil

import pytest
import torch
from jinja2.exceptions import TemplateError
from online_fakes import FakeSession, reply

from sdpo_trl.online import shell as shell_module
from sdpo_trl.online import workspace as workspace_module
from sdpo_trl.online.desk import Desk
from sdpo_trl.online.editing import EditError, edit_calls, read_calls
from sdpo_trl.online.paths import WorkspaceError
from sdpo_trl.online.play import Player
from sdpo_trl.online.records import Call, SessionError
from sdpo_trl.online.script import Script, Step
from sdpo_trl.online.talk import Stopped, Talk
from sdpo_trl.online.terminal import call_view, console, plain
from sdpo_trl.online.tools import WorkspaceTools

WRITE = Call("write_file", {"path": "a.txt", "text": "p\nq\nr\n"})
EDIT = Call("edit_lines", {"path": "./a.txt", "first": 2, "last": 2, "text": "X"})


@pytest.fixture
def place(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    return tmp_path


def waiting(place, *calls, shell="none"):
    desk = Desk(place, shell)
    desk.session = FakeSession([], desk.functions())
    desk.session.pending = reply("", *calls)
    return desk, desk.looks(calls)


def test_a_later_call_is_shown_as_it_will_be_after_the_earlier_ones(place):
    replace = Call("edit_file", {"path": "a.txt", "old": "X", "new": "Y"})
    again = Call("write_file", {"path": "a.txt", "text": "new\n"})
    desk, looks = waiting(place, WRITE, EDIT, replace, again)
    assert [look.problem for look in looks] == [None] * 4
    assert "-q\n+X" in looks[1].diff and "-X\n+Y" in looks[2].diff and "-Y" in looks[3].diff
    assert all(seen.ok for seen in desk.approve(looks))
    assert (place / "a.txt").read_text() == "new\n"


def test_looking_leaves_nothing_behind(place):
    desk, _ = waiting(place, WRITE, EDIT)
    assert "-two" in desk.look(EDIT).diff


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_a_command_cannot_make_a_later_change_another_one(place):
    swap = Call("shell", {"command": "printf 'rm\\ntwo\\n' > a.txt; echo made > late.txt"})
    late = Call("edit_file", {"path": "late.txt", "old": "made", "new": "Y"})  # would fail: there is none yet
    desk, looks = waiting(place, swap, EDIT, late, shell="sandbox")
    assert looks[2].problem is not None
    seen = desk.approve(looks)
    assert [one.ok for one in seen] == [True, False, False]
    assert "not as it was when this change was shown" in seen[1].text and "not as it was" in seen[2].text
    assert (place / "a.txt").read_text() == "rm\ntwo\n" and (place / "late.txt").read_text() == "made\n"
    desk.session.pending = reply("", EDIT)  # the next approval is by itself
    assert desk.approve(desk.looks([EDIT]))[0].ok


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_a_command_that_cannot_start_takes_no_other_s_approval(place):
    bad = Call("shell", {"command": "echo one", "seconds": 0})
    good = Call("shell", {"command": "echo two"})
    desk, looks = waiting(place, bad, good, shell="sandbox")
    assert "`seconds` is 0" in looks[0].problem and looks[1].problem is None
    assert [(one.ok, one.text.startswith("two")) for one in desk.approve(looks)] == [(False, False), (True, True)]


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
@pytest.mark.parametrize("unsafe", [False, True])
def test_a_folder_that_was_put_in_the_place_of_the_working_folder_gets_no_command(tmp_path, unsafe):
    (tmp_path / "work").mkdir()
    with pytest.warns(UserWarning) if unsafe else contextlib.nullcontext():
        shell = shell_module.Shell(workspace_module.Workspace(tmp_path / "work"), lambda command: True, unsafe=unsafe)
    (tmp_path / "work").rename(tmp_path / "moved")
    for make in (lambda path: None, lambda path: path.mkdir(), lambda path: path.symlink_to(tmp_path / "moved")):
        make(tmp_path / "work")
        with pytest.raises(WorkspaceError, match="not at"):
            shell.run("touch here", 10, 100)
        if (tmp_path / "work").is_dir() and not (tmp_path / "work").is_symlink():
            (tmp_path / "work").rmdir()
    assert not list(tmp_path.rglob("here"))


def test_a_file_that_cannot_be_opened_ends_no_search(place, monkeypatch):
    (place / "b.txt").write_text("two\n")
    real = workspace_module.Workspace.open_file

    def locked(folder, name, path):
        if name == "a.txt":
            raise WorkspaceError("`a.txt`: Permission denied.", "ask the user.")
        return real(folder, name, path)

    monkeypatch.setattr(workspace_module.Workspace, "open_file", staticmethod(locked))
    assert WorkspaceTools(place).grep("two") == (
        "b.txt:1: two\n[1 binary, very large or unreadable files were not searched]"
    )


@pytest.mark.parametrize(
    "character",
    ["\u3164", "\u115f", "\uffa0", "\u034f", "\ufe0f", "\U000e0100", "\u17b4", "\u2800", "\u00a0", "\u2003", "\u00ad"],
)
def test_what_cannot_be_seen_is_escaped(character):
    assert plain(f"rm{character}x").isascii()
    assert plain("日本　語 é ß → 👍 नमस्ते") == "日本　語 é ß → 👍 नमस्ते"


def test_a_name_stays_in_its_line():
    screen = console(width=80, record=True, force_terminal=False)
    screen.print(call_view(Call("ls\n  command: a", {"x\n  command": "b", "y\tz": 1}), None, "no", 1, 1))
    assert [line.rstrip() for line in screen.export_text().splitlines()] == [
        "tool call  ls\\x0a  command: a", "  x\\x0a  command: b", "  y\\x09z: 1", "  would fail: no",
    ]  # fmt: skip


@pytest.mark.parametrize(("before", "after"), [(2.0, 2), (True, 1), (0, False), (1, 1.0)])
def test_a_number_of_another_kind_is_a_change(before, after):
    written = {True: "true", False: "false"}
    texts = [written[v] if isinstance(v, bool) else str(v) for v in (before, after)]
    changed = edit_calls([Call("x", {"first": before})], lambda text, suffix: text.replace(*texts))
    assert changed is not None and type(changed[0].arguments["first"]) is type(after)


@pytest.mark.parametrize("text", ["- &a {name: x, arguments: *a}", "a: " + "[" * 3000])
def test_what_has_no_end_is_no_call(text):
    with pytest.raises(EditError):
        read_calls(text)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TemplateError("no two users in a row"), "NOT POSSIBLE at step 1 (say): the chat template refuses"),
        (torch.OutOfMemoryError("none left"), "NOT POSSIBLE at step 1 (say): out of memory"),
        (Stopped(), "STOPPED at step 1 (say)"),
    ],
)
def test_a_script_ends_with_a_line_whatever_an_answer_meets(place, error, said):
    def answer(on_text):
        raise error

    desk = Desk(place, "none")
    desk.session = FakeSession([answer])
    out = io.StringIO()
    assert Player(desk, console(file=out, width=120)).play(Script([Step("step 1 (say)", "say", "hi")])) == 1
    assert said in out.getvalue()


def test_a_person_s_version_waits_where_no_answer_was_possible(place):
    def pending_already(on_text=None):
        raise SessionError("An answer is pending.")

    desk, _ = waiting(place, WRITE)
    talk = Talk(desk, console(file=io.StringIO()))
    talk.show(desk.session.pending)
    talk.edited = desk.looks([EDIT])
    with pytest.raises(SessionError):
        talk.respond(pending_already)
    talk.approve()
    assert (place / "a.txt").read_text() == "one\nX\n"  # as it was shown last


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
@pytest.mark.parametrize("closed", ["runs/online", "runs/all/online", "kept"])
def test_what_the_session_keeps_cannot_be_moved_out_of_the_way(place, closed):
    kept = place / closed
    kept.mkdir(parents=True)
    (kept / "journal.jsonl").write_text("secret")
    top = closed.split("/")[0]
    workspace = workspace_module.Workspace(place, [closed])
    shell = shell_module.Shell(workspace, lambda command: True)
    with contextlib.suppress(WorkspaceError):
        shell.run(f"mv {top} moved; mv {closed} moved; mv {closed.rpartition('/')[0] or '.'} moved2", 10, 1000)
    assert (kept / "journal.jsonl").read_text() == "secret"
    for command in ("cat $(find . -name journal.jsonl)", "find . -name journal.jsonl -delete; find ."):
        with contextlib.suppress(WorkspaceError):
            assert "secret" not in shell.run(command, 10, 1000)
    assert (kept / "journal.jsonl").read_text() == "secret"
    shell.run(f"touch {top}.txt; mkdir -p {top}.d", 10, 1000)  # and the rest can be written
    if "/" in closed:
        shell.run(f"echo mine > {top}/mine", 10, 1000)
        assert (place / top / "mine").read_text() == "mine\n"
