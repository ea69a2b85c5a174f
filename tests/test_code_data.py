"""Problem sets as rows, and the sixty problems that come with the package."""

import base64
import json
import pickle
import shutil
import zlib

import pytest
from datasets import Dataset

from sdpo_trl.environments.code_data import (
    code_row,
    decode_tests,
    livecodebench_files,
    load_code,
    own_problem_rows,
    own_problems,
    pickled_text,
    split_tests,
)
from sdpo_trl.environments.code_reward import CodeReward
from sdpo_trl.environments.code_tests import CodeTest, read_tests
from sdpo_trl.environments.sandbox import Sandbox

needs_bwrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is missing: apt-get install bubblewrap"
)


def packed(value, protocol=4) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value, protocol))).decode()


STDIN = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
FUNCTIONAL = [{"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}]


def livecodebench(public, private, function=None):
    """A row with the columns of livecodebench/code_generation_lite."""
    return {
        "question_title": "A",
        "question_content": "Add.",
        "platform": "atcoder",
        "question_id": "abc_1",
        "contest_id": "abc",
        "contest_date": "2025-03-01T00:00:00",
        "starter_code": "class Solution:\n    def add(self, a, k):\n        " if function else "",
        "difficulty": "easy",
        "public_test_cases": json.dumps(public),
        "private_test_cases": packed(json.dumps(private)),
        "metadata": json.dumps({"func_name": function} if function else {}),
    }


@pytest.mark.parametrize("protocol", range(6))
def test_private_tests_are_decoded(protocol):
    tests = [{"input": "é\n\u2028" + "x" * 300, "output": "\x00", "testtype": "stdin"}] * 3
    assert decode_tests(packed(json.dumps(tests), protocol)) == tests
    assert decode_tests(json.dumps(tests)) == tests


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        import os

        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_malicious_pickle_is_refused_unrun(tmp_path, protocol):
    target = tmp_path / "touched"
    pickle.loads(pickle.dumps(Evil(target), protocol))
    assert target.exists()  # so it would have worked
    target.unlink()
    for value in (Evil(target), ["[]", Evil(target)], {"[]": Evil(target)}):
        with pytest.raises(ValueError, match=r"not run|one text"):
            decode_tests(packed(value, protocol))
    assert not target.exists()


@pytest.mark.parametrize("value", [["a"], {"a": 1}, 5, None, ("a", "b"), b"[]", pickle.loads])
def test_a_pickle_of_anything_but_one_text_is_refused(value):
    with pytest.raises(ValueError):
        pickled_text(pickle.dumps(value))


@pytest.mark.parametrize(
    "data", [b"", b"\x80", b"garbage", b"\x8e" + b"\xff" * 8, b"\x8d" + (2**40).to_bytes(8, "little")]
)
def test_damaged_pickles_are_refused(data):
    with pytest.raises(ValueError):
        pickled_text(data)


def test_a_decompression_bomb_is_stopped_at_its_limit():
    import tracemalloc

    bomb = base64.b64encode(zlib.compress(bytes(64 << 20), 9)).decode()
    assert len(bomb) < 100_000
    tracemalloc.start()
    with pytest.raises(ValueError, match="more than 1048576 bytes"):
        decode_tests(bomb, largest=1 << 20)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("text", ["not base64!", base64.b64encode(b"not zlib").decode(), packed("[]")[:-12]])
def test_damaged_test_cases_are_refused(text):
    with pytest.raises(ValueError, match="Test cases"):
        decode_tests(text)


def test_livecodebench_rows():
    row = code_row(livecodebench(STDIN, STDIN * 3))
    assert (row["id"], row["function"], row["difficulty"]) == ("abc_1", "", "easy")
    assert read_tests(row["public_tests"]) == [CodeTest("1 2\n", "3\n")]
    assert len(read_tests(row["hidden_tests"])) == 3
    text = row["prompt"][0]["content"]
    assert text.startswith("Add.\n\n") and "standard input" in text and "```python" in text

    row = code_row(livecodebench(FUNCTIONAL, FUNCTIONAL * 2, "add"), max_hidden=1)
    assert row["function"] == "add"
    assert read_tests(row["public_tests"]) == read_tests(row["hidden_tests"]) == [CodeTest([[1, 2], 3], [4, 5])]
    assert "class Solution:" in row["prompt"][0]["content"]


def deepcoder(tests, **metadata):
    return {"problem": "Do it.", "tests": json.dumps(tests), "starter_code": "", "metadata": metadata or None}


def test_deepcoder_rows_of_each_configuration():
    lcb = code_row(deepcoder(FUNCTIONAL * 4, func_name="add"))
    assert lcb["function"] == "add" and len(read_tests(lcb["public_tests"])) == 2
    named = [{**FUNCTIONAL[0], "metadata": {"func_name": "add"}}]
    assert code_row(deepcoder(named))["function"] == "add"

    prime = code_row(deepcoder([{"type": "stdin_stdout", "input": "1\n", "output": "2\n"}] * 3))
    assert prime["function"] == "" and read_tests(prime["hidden_tests"]) == [CodeTest("1\n", "2\n")]
    call = {"type": "function_call", "fn_name": "f", "input": [2], "output": [4]}
    assert read_tests(code_row(deepcoder([call] * 3))["public_tests"])[0] == CodeTest([2], [4], wrapped=True)

    taco = code_row(deepcoder({"inputs": ["1\n", ["2", "3"]], "outputs": ["x\n", ["y"]]}))
    assert read_tests(taco["public_tests"]) + read_tests(taco["hidden_tests"]) == [
        CodeTest("1\n", "x\n"),
        CodeTest("2\n3", "y"),
    ]
    taco = code_row(deepcoder({"fn_name": "g", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}))
    assert taco["function"] == "g" and read_tests(taco["hidden_tests"]) == [CodeTest([3, 4], [7], wrapped=True)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?"}, "neither LiveCodeBench's nor DeepCoder's"),
        (deepcoder(STDIN + FUNCTIONAL, func_name="f"), "call different things"),
        (deepcoder(FUNCTIONAL), "neither they nor the row's metadata name"),
        (deepcoder([{"type": "interactive", "input": "", "output": ""}]), "Unknown kind of test 'interactive'"),
        (deepcoder(None), "A column is missing"),
        (deepcoder([[1]]), "A column is missing"),
        ({**deepcoder(STDIN), "problem": None}, "A column is missing"),
        ({**livecodebench(STDIN, []), "metadata": "null"}, "A column is missing"),
        ({**livecodebench(STDIN, []), "public_test_cases": None}, "A column is missing"),
        (livecodebench([{**FUNCTIONAL[0], "input": None}], [], "f"), "A column is missing"),
        (livecodebench([None], []), "must be a JSON list of objects"),
        (livecodebench(STDIN, {"a": 1}), "must be a JSON list of objects"),
        ({**livecodebench(STDIN, []), "public_test_cases": "[" * 100_000}, "nested too deeply"),
        ({**livecodebench(STDIN, []), "private_test_cases": packed("[" * 100_000)}, "nested too deeply"),
        ({"prompt": "p", "public_tests": [], "hidden_tests": [], "function": None, "id": 1}, "A column is missing"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_graded_are_refused(row, message):
    with pytest.raises(ValueError, match=message):
        code_row(row)


@pytest.mark.parametrize(("count", "public", "shown"), [(5, 2, 2), (2, 2, 1), (1, 2, 1), (3, 0, 0), (0, 2, 0)])
def test_of_several_tests_at_least_one_is_hidden(count, public, shown):
    tests = [CodeTest(str(i), "") for i in range(count)]
    first, rest = split_tests(tests, public)
    assert len(first) == shown and first + rest == tests


@pytest.mark.parametrize("options", [{"public": -1}, {"max_hidden": -1}])
def test_numbers_of_tests_below_zero_are_refused(options):
    with pytest.raises(ValueError, match="must not be negative"):
        code_row(deepcoder([{"type": "stdin_stdout", "input": "1\n", "output": "2\n"}] * 3), **options)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_local_files_are_loaded(tmp_path, kind):
    rows = [livecodebench(STDIN, STDIN), livecodebench(FUNCTIONAL, FUNCTIONAL, "add"), livecodebench([], [])]
    rows[1]["contest_date"] = "2023-01-01"
    path = str(tmp_path / f"rows.{kind}")
    data = Dataset.from_list(rows)
    data.to_json(path) if kind == "jsonl" else data.to_parquet(path)
    with pytest.warns(UserWarning, match="1 problems .* have no tests"):
        loaded = load_code(path)
    assert loaded["function"] == ["", "add"] and read_tests(loaded[1]["hidden_tests"])[0].output == [4, 5]
    late = load_code(path, keep=lambda row: str(row["contest_date"]) > "2024" and row["public_test_cases"] != "[]")
    assert len(late) == 1 and late[0]["prompt"][0]["role"] == "user"


def test_a_row_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    for column, message in (("private_test_cases", "Test cases"), ("metadata", "A column is missing")):
        path.write_text(
            json.dumps({**livecodebench(STDIN, STDIN), column: "?!" if "cases" in column else "[1]"}) + "\n"
        )
        with pytest.raises(ValueError, match=f"Row 0 of .*{message}"):
            load_code(str(path))


def test_an_empty_file_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match=r"rows\.jsonl is empty"):
        load_code(str(tmp_path / "rows.jsonl"))


def test_livecodebench_versions():
    assert livecodebench_files("v1") == ["test.jsonl"] and livecodebench_files("v6") == ["test6.jsonl"]
    assert livecodebench_files("release_v3") == ["test.jsonl", "test2.jsonl", "test3.jsonl"]
    for wrong in ("v7", "6", "release_6", "release_latest", "v0"):
        with pytest.raises(ValueError, match="versions v1 to v6"):
            livecodebench_files(wrong)


def test_hub_names_are_passed_on(monkeypatch):
    """Offline: what `datasets` is asked for."""
    import datasets

    asked = []

    def fake(*arguments, **options):
        asked.append((arguments, options))
        return Dataset.from_list([livecodebench(STDIN, STDIN)])

    monkeypatch.setattr(datasets, "load_dataset", fake)
    load_code("livecodebench/code_generation_lite", "release_v2")
    load_code("agentica-org/DeepCoder-Preview-Dataset", "lcbv5", "test")
    files = [f"hf://datasets/livecodebench/code_generation_lite/{name}" for name in ("test.jsonl", "test2.jsonl")]
    assert asked[0] == (("json",), {"data_files": files, "split": "train"})
    assert asked[1] == (("agentica-org/DeepCoder-Preview-Dataset", "lcbv5"), {"split": "test"})


def test_the_shipped_problems_are_what_they_say():
    rows = own_problem_rows()
    assert len(rows) == len({row["id"] for row in rows}) == len({row["prompt"] for row in rows}) == 60
    assert sum(row["function"] is None for row in rows) == 30
    levels = [row["difficulty"] for row in rows]
    assert set(levels) == {"easy", "medium", "hard"} and min(map(levels.count, set(levels))) >= 10
    for row in rows:
        assert len(row["public_tests"]) == 2 and len(row["hidden_tests"]) >= 3
        assert row["solution"] not in row["prompt"]
    texts = {row["id"]: row["prompt"][0]["content"] for row in own_problems()}
    assert "Example input:\n3 4\n\nExample output:\n7\n" in texts["sum-of-two"]
    assert "Example: `two_sum([2, 7, 11, 15], 9)` returns `[0, 1]`." in texts["two-sum"]
    assert "def two_sum(numbers, target):" in texts["two-sum"]
    train, test = own_problems("train"), own_problems("test")
    assert (len(train), len(test)) == (48, 12) and not set(train["id"]) & set(test["id"])
    assert set(train.column_names) == {"id", "prompt", "public_tests", "hidden_tests", "function", "difficulty"}
    assert len(set(test["function"]) - {""}) >= 5
    with pytest.raises(ValueError, match="`split`"):
        own_problems("dev")


@needs_bwrap
def test_each_reference_solution_passes_its_tests_and_others_do_not():
    rows, data = own_problem_rows(), own_problems()
    reward = CodeReward(Sandbox(), workers=2)
    columns = {name: data[name] for name in ("public_tests", "hidden_tests", "function")}
    answers = [f"```python\n{row['solution']}```" for row in rows]
    assert dict(zip(data["id"], reward(data["prompt"], answers, **columns), strict=True)) == dict.fromkeys(
        data["id"], 1.0
    )
    # The tests tell programs apart: the solution of the next problem of the same kind passes nowhere.
    renamed = []
    for kind in (None, "f"):
        same = [row for row in rows if (row["function"] is None) == (kind is None)]
        for row, other in zip(same, same[1:] + same[:1], strict=True):
            code = other["solution"]
            if row["function"]:
                code += f"\n{row['function']} = {other['function']}\n"
            renamed.append(f"```python\n{code}```")
    assert sum(reward(data["prompt"], renamed, **columns)) == 0.0
