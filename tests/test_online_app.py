"""What a person's keys do, and what they are shown before anything happens."""

import io
import json
import os
import random
import shutil
import signal
import unicodedata

import pytest
from jinja2.exceptions import TemplateError
from online_fakes import FakeSession, reply
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from sdpo_trl.online import terminal
from sdpo_trl.online.app import App
from sdpo_trl.online.desk import Changed, Desk, Look
from sdpo_trl.online.editing import EditError, calls_text, edit_calls, read_calls, run_editor
from sdpo_trl.online.records import Call, ContextTooLong, Observation

needs_bwrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is missing: apt-get install bubblewrap"
)
WRITE = Call("write_file", {"path": "notes.txt", "text": "gone\n"})
EDIT = Call("edit_lines", {"path": "notes.txt", "first": 2, "last": 2, "text": "TWO"})


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "notes.txt").write_text("one\ntwo\n")
    return tmp_path / "work"


def talk(folder, replies, typed, shell="none", editor=None, pending=None):
    """The app with these answers and this typing; what it printed, what was asked of the session, and its status."""
    desk = Desk(folder, shell)
    desk.session = FakeSession(replies, desk.functions())
    desk.session.pending = pending
    out = io.StringIO()
    screen = terminal.console(file=out, width=120)
    with create_pipe_input() as keys:
        keys.send_text(typed)
        options = {} if editor is None else {"editor": editor}
        app = App(desk, folder.parent / "saved", screen, title="t", input=keys, output=DummyOutput(), **options)
        status = app.run()
    lines = [line.rstrip(" ") for line in out.getvalue().split("\n")]
    return "\n".join(lines), desk.session.log, status


END = "\x04"  # Ctrl-D


def test_a_call_is_shown_with_its_diff_and_runs_after_a_yes(folder):
    shown, log, status = talk(folder, [reply("ok ", WRITE), reply("done")], f"tidy up\ry\ry\r{END}")
    assert status == 0
    assert log == [
        ("say", "tidy up"), "respond", "approve", "respond", "approve", ("save", str(folder.parent / "saved")),
    ]  # fmt: skip
    before, after = shown.split("tool reply")
    assert "tool call  write_file" in before and "-one\n" in before and "+gone" in before
    assert "Replaced all of notes.txt" in after and "done" in after
    assert (folder / "notes.txt").read_text() == "gone\n"


def test_nothing_runs_before_a_yes(folder):
    shown, log, _ = talk(folder, [reply("", WRITE)], f"tidy up\rmaybe\r\r/teacher\r{END}")
    assert (folder / "notes.txt").read_text() == "one\ntwo\n"
    assert "approve" not in log and "y: run it." in shown


@pytest.mark.parametrize("typed", ["n edit the line\r", "n\redit the line\r"])
def test_a_denial_is_learned_at_once_and_tried_again(folder, typed):
    shown, log, _ = talk(folder, [reply("", WRITE), reply("", EDIT), reply("fine")], f"tidy up\r{typed}y\r{END}")
    assert log[:8] == [
        ("say", "tidy up"), "respond", ("deny", "edit the line"), "learn", "retry", "respond", "approve", "respond",
    ]  # fmt: skip
    assert (folder / "notes.txt").read_text() == "one\nTWO\n"
    assert "learned: update 1, loss 0.5, 0.10 s" in shown
    assert "0.905" in shown and "0.082" in shown and "0.050" in shown  # before, after, teacher


def test_a_denial_can_be_thought_better_of(folder):
    shown, log, _ = talk(folder, [reply("", WRITE)], f"tidy up\rn\r\x03{END}")
    assert "nothing was denied" in shown and log[-1][0] == "save" and "learn" not in log


def test_what_a_person_makes_of_a_call_runs_and_is_learned(folder):
    def editor(text, suffix):
        assert suffix == ".yaml" and "path: notes.txt" in text
        return "name: edit_lines\narguments: {path: notes.txt, first: 2, last: 2, text: TWO}\n"

    shown, log, _ = talk(folder, [reply("", WRITE), reply("fine")], f"tidy up\re\ry\r{END}", editor=editor)
    assert log[2:5] == [("edited", EDIT), "learn", "respond"]
    assert "-two\n" in shown and "+TWO" in shown
    assert (folder / "notes.txt").read_text() == "one\nTWO\n"


def test_an_edited_call_can_be_dropped_again(folder):
    def editor(text, suffix):
        return "name: edit_lines\narguments: {path: notes.txt, first: 2, last: 2, text: TWO}\n"

    shown, log, _ = talk(folder, [reply("", WRITE), reply("fine")], f"tidy up\re\rn\ry\r{END}", editor=editor)
    assert "own waits again" in shown and log[2] == "approve"
    assert (folder / "notes.txt").read_text() == "gone\n"


def test_an_answer_in_words_can_be_edited_or_talked_over(folder):
    _, log, _ = talk(folder, [reply("so")], f"hm\re\ry\r{END}", editor=lambda text, suffix: "better\n")
    assert log[2:4] == [("edited", "better"), "learn"]
    _, log, _ = talk(folder, [reply("so"), reply("and")], f"hm\rgo on\r{END}")
    assert log[2:5] == ["approve", ("say", "go on"), "respond"]


def test_a_call_that_could_not_be_read_is_written_by_the_person(folder):
    def editor(text, suffix):
        assert suffix == ".yaml" and "# <tool_call>{\\x1b" in text
        return text.replace("name:", "name: edit_lines").replace(
            "arguments:", "arguments: {path: notes.txt, first: 2, last: 2, text: TWO}"
        )

    broken = reply("<tool_call>{\x1b", error="The tool call could not be read.")
    shown, log, _ = talk(folder, [broken, reply("fine")], f"x\re\ry\r{END}", editor=editor)
    assert "\nThe tool call could not be read." in shown
    assert log[2:4] == [("edited", EDIT), "learn"] and (folder / "notes.txt").read_text() == "one\nTWO\n"
    shown, log, _ = talk(folder, [broken], f"x\re\r{END}", editor=lambda text, suffix: text)
    assert "nothing was changed" in shown


def test_what_a_chat_template_refuses_is_told(folder):
    def refused(on_text):
        raise TemplateError("roles must alternate")

    shown, _, status = talk(folder, [refused], f"x\r{END}")
    assert "The chat template refuses the conversation: roles must alternate." in shown and status == 0


def test_a_broken_edit_is_told_and_changes_nothing(folder):
    for text, said in [
        ("a: [", "no YAML"), ("name: x\nextra: 1\n", "no others"), ("# only\n", "nothing was changed"),
        ("name: x\narguments: {at: 2020-01-01}\n", "`at` is no JSON value"), ("name: ''\n", "`name`"),
        ("[]", "list of calls"), ("name: x\narguments: [1]\n", "`arguments` should be a mapping"),
    ]:  # fmt: skip
        shown, log, _ = talk(folder, [reply("", WRITE)], f"x\re\r{END}", editor=lambda given, suffix, text=text: text)
        assert said in shown and log[2][0] == "save", text


def test_what_was_looked_at_is_what_runs(folder):
    desk = Desk(folder, "none")
    desk.session = FakeSession([], desk.functions())
    desk.session.pending = reply("", EDIT)
    seen = desk.looks([EDIT])
    (folder / "notes.txt").write_text("one\nother\n")
    with pytest.raises(Changed, match="Nothing ran"):
        desk.approve(seen)
    with pytest.raises(Changed):
        desk.approve_edited(seen)
    with pytest.raises(Changed):
        desk.approve([Look(WRITE)])  # another call
    assert (folder / "notes.txt").read_text() == "one\nother\n" and desk.session.log == []
    desk.approve(desk.looks([EDIT]))
    assert (folder / "notes.txt").read_text() == "one\nTWO\n"


def test_a_change_meanwhile_is_shown_again(folder):
    class Meddling(FakeSession):
        def respond(self, on_text=None):
            answer = super().respond(on_text)
            return answer

    def first(on_text):
        return reply("", EDIT)

    desk = Desk(folder, "none")
    desk.session = Meddling([first, reply("fine")], desk.functions())
    out = io.StringIO()
    app = App(desk, folder, terminal.console(file=out, width=100), input=None, output=DummyOutput())
    app.take("change it")
    (folder / "notes.txt").write_text("one\nother\n")
    with pytest.raises(Changed):
        app.take("y")
    assert "-other" in out.getvalue()
    app.take("y")
    assert (folder / "notes.txt").read_text() == "one\nTWO\n"


def test_nothing_of_a_command_is_left_out_and_all_of_a_diff_can_be_seen(folder):
    command = Call("shell", {"command": "\n".join(f"echo {i}" for i in range(200))})
    long = Call("write_file", {"path": "notes.txt", "text": "".join(f"line {i}\n" for i in range(200))})
    shown, _, _ = talk(folder, [reply("", command, long)], f"x\rv\r{END}")
    first, second = shown.split("y/n/e >")[0].split("tool call 1 of 2")[1:]
    for part in (first, second):
        assert all(f"echo {i}\n" in part for i in range(200))
    assert "more lines ..." in first and "+line 100\n" not in first
    assert "more lines ..." not in second and all(f"+line {i}\n" in second for i in range(200))


@needs_bwrap
def test_a_shell_runs_what_was_shown_and_nothing_else(folder):
    shell = Call("shell", {"command": "echo ran >> log.txt"})
    shown, _, _ = talk(folder, [reply("", shell), reply("", shell)], f"x\ry\r{END}", shell="sandbox")
    assert (folder / "log.txt").read_text() == "ran\n"  # the second one was not approved
    assert shown.count("command: echo ran >> log.txt") == 2
    desk = Desk(folder)
    run = {tool.__name__: tool for tool in desk.functions()}["shell"]
    desk.session = FakeSession([], desk.functions())
    with pytest.raises(ValueError, match="not approved"):  # whoever calls it otherwise
        run("echo sneaked >> log.txt")
    other = Call("shell", {"command": "echo other >> log.txt"})
    desk.session.pending = reply("", shell, other)

    def sneaky(command):
        return run("echo sneaked >> log.txt")

    desk.session.tools["shell"] = sneaky  # a session that would run something else than was shown
    seen = desk.approve(desk.looks([shell, other]))
    assert [one.ok for one in seen] == [False, False]
    assert (folder / "log.txt").read_text() == "ran\n"
    desk.session.tools["shell"] = run
    desk.session.pending = reply("", shell, other)
    assert [one.ok for one in desk.approve(desk.looks([shell, other]))] == [True, True]
    assert (folder / "log.txt").read_text() == "ran\nran\nother\n"


def test_ctrl_c_stops_the_answer_and_not_the_app(folder):
    def endless(on_text):
        for _ in range(10_000):
            on_text("a")
            os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("it was not stopped")

    before = signal.getsignal(signal.SIGINT)
    shown, log, status = talk(folder, [endless, reply("fine")], f"go\r\x03/retry\r{END}")
    assert "stopped" in shown and "fine" in shown and status == 0
    assert log == [("say", "go"), "respond", "respond", ("save", str(folder.parent / "saved"))]
    assert signal.getsignal(signal.SIGINT) == before


def test_commands(folder):
    def long(on_text):
        raise ContextTooLong("The conversation has 120 tokens.", 1, 120, 100)

    typed = "hi\ry\r/metrics\r/undo\r/history\r/clear\r/drop 3\r/drop x\r/save there\r/nothing\r/undo now\r/changes\r"
    typed += f"again\r/help\r/learn\r/retry\r{END}"
    shown, log, _ = talk(folder, [reply("hello"), long, reply("more")], typed)
    assert [entry for entry in log if entry not in ("respond", "approve")] == [
        ("say", "hi"), "undo", "clear", ("drop", 3), ("save", "there"), ("say", "again"), "learn",
        ("save", str(folder.parent / "saved")),
    ]  # fmt: skip
    for said in (
        "There is no update to take back.", "0 user      hi", "Say which turn", "There is no command /nothing.",
        "/undo takes nothing after it.", "`/drop 1` takes a turn out", "Ctrl-C stops", "Nothing was denied.",
    ):  # fmt: skip
        assert said in shown, said


def test_what_cannot_be_saved_is_told_before_one_leaves(folder, monkeypatch):
    def full(self, where):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FakeSession, "save", full)
    shown, log, status = talk(folder, [reply("hello")], f"{END}hi\r{END}{END}")
    assert shown.count("Not saved: [Errno 28] No space left on device.") == 2 and status == 1
    assert log == [("say", "hi"), "respond"]


def test_the_teacher_is_told_in_the_open(folder):
    shown, _, _ = talk(folder, [reply("", WRITE), reply("so")], f"x\rn edit the line\r/teacher\r{END}")
    told = shown[shown.index("teacher: ema") :]
    assert "correction: edit the line" in told


def test_a_session_goes_on_where_it_was_left(folder):
    shown, log, _ = talk(folder, [reply("fine")], f"y\r{END}", pending=reply("", WRITE))
    assert "goes on where it was left" in shown and "+gone" in shown and log[0] == "approve"


# What a terminal is spared

NASTY = (
    "\x1b[2J\x1b]0;owned\x07 \x9b31m [red]x[/red] :boom: \u202eevil\u2066 \r \x08 \u200b \ud800 \u2028 \U000e0041 é漢"
)


def test_all_that_a_model_or_a_tool_writes_is_escaped(folder):
    allowed = {"\n", "\t"}

    def safe(text):
        return all(c in allowed or unicodedata.category(c) not in terminal._HIDDEN for c in text)

    shown = terminal.plain(NASTY)
    assert safe(shown) and "\\x1b[2J" in shown and "\\u202eevil" in shown and "\\ud800" in shown and "é漢" in shown
    assert terminal.hidden(NASTY) and not terminal.hidden("é漢 a\n\tb")
    nasty = NASTY.replace("\ud800", "")
    calls = [
        Call("write_file", {"path": "notes.txt", "text": nasty}), Call(nasty, {nasty: nasty, "b": [nasty]}),
        Call("grep", {"pattern": nasty}),
    ]  # fmt: skip
    screens = io.StringIO()
    desk = Desk(folder, "none")
    desk.session = FakeSession([], desk.functions())
    screen = terminal.console(file=screens, width=100)
    for look in desk.looks(calls):
        screen.print(terminal.call_view(look.call, look.diff, look.problem, 1, 1))
    screen.print(terminal.observation_view(Observation(calls[0], NASTY, False)))
    screen.print(terminal.history_view([{"role": NASTY, "content": nasty, "tool_calls": [calls[0].function]}]))
    desk.session.pending = reply(NASTY, *calls)
    desk.session.deny(NASTY, solution=NASTY)
    screen.print(terminal.taught_view(desk.session.attempts))
    desk.session.learn(lambda progress: None)
    screen.print(terminal.changes_view(desk.session.changes()))
    assert safe(screens.getvalue()) and "[red]" in screens.getvalue() and ":boom:" in screens.getvalue()

    typed, _, _ = talk(folder, [reply(nasty, *calls)], f"x\r/teacher\r{END}")
    assert safe(typed) and "\\x1b[2J" in typed and "[red]x[/red] :boom:" in typed


def test_nothing_is_read_as_markup_in_a_real_terminal():
    """With colours on, the only escape sequences are colours of the app's own."""
    out = io.StringIO()
    screen = terminal.console(file=out, width=100, force_terminal=True, color_system="standard")
    screen.print(terminal.diff_view("--- a\n+++ b\n@@ -1 +1 @@\n-\x1b[2J[bold]\n+x  \n"))
    escapes = [part.partition("m")[0] for part in out.getvalue().split("\x1b[")[1:]]
    assert escapes and all(code.replace(";", "").isdigit() for code in escapes)
    assert "\x1b[7;31m\\x1b\x1b[0m\x1b[31m[2J[bold]" in out.getvalue() and "··" in out.getvalue()
    out.truncate(0)
    screen.print(terminal.text_of("\\x1b"))  # what only looks like an escaped character is not reversed
    assert "\x1b" not in out.getvalue()


def test_long_texts_are_cut_in_the_middle():
    assert terminal.cut([str(i) for i in range(100)], 8) == [
        "0",
        "1",
        "2",
        "3",
        "4",
        "[... 93 more lines ...]",
        "98",
        "99",
    ]
    assert terminal.cut(["a"] * 60) == ["a"] * 60
    assert terminal.cut(["a" * 1005]) == ["a" * 1000 + " [... 5 more characters ...]"]
    assert terminal.cut(["a" * 1005] * 90, None) == ["a" * 1005] * 90


# The editor


def test_calls_survive_the_editor():
    draw = random.Random(0)
    pieces = [
        "a",
        "\n",
        " ",
        "\t",
        "#",
        ":",
        "- ",
        "'",
        '"',
        "é",
        "\u202e",
        "\x1b",
        "|",
        "%",
        "no",
        "1",
        "\r",
        "\\",
        "\u2028",
        "漢",
    ]

    def text():
        return "".join(draw.choice(pieces) for _ in range(draw.randrange(8)))

    for _ in range(500):
        calls = [
            Call(
                draw.choice(["shell", text() or "x"]),
                {text() or "a": text(), "n": draw.choice([1, True, None, 1.5, ["x", text()]])},
            )
        ]
        shown = calls_text(calls)
        assert read_calls(shown) == calls
        assert not terminal.hidden(shown.replace("\n", ""))
    assert calls_text([Call("write_file", {"path": "a", "text": "one\ntwo\n"})]) == (
        "- name: write_file\n  arguments:\n    path: a\n    text: |\n      one\n      two\n"
    )


def test_an_editor_that_fails_is_told(monkeypatch, tmp_path):
    editor = tmp_path / "my editor"
    editor.write_text('#!/bin/sh\nsed -i s/gone/kept/ "$1"\n')
    editor.chmod(0o755)
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", f"'{editor}'")
    assert edit_calls([WRITE]) == [Call("write_file", {"path": "notes.txt", "text": "kept\n"})]
    monkeypatch.setenv("EDITOR", "true")
    assert edit_calls([WRITE]) is None
    for command, said in [("/no/such/editor", "did not work"), ("false", "status 1"), ("'", "did not work")]:
        monkeypatch.setenv("EDITOR", command)
        with pytest.raises(EditError, match=said):
            run_editor("x", ".md")


def test_arguments_that_are_no_object_are_shown(folder):
    desk = Desk(folder, "none")
    desk.session = FakeSession([], desk.functions())
    call = Call("write_file", ["a"])
    assert "no object" in desk.look(call).problem
    assert "no tool" in desk.look(Call("fly", {})).problem
    out = io.StringIO()
    terminal.console(file=out, width=100).print(terminal.call_view(call, None, "x", 1, 2))
    assert json.dumps(["a"]) in out.getvalue() and "1 of 2" in out.getvalue()
