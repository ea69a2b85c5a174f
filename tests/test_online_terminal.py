"""The app in a real pseudo-terminal, with a tiny model that really learns."""

import os
import shutil
import signal
import time

import online_model
import online_pty
import psutil
import pytest

from sdpo_trl.online.journal import read_journal

ASK = f"{online_model.ASKED}\r"


@pytest.fixture
def work(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "notes.txt").write_text("one\n\x1b]0;owned\x07two\nthree\n")
    return tmp_path / "work"


def processes() -> str:
    return "\n".join(" ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"]))


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is missing: apt-get install bubblewrap")
def test_deny_learn_retry_edit_stop_kill_and_go_on(habit, work, tmp_path):
    notes, edited = work / "notes.txt", tmp_path / "edited.yaml"
    edited.write_text("name: shell\narguments: {command: echo begun; sleep 61.75}\n")
    options = ("--max_completion_length", "48")
    terminal = online_pty.start(habit, work, *options, VISUAL="", EDITOR=f"cp {edited}")
    try:
        terminal.until("you >")
        terminal.type(ASK)
        place = terminal.until("y/n/e >")
        shown = terminal.text()
        assert "tool call  write_file" in shown and "-three" in shown and "+TWO" in shown
        assert "-\\x1b]0;owned\\x07two" in shown and b"\x1b]0;owned" not in terminal.raw
        assert "three" in notes.read_text()  # nothing has run

        terminal.type(f"n {online_model.CORRECTION}\r")
        place = terminal.until("learned: update 1", place)
        assert b"learning" in terminal.raw  # the progress line, gone by now
        place = terminal.until('"edit_lines",', terminal.until("what the correction changed", place))
        place = terminal.until("y/n/e >", terminal.until("tool call  edit_lines", place))
        assert "three" in notes.read_text()
        terminal.type("y\r")
        place = terminal.until("y/n/e or you >", terminal.until("Edited notes.txt: it has 3 lines now.", place))
        assert notes.read_text() == "one\nTWO\nthree\n"

        terminal.type("/teacher\r")
        place = terminal.until(f"correction: {online_model.CORRECTION}", place)
        terminal.type("/metrics\r")
        place = terminal.until("grad_norm", place)
        terminal.type("/undo\r")
        place = terminal.until("0 are in force", place)
        terminal.type("/save\r")
        place = terminal.until("saved to runs/online/session", place)
        terminal.type("\x03")  # Ctrl-C at the prompt
        place = terminal.until("Ctrl-D or /quit leaves", place)

        terminal.type("/clear\r")
        place = terminal.until("you >", terminal.until("what was learned stays", place))
        terminal.type(ASK)
        place = terminal.until("y/n/e >", terminal.until("tool call  write_file", place))
        terminal.type("e\r")
        place = terminal.until("yours: y/n/e >", terminal.until("command: echo begun; sleep 61.75", place))
        terminal.type("y\r")
        deadline = time.monotonic() + 60
        while "sleep 61.75" not in processes():
            terminal.read(0.2)
            assert time.monotonic() < deadline, terminal.text()
        terminal.type("\x03")
        place = terminal.until("It was stopped.", place)  # the command, not the app
        place = terminal.until("learned: update 1", place)
        place = terminal.until("y/n/e", terminal.until("model", place))
        assert "sleep 61.75" not in processes()
        os.kill(terminal.process.pid, signal.SIGKILL)
        terminal.process.wait()
    finally:
        terminal.close()

    events = [event["event"] for event in read_journal(work / "runs" / "online" / "journal.jsonl")]
    assert events.count("finished") == 2 and events.count("undone") == 1 and events[-1] == "replied"
    terminal = online_pty.start(habit, work)
    try:
        place = terminal.until("y/n/e", terminal.until("The session goes on where it was left."))
        terminal.until("updates 1 |", place)
        terminal.type("\x04")  # Ctrl-D
        terminal.until("saved to runs/online/session", place)
        assert terminal.process.wait(timeout=30) == 0
    finally:
        terminal.close()
    assert (work / "runs" / "online" / "session" / "adapter_config.json").is_file()
