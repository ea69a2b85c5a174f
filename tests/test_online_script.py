"""Sessions played from a file: what a script may say, and what comes of it with a real model."""

import io
import math
import sys
from pathlib import Path

import online_model
import pytest
from conftest import ROOT
from online_fakes import FakeSession, reply

from sdpo_trl.online import OnlineSession, terminal
from sdpo_trl.online.__main__ import main
from sdpo_trl.online.desk import Desk
from sdpo_trl.online.play import Player
from sdpo_trl.online.records import Call
from sdpo_trl.online.script import ScriptError, load_script
from sdpo_trl.online.talk import Stopped, Talk


@pytest.fixture
def work(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "notes.txt").write_text("one\ntwo\nthree\n")
    return tmp_path / "work"


def write(folder: Path, text: str) -> str:
    (folder / "session.yaml").write_text(text)
    return str(folder / "session.yaml")


# What a script may say

WRONG = {
    "steps: {": "is no YAML: while parsing",
    "[]": "needs a key `steps`",
    "about: x": "needs a key `steps`",
    "steps: []": "steps: there should be a list of steps",
    "steps: [say: a]\ntitle: x": "unknown key `title`; known are steps, about, system, config",
    "steps: [say: a]\nconfig: [x]": "`config` should be a mapping",
    "steps: [say: a]\nsystem: 5": "`system` should be text",
    "steps: [say: a]\nsteps: [say: b]": "line 2: the key `steps` stands twice",
    "steps: [shout: a]": "step 1: there is no step `shout`; there are approve, changes,",
    "steps: [say: a, {say: b, deny: c}]": "step 2: a step is one word or one `word: value`",
    "steps: [5]": "step 1: a step is one word",
    "steps: [say: a, approve: yes]": "step 2 (approve): it takes no value",
    "steps: [say: 5]": "step 1 (say) should be text (in quotes, if it looks like a number or a date)",
    "steps: [say: ' ']": "step 1 (say) is blank",
    "steps: [say]": "step 1 (say) should be text",
    "steps: [deny: {reason: x}]": "step 1 (deny): unknown key `reason`; known are feedback, solution,",
    "steps: [deny: {}]": "step 1 (deny) is empty",
    "steps: [deny: {feedback: [x]}]": "step 1 (deny): `feedback` should be text",
    "steps: [expect: {tol: x}]": "step 1 (expect): unknown key `tol`; known are tool,",
    "steps: [expect: {pending: 1}]": "step 1 (expect): `pending` should be true or false",
    "steps: [expect: {updates: -1}]": "step 1 (expect): `updates` should be a whole number",
    "steps: [expect: {matches: '('}]": "step 1 (expect): `matches` is no regular expression",
    "steps: [expect: {metrics: {loss: {above: 1}}}]": "`metrics`: `loss`: unknown key `above`; known are at_least,",
    "steps: [expect: {probability: {at_least: 1}}]": "`probability`: the key `of` is missing",
    "steps: [expect: {probability: {of: x, at_least: y}}]": "`at_least` should be a number",
    "steps: [expect: {file: {text: x}}]": "`file`: the key `path` is missing",
    "steps: [edit: {name: x, arg: y}]": "step 1 (edit): it needs the keys `name` and `arguments`",
    "steps: [edit: []]": "step 1 (edit) should be a text or a call",
    "steps: [drop: x]": "step 1 (drop) should be a whole number",
    "steps: [file: {path: a}]": "step 1 (file): the key `text` is missing",
    "steps: [repeat: {at_most: 2, steps: [learn]}]": "step 1 (repeat): the key `until` is missing",
    "steps: [repeat: {at_most: 2, until: {tool: x}, steps: [lern]}]": "step 1 (repeat), step 1: there is no step",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_named_with_its_step_and_key(tmp_path, text, capsys):
    path = write(tmp_path, text)
    with pytest.raises(ScriptError) as caught:
        load_script(path)
    assert WRONG[text] in str(caught.value)
    assert main(["--model", "unused", "--script", path]) == 2  # before anything is loaded
    assert WRONG[text] in capsys.readouterr().err


def test_the_example_can_be_read():
    script = load_script(ROOT / "examples" / "online_session.yaml")
    assert [step.name for step in script.steps] == ["file", "say", "repeat", "approve", "expect", "metrics"]
    assert script.config["learning_rate"] == 0.003


def test_a_script_that_is_not_there(tmp_path, capsys):
    assert main(["--model", "unused", "--script", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err


# What is played

WRITE = Call("write_file", {"path": "notes.txt", "text": "gone\n"})


def play(work, replies, text):
    """Exit status, transcript and what was asked of the session."""
    desk = Desk(work, "none")
    desk.session = FakeSession(replies, desk.functions())
    out = io.StringIO()
    player = Player(desk, terminal.console(file=out, width=200))
    return player.play(load_script(write(work.parent, text))), out.getvalue(), desk.session.log


def test_each_step_does_what_the_app_does(work):
    status, shown, log = play(
        work,
        [reply("a", WRITE), reply("b", WRITE), reply("c"), reply("d")],
        """
steps:
  - say: tidy up
  - expect: {tool: write_file, arguments: {path: notes.txt}, text: a, not_text: x, matches: "^a$", error: false}
  - deny: {feedback: no, solution: {name: grep, arguments: {pattern: x}}, environment_feedback: it broke}
  - learn
  - changes
  - teacher
  - retry
  - approve
  - expect: {observation: Replaced all of, observation_ok: true, file: {path: notes.txt, text: "gone\\n"}, updates: 1}
  - expect: {metrics: {loss: {at_least: 0.4, at_most: 0.6}}, probability: {of: {name: x}, at_least: 0.4}}
  - respond
  - expect: {tool: null, pending: true}
  - edit: better
  - undo
  - say: more
  - metrics
  - history
  - save: there
  - clear
  - drop: 0
  - file: {path: sub/new.txt, text: ""}
  - expect: {file: {path: sub/new.txt, text: ""}, pending: false}
""".replace("feedback: no,", "feedback: 'no',"),
    )  # fmt: skip
    assert status == 0, shown
    assert log == [
        ("say", "tidy up"), "respond",
        ("deny", "no", {"solution": Call("grep", {"pattern": "x"}), "environment_feedback": "it broke"}),
        "learn", "retry", "respond", "approve", ("score", Call("x", {})), "respond", ("edited", "better"), "undo",
        ("say", "more"), "respond", ("save", "there"), "clear", ("drop", 0),
    ]  # fmt: skip
    assert "probability 0.5000" in shown and "--- step 13 (edit)" in shown


UNMET = {
    "tool: grep": "`tool`: wanted grep, got write_file",
    "tool: null": "`tool`: wanted an answer without a call, got write_file",
    "arguments: {path: other}": "`arguments`: wanted path to be 'other', got 'notes.txt'",
    "arguments: {mode: x}": "wanted mode to be 'x', got None",
    "text: b": "`text`: 'b' is not in 'a'",
    "not_text: a": "`not_text`: 'a' is in 'a'",
    "matches: '^b'": "`matches`: '^b' does not match 'a'",
    "error: true": "`error`: the error is None",
    "truncated: true": "`truncated`: it is False",
    "pending: false": "`pending`: an answer is pending",
    "observation: x": "`observation`: 'x' is not in ''",
    "observation_ok: true": "`observation_ok`: no tool has run",
    "updates: 1": "`updates`: there are 0",
    "metrics: {loss: {at_most: 1}}": "`metrics`: there was no update",
    "file: {path: notes.txt, text: x}": "`file`: notes.txt holds 'one\\ntwo\\nthree\\n'",
    "file: {path: notes.txt, contains: x}": "'x' is not in notes.txt",
    "file: {path: notes.txt, exists: false}": "notes.txt exists",
    "file: {path: b.txt}": "b.txt does not exist",
    "probability: {of: x, at_most: 0.4}": "`probability`: is 0.5, above 0.4",
    "probability: {of: x, at_least: 0.6}": "`probability`: is 0.5, below 0.6",
}


@pytest.mark.parametrize("expected", UNMET)
def test_what_does_not_come_true_ends_the_script_with_status_1(work, expected):
    text = f"steps: [say: x, expect: {{{expected}}}, approve]"
    status, shown, log = play(work, [reply("a", WRITE)], text)
    assert status == 1 and "FAILED at step 2 (expect): `" in shown and UNMET[expected] in shown
    assert "approve" not in log
    assert (work / "notes.txt").read_text() == "one\ntwo\nthree\n"


def test_a_step_that_is_not_possible_ends_the_script_with_status_1(work):
    for step, said in [
        ("learn", "Nothing was denied"), ("undo", "no update to take back"), ("approve", "Nothing is pending"),
        ("save", "`--save FOLDER`"), ("file: {path: ../x, text: x}", "holds `..`"),
        ("expect: {tool: x}", "no answer is pending"),
    ]:  # fmt: skip
        status, shown, _ = play(work, [], f"steps: [{step}]")
        assert status == 1 and said in shown, step
    assert not (work.parent / "x").exists()


def test_what_is_repeated_ends_when_it_is_enough_or_too_often(work):
    text = "steps: [say: x, repeat: {at_most: 2, until: {text: good}, steps: [deny: worse, learn, retry]}]"
    status, _, log = play(work, [reply("a"), reply("b"), reply("good")], text)
    assert status == 0 and log.count("learn") == 2
    status, _, log = play(work, [reply("good")], text)
    assert status == 0 and log.count("learn") == 0
    status, shown, log = play(work, [reply("a"), reply("b"), reply("c")], text)
    assert status == 1 and "FAILED at step 2 (repeat): after 2 rounds: `text`: 'good' is not in 'c'" in shown


# With a real model


def test_the_example_teaches_a_model_a_better_habit(habit, work, tmp_path, capsys):
    options = ["--model", str(habit), "--folder", str(work), "--shell", "none"]
    saved = tmp_path / "saved"
    example = str(ROOT / "examples" / "online_session.yaml")
    assert main([*options, "--script", example, "--save", str(saved)]) == 0
    shown = capsys.readouterr().out
    assert '"write_file"' in shown.split("learned: update 1")[0]
    assert "as expected" in shown and "-three" in shown
    assert (work / "notes.txt").read_text() == "one\nTWO\nthree\n"
    after = write(
        tmp_path,
        """
steps:
  - expect: {updates: 1}
  - clear
  - say: Change the second line of notes.txt to TWO.
  - expect: {tool: edit_lines}
  - save
""",
    )  # fmt: skip
    assert main([*options, "--script", after, "--save", str(saved)]) == 0  # goes on with what was learned
    assert "continuing the session" in capsys.readouterr().out
    with OnlineSession.load(saved / "session") as session:
        assert session.updates == 1
        session.clear()
    text = "steps: [say: 'Change the second line of notes.txt to TWO.', expect: {tool: edit_lines}]"
    assert main([*options, "--script", write(tmp_path, text)]) == 1  # which a fresh one has not
    assert "wanted edit_lines, got write_file" in capsys.readouterr().out
    # The saved adapter can be gone on from, too.
    assert main(["--model", str(saved / "session"), *options[2:], "--script", write(tmp_path, text)]) == 0


def test_an_edited_call_is_learned_from(habit, work, tmp_path, capsys):
    text = f"""
config: {{learning_rate: 0.003, temperature: 0.5}}
steps:
  - say: {online_model.ASKED}
  - expect: {{probability: {{of: {online_model.WANTED}, at_most: 0.1}}}}
  - edit: {online_model.WANTED}
  - expect: {{file: {{path: notes.txt, text: "one\\nTWO\\nthree\\n"}}}}
  - learn
  - clear
  - say: {online_model.ASKED}
  - history
"""
    assert (
        main(["--model", str(habit), "--folder", str(work), "--shell", "none", "--script", write(tmp_path, text)]) == 0
    )
    shown = capsys.readouterr().out
    assert "instead" not in shown and "-two" in shown and "learned: update 1" in shown


def test_an_answer_that_is_stopped_never_was(habit, work):
    desk = Desk(work, "none")
    with OnlineSession(str(habit), tools=desk.functions()) as session:
        desk.session = session
        session.say("hello")
        talk = Talk(desk, terminal.console(file=io.StringIO()))

        def ask(on_text):
            with pytest.raises(Stopped):
                session.respond(on_text=lambda piece: (_ for _ in ()).throw(Stopped))
            assert session.pending is None
            return session.respond(on_text=on_text)

        answer = talk.respond(ask)
        assert answer.ids and answer == session.pending
        assert math.isfinite(session.score("hello"))


def test_errors_are_one_clear_line(habit, work, tmp_path, capsys):
    script = write(tmp_path, f"steps: [say: {'long ' * 3000}]")
    for options, status, said in [
        (["--model", str(work)], 2, f"The session with {work} cannot begin: Unrecognized model"),
        (["--model", str(habit), "--folder", "nowhere"], 2, "--folder nowhere: there is no such folder."),
        (["--model", str(habit), "--save", str(work)], 2, "keep the session in another folder"),
        (["--model", str(habit), "--set", "nothing=1"], 2, "SDPOConfig has no field 'nothing'"),
        (["--model", str(habit), "--set", "nothing"], 2, "write NAME=VALUE"),
        (["--model", str(habit), "--set", "num_iterations=2"], 2, "A session needs `num_iterations=1`"),
        (["--model", str(habit)], 1, "NOT POSSIBLE at step 1 (say): The conversation has"),
    ]:
        options = ["--folder", str(work), "--shell", "none", "--script", script, *options]
        assert main(options) == status
        shown = capsys.readouterr()
        lines = [line for line in (shown.err if status == 2 else shown.out).split("\n") if line]
        assert said in " ".join(lines), (said, shown)
        assert status == 1 or len(lines) == 1


@pytest.mark.parametrize("option", ["--model", "--folder"])
def test_a_folder_that_is_not_there_is_told_at_once(option, tmp_path, capsys):
    script = write(tmp_path, "steps: [say: x]")
    with pytest.raises(SystemExit) as caught:
        main(["--model", str(tmp_path), "--script", script, option, "/no/such"])
    assert caught.value.code == 2 and f"{option} /no/such: there is no such folder" in capsys.readouterr().err


def test_a_session_without_a_script_needs_a_terminal(habit, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(SystemExit) as caught:
        main(["--model", str(habit)])
    assert caught.value.code == 2 and "needs a terminal" in capsys.readouterr().err
