"""What the tools of a working folder do, and what they say when they cannot."""

import glob as standard_glob
import json
import os
import random
import shutil
import subprocess
import time

import pytest
import tiny
from transformers.utils import get_json_schema

from sdpo_trl.online.paths import WorkspaceError
from sdpo_trl.online.texts import matches
from sdpo_trl.online.tools import WorkspaceTools, workspace_tools


@pytest.fixture
def place(tmp_path):
    (tmp_path / "work" / "sub").mkdir(parents=True)
    (tmp_path / "work" / "sub" / "a.txt").write_text("one\ntwo\nthree\n")
    (tmp_path / "work" / "link.txt").symlink_to("sub/a.txt")
    return tmp_path / "work"


def functions(place):
    return {tool.__name__: tool for tool in workspace_tools(place)}


def test_schemas_are_those_that_chat_templates_read(place):
    schemas = [get_json_schema(tool)["function"] for tool in workspace_tools(place)]
    assert [schema["name"] for schema in schemas] == [
        "read_file", "write_file", "edit_file", "edit_lines", "glob", "grep",
    ]  # fmt: skip
    for schema in schemas:
        assert schema["description"] and all(
            value["description"] and value["type"] in ("string", "integer")
            for value in schema["parameters"]["properties"].values()
        )
    assert schemas[3]["parameters"]["required"] == ["path", "first", "last", "text"]


def test_reading_shows_numbers_and_what_was_left_out(place):
    tools = functions(place)
    assert tools["read_file"]("sub/a.txt") == "1| one\n2| two\n3| three"
    assert tools["read_file"]("sub/a.txt", first=2, lines=1) == (
        "2| two\n[lines 3 to 3 are left out: ask for them with `first`]"
    )
    (place / "long.txt").write_text("y" * 2000 + "\n" + "\n".join(f"line {i}" for i in range(10_000)))
    text = tools["read_file"]("long.txt", lines=400)
    assert "[1500 more characters]" in text and len(text) < 17_000 and "to 10001 are left out" in text
    (place / "latin").write_bytes(b"caf\xe9\n")
    assert tools["read_file"]("latin").startswith("1| caf\\xe9\n[not in UTF-8")
    (place / "crlf").write_bytes(b"a\r\nb\r\n")
    assert tools["read_file"]("crlf") == "1| a\n2| b"
    (place / "odd").write_text("a\x0cb\u2028c\n")  # these are no line ends to an editor
    assert tools["read_file"]("odd") == "1| a\x0cb\u2028c"
    (place / "empty").write_text("")
    assert tools["read_file"]("empty") == "(the file is empty)"
    with open(place / "huge", "wb") as file:
        file.truncate(9 << 20)
    (place / "binary").write_bytes(b"\x7fELF\0\1")
    for name, said in [("huge", "more than 8 MiB"), ("binary", "binary file of 6 bytes")]:
        with pytest.raises(WorkspaceError, match=f"{said}.* Hint: "):
            tools["read_file"](name)


FAILURES = [
    ("read_file", {"path": "sub/b.txt"}, "no `b.txt` for `sub/b.txt`. Hint: did you mean `a.txt`?"),
    ("read_file", {"path": "sub/a.txt", "first": 9}, "has 3 lines, none from 9 on. Hint: "),
    ("read_file", {"path": "sub/a.txt", "lines": 0}, "`lines` 0. Hint: "),
    ("read_file", {"path": 5}, "`path` is of type int. Hint: read_file takes path (str), first (int, optional)"),
    ("read_file", {"path": "sub/a.txt", "first": True}, "`first` is of type bool. Hint: "),
    ("read_file", {}, "missing a required argument: 'path'. Hint: "),
    ("read_file", {"path": "sub/a.txt", "mode": "r"}, "unexpected keyword argument 'mode'. Hint: "),
    ("write_file", {"path": "sub/a.txt", "text": None}, "`text` is of type null. Hint: "),
    ("write_file", {"path": "sub/a.txt", "text": "a\0"}, "NUL"),
    ("write_file", {"path": "sub/a.txt", "text": "\ud83d"}, "half of a character at 0. Hint: "),
    ("write_file", {"path": "fixed.txt", "text": "x"}, "write-protected. Hint: "),
    ("write_file", {"path": "big", "text": "x" * (9 << 20)}, "more than 8 MiB. Hint: "),
    ("edit_file", {"path": "fixed.txt", "old": "k", "new": "x"}, "write-protected. Hint: "),
    ("edit_file", {"path": "sub/a.txt", "old": "", "new": "x"}, "`old` is empty. Hint: "),
    ("edit_file", {"path": "sub/a.txt", "old": "one", "new": "one"}, "the same. Hint: "),
    ("edit_file", {"path": "sub/a.txt", "old": " two", "new": "x"}, "Hint: line 2 is like it: 'two'. Copy"),
    ("edit_file", {"path": "sub/a.txt", "old": "thre3\n", "new": "x"}, "Hint: line 3 is like it: 'three'."),
    ("edit_file", {"path": "sub/a.txt", "old": "2| two", "new": "x"}, "leave out the line numbers"),
    ("edit_file", {"path": "sub/a.txt", "old": "o", "new": "x"}, "more than once in `sub/a.txt` (lines 1, 2). Hint: "),
    ("edit_file", {"path": "latin", "old": "caf", "new": "x"}, "not in UTF-8 (byte 3). Hint: "),
    ("edit_file", {"path": "binary", "old": "E", "new": "x"}, "binary file. Hint: "),
    ("edit_lines", {"path": "sub/a.txt", "first": 5, "last": 5, "text": "x"}, "has 3 lines; lines 5 to 5"),
    ("edit_lines", {"path": "sub/a.txt", "first": 0, "last": 0, "text": "x"}, "lines 0 to 0"),
    ("edit_lines", {"path": "sub/a.txt", "first": 3, "last": 1, "text": "x"}, "lines 3 to 1"),
    ("edit_lines", {"path": "latin", "first": 1, "last": 1, "text": "x"}, "not in UTF-8"),
    ("glob", {"pattern": "*" * 2000}, "too long. Hint: "),
    ("grep", {"pattern": "("}, "no regular expression: missing )"),
    ("grep", {"pattern": ""}, "empty or too long. Hint: "),
]


@pytest.mark.parametrize("tool, arguments, said", FAILURES)
def test_a_failure_says_what_to_do(place, tool, arguments, said):
    (place / "fixed.txt").write_text("kept")
    (place / "fixed.txt").chmod(0o444)
    (place / "latin").write_bytes(b"caf\xe9\n")
    (place / "binary").write_bytes(b"\x7fELF\0\1")
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and not path.is_symlink()}
    with pytest.raises(WorkspaceError) as caught:
        functions(place)[tool](**arguments)
    assert said in str(caught.value) and " Hint: " in str(caught.value)
    if tool not in ("read_file", "glob", "grep"):
        with pytest.raises(WorkspaceError) as foreseen:
            WorkspaceTools(place).preview({"name": tool, "arguments": arguments})
        assert str(foreseen.value) == str(caught.value)
    after = {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and not path.is_symlink()}
    assert after == before


def test_writing_keeps_the_mode_and_makes_folders(place):
    tools = functions(place)
    script = place / "run.sh"
    script.write_text("old")
    script.chmod(0o751)
    assert tools["write_file"]("run.sh", "new é\n") == "Replaced all of run.sh: 7 bytes."
    assert script.read_text() == "new é\n" and script.stat().st_mode & 0o777 == 0o751
    assert tools["write_file"]("x/y/z.txt", "") == "Made x/y/z.txt: 0 bytes."
    assert (place / "x" / "y" / "z.txt").read_text() == ""


def test_a_write_that_fails_leaves_the_old_file_alone(place, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(WorkspaceError, match=r"No space left on device\. Hint: the disk is full"):
        functions(place)["write_file"]("sub/a.txt", "new")
    assert sorted(os.listdir(place / "sub")) == ["a.txt"]
    assert (place / "sub" / "a.txt").read_text() == "one\ntwo\nthree\n"


def test_line_ends_of_a_file_are_kept(place):
    tools = functions(place)
    file = place / "crlf"
    file.write_bytes(b"a\r\nb\r\nc\r\n")
    tools["edit_file"]("crlf", "a\nb", "a\nx\ny")
    tools["edit_lines"]("crlf", 4, 4, "z")
    assert file.read_bytes() == b"a\r\nx\r\ny\r\nz\r\n"
    (place / "open").write_bytes(b"a\nb")
    tools["edit_lines"]("open", 2, 2, "c")
    assert (place / "open").read_bytes() == b"a\nc"
    tools["edit_lines"]("open", 3, 2, "d\n")
    assert (place / "open").read_bytes() == b"a\nc\nd\n"


def test_line_edits_are_those_of_a_list(place):
    """Against slices of a list, with any mixture of line ends at the end of file and text."""
    tools, file, draw = functions(place), place / "f", random.Random(0)
    for _ in range(300):
        lines = [f"{i}{draw.choice('ab')}" for i in range(draw.randrange(6))]
        end = draw.choice(["", "\n"]) if lines else ""
        file.write_text("\n".join(lines) + end)
        first = draw.randint(1, len(lines) + 1)
        last = draw.randint(first - 1, len(lines))
        new = [draw.choice("xyz") for _ in range(draw.randrange(4))]
        tools["edit_lines"]("f", first, last, "\n".join(new) + (draw.choice(["", "\n"]) if new else ""))
        assert file.read_text().removesuffix("\n").split("\n") == ([*lines[: first - 1], *new, *lines[last:]] or [""])


def test_a_preview_is_what_happens_then(place, tmp_path):
    """The diff, applied by `patch` to a copy, gives what the tool makes of the file."""
    patch = shutil.which("patch")
    if patch is None:
        pytest.skip("needs `patch`")
    tools, draw = WorkspaceTools(place), random.Random(1)
    by_name = {tool.__name__: tool for tool in tools.functions()}
    copy = tmp_path / "copy"
    for round in range(60):
        text = "".join(f"{draw.choice('abc')}{i}\n" for i in range(draw.randrange(1, 9)))
        text = text.removesuffix("\n") if draw.random() < 0.3 else text
        (place / "f").write_text(text)
        copy.write_text(text)
        line = draw.randint(1, text.count("\n") or 1)
        call = [
            {"name": "write_file", "arguments": {"path": "f", "text": text[::-1] + draw.choice(["", "\n"])}},
            {"name": "edit_file", "arguments": {"path": "f", "old": text[:2], "new": "new\ntext"}},
            {"name": "edit_lines", "arguments": {"path": "f", "first": line, "last": line, "text": "new"}},
        ][round % 3]
        diff = tools.preview(call)
        assert (place / "f").read_text() == text  # nothing has happened yet
        by_name[call["name"]](**call["arguments"])
        subprocess.run([patch, "-s", str(copy)], input=diff, text=True, check=True)
        assert copy.read_text() == (place / "f").read_text()
    assert tools.preview({"name": "read_file", "arguments": {"path": "f"}}) is None
    assert tools.preview({"name": "write_file", "arguments": {"path": "f", "text": (place / "f").read_text()}}) == ""
    assert tools.preview({"name": "write_file", "arguments": {"path": "g/h", "text": "x\n"}}) == (
        "--- /dev/null\n+++ b/g/h\n@@ -0,0 +1 @@\n+x\n"
    )
    assert not (place / "g").exists()
    with pytest.raises(WorkspaceError, match="no object"):
        tools.preview({"name": "write_file", "arguments": "x"})


def test_a_large_diff_takes_no_long_time(place):
    draw = random.Random(0)
    (place / "f").write_text("".join(f"{draw.random()}\n" for _ in range(30_000)))
    start = time.monotonic()
    text = "".join(f"{draw.random()}\n" for _ in range(30_000))
    assert "compared as a whole" in WorkspaceTools(place).preview(
        {"name": "write_file", "arguments": {"path": "f", "text": text}}
    )
    assert time.monotonic() - start < 3


def test_patterns_match_as_the_standard_library_has_them(tmp_path):
    for path in ["a.py", "b.md", ".hid", "s/a.py", "s/t/a.py", "s/t/u/b.md", ".git/a.py", "s/.x/a.py", "s/[a]/c"]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    tools = functions(tmp_path)
    for pattern in [
        "*", "*.py", "**", "**/*", "**/*.py", "s/**", "s/*/a.py", "**/t/**/*.md", "**/**/a.py", "s/**/t/**", ".*",
        "**/.*/a.py", ".git/*", "[ab].*", "?.py", "s/[[]a]/c", "*/*", "*/", "x*", "**/**",
    ]:  # fmt: skip
        wanted = {path.rstrip("/") for path in standard_glob.glob(pattern, root_dir=tmp_path, recursive=True)} - {""}
        if pattern == "*/":
            continue  # only folders there; here the slash at the end says nothing
        got = tools["glob"](pattern)
        assert {line.rstrip("/") for line in got.split("\n") if not got.startswith("Nothing")} == wanted, pattern
    start = time.monotonic()
    assert not matches("/".join("a" * 50), ["**", "a"] * 25 + ["b"])
    assert time.monotonic() - start < 1


def test_searching_is_bounded_in_time_and_size(place, monkeypatch):
    tools = functions(place)
    (place / "bad.txt").write_text("a" * 5000 + "b\n")
    monkeypatch.setattr("sdpo_trl.online.searching.SECONDS", 0.5)
    start = time.monotonic()
    with pytest.raises(WorkspaceError, match=r"took more than 0\.5 seconds\. Hint: use a simpler expression"):
        tools["grep"](r"(a|aa)+$")
    assert time.monotonic() - start < 3
    monkeypatch.undo()
    (place / "many.txt").write_text("hit\n" * 1000)
    (place / "binary").write_bytes(b"hit\0")
    found = tools["grep"]("hit").split("\n")
    assert len(found) == 201 and found[-1].startswith("[there are more")
    assert (
        tools["grep"]("hit", "binary")
        == "No line matches hit in binary.\n[1 binary, very large or unreadable files were not searched]"
    )
    assert tools["grep"]("t[wh]", "**/*.txt").split("\n")[0].startswith("many") is False
    for i in range(300):
        (place / f"f{i}").write_text("")
    listed = tools["glob"]("f*").split("\n")
    assert len(listed) == 201 and listed[-1] == "[100 more]"
    os.makedirs(place / "/".join(["d"] * 90))
    assert "d/d/d" in tools["glob"]("d/d/*")
    monkeypatch.setattr("sdpo_trl.online.searching.MAX_ENTRIES", 100)
    with pytest.raises(WorkspaceError, match="more than 100 files"):
        tools["glob"]("**")


def test_odd_names_are_listed_as_text(place):
    os.close(os.open(os.fsencode(place) + b"/caf\xe9", os.O_CREAT | os.O_WRONLY))
    (place / "cut\nhere\x1b").write_text("")
    assert functions(place)["glob"]("c*").split("\n") == ["caf\\xe9", "cut\\nhere\\x1b"]


def test_the_tools_work_in_a_trainer(tmp_path, place):
    """A rollout of a `GRPOTrainer` reads, and is told why it may not read something else."""
    calls = [("read_file", {"path": "sub/a.txt"}), ("read_file", {"path": "link.txt"})]
    text = [f"<tool_call>{json.dumps({'name': name, 'arguments': args})}</tool_call>$" for name, args in calls]
    trainer = tiny.trainer(
        tmp_path / "out",
        tiny.telling("wrong"),
        data=tiny.prompts(1, chat=True),
        model=tiny.build_model(max_position_embeddings=8192),
        trainer_processing_class=tiny.tool_tokenizer(),
        trainer_tools=workspace_tools(place)[:1],
        max_completion_length=700,
        per_device_train_batch_size=4,
    )
    tiny.acting(trainer, [[*text, "done$"]])
    inputs = tiny.micro_batches(trainer)[0]
    seen = trainer._tokenizer.decode(inputs["completion_ids"][0])
    assert "<|tool|>1| one\n2| two\n3| three<|end|>" in seen
    assert "links are not followed" in seen and "Hint: name the file itself" in seen
