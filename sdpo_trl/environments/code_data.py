"""Programming problems as dataset rows: LiveCodeBench, DeepCoder, and sixty problems of this package.

Knows: the schemas of those sets and what [`CodeReward`] reads. Deliberately does not know: models, sandboxes. Nothing
that a row holds is executed, and of a pickle nothing but one text is read.
"""

import base64
import binascii
import json
import pickletools
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .code_tests import CodeTest, write_tests

if TYPE_CHECKING:
    from datasets import Dataset

LIVECODEBENCH = "livecodebench/code_generation_lite"
_PROBLEMS = Path(__file__).with_name("problems.jsonl")
_LARGEST = 512 << 20  # bytes of a row's decompressed tests
_FENCE = "Think it through, then write the whole solution in one block that starts with ```python and ends with ```."
_SCRIPT = f"Write a Python program that reads its input from standard input and prints the answer. {_FENCE}"
_TEXT_OPCODES = frozenset({"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"})
_FRAME_OPCODES = frozenset({"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"})


def pickled_text(data: bytes) -> str:
    """
    The text in a pickle that holds a single text. The pickle is read, not run: anything else in it is refused.

    Raises:
        `ValueError`: the pickle holds something else, such as a global or a call, or is damaged.
    """
    found: list[str] = []
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in _TEXT_OPCODES:
            found.append(argument)
        elif opcode.name not in _FRAME_OPCODES:
            raise ValueError(f"The pickle holds more than one text: it has the opcode {opcode.name}. It was not run.")
    if len(found) != 1:
        raise ValueError(f"The pickle must hold one text, got {len(found)}.")
    return found[0]


def decode_tests(text: str, largest: int = _LARGEST) -> list[dict[str, Any]]:
    """
    LiveCodeBench's test cases: a JSON list, or base64 of zlib of a pickle of such a JSON text.

    Args:
        text (`str`): `public_test_cases` or `private_test_cases` of a row.
        largest (`int`): Bytes that the decompressed tests may have.

    Raises:
        `ValueError`: it is neither, or decompresses to more than `largest` bytes.
    """
    if text.lstrip().startswith("["):
        return _json_list(text)
    try:
        packed = base64.b64decode(text, validate=True)
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, largest)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"Test cases are neither a JSON list nor base64 of zlib: {text[:60]!r} ({error}).") from error
    if not unpacker.eof:
        raise ValueError(f"Test cases decompress to more than {largest} bytes, or are cut off. The row was not read.")
    return _json_list(pickled_text(data))


def _json_list(text: str) -> list[dict[str, Any]]:
    try:
        tests = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"Test cases are nested too deeply to be read: {text[:60]!r}.") from error
    if not isinstance(tests, list) or not all(isinstance(test, dict) for test in tests):
        raise ValueError(f"Test cases must be a JSON list of objects, got {text[:60]!r}.")
    return tests


def _stdin_text(value: Any) -> str:
    """TACO writes some inputs and outputs as lists of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _functional(case: dict[str, Any]) -> CodeTest:
    """LiveCodeBench's form: each line of the input is an argument as JSON, the output one JSON value."""
    return CodeTest([json.loads(line) for line in case["input"].split("\n") if line], json.loads(case["output"]))


def _cases(rows: Sequence[dict[str, Any]], function: str | None) -> tuple[list[CodeTest], str | None]:
    """Tests of LiveCodeBench, DeepCoder's `lcbv5`, PrimeIntellect and Codeforces, and the function that they call."""
    tests: list[CodeTest] = []
    names: set[str | None] = set()
    for case in rows:
        kind = case.get("testtype") or case.get("type") or "stdin"
        if kind == "functional":
            names.add((case.get("metadata") or {}).get("func_name") or function)
            tests.append(_functional(case))
        elif kind == "function_call":
            names.add(case.get("fn_name") or function)
            tests.append(CodeTest(case["input"], case["output"], wrapped=True))
        elif kind in ("stdin", "stdin_stdout"):
            names.add(None)
            tests.append(CodeTest(_stdin_text(case["input"]), _stdin_text(case["output"])))
        else:
            raise ValueError(
                f"Unknown kind of test {kind!r}; known are stdin, stdin_stdout, functional, function_call."
            )
    if len(names) > 1:
        raise ValueError(f"The tests of one problem call different things: {sorted(map(str, names))}.")
    name = names.pop() if names else None
    if name is None and any(isinstance(test.input, list) for test in tests):
        raise ValueError("Tests call a function that neither they nor the row's metadata name.")
    return tests, name


def _metadata(row: dict[str, Any]) -> dict[str, Any]:
    value = row.get("metadata") or {}
    return json.loads(value) if isinstance(value, str) else value


def split_tests(tests: Sequence[CodeTest], public: int) -> tuple[list[CodeTest], list[CodeTest]]:
    """The first `public` tests, and the rest; of two or more tests at least one is hidden."""
    cut = min(public, max(1, len(tests) - 1)) if public else 0
    return list(tests[:cut]), list(tests[cut:])


def _example(test: CodeTest, function: str | None) -> str:
    if function:
        return f"Example: `{function}({', '.join(map(repr, test.input))})` returns `{test.output!r}`."
    return f"Example input:\n{test.input.rstrip()}\n\nExample output:\n{test.output.rstrip()}"


def code_row(row: dict[str, Any], *, public: int = 2, max_hidden: int | None = None) -> dict[str, Any]:
    """
    One problem as [`CodeReward`] and the trainer read it; the schema is told from the columns.

    - LiveCodeBench (`question_content`, `public_test_cases`, `private_test_cases`, `starter_code`, `metadata`): its
      own split into public and private tests stays.
    - DeepCoder (`problem`, `tests`, `starter_code`, `metadata`), all four configurations: the first `public` tests are
      public.
    - This package's (`prompt`, `public_tests`, `hidden_tests`, `function`).

    Args:
        row (`dict`): A row of one of them.
        public (`int`): See above.
        max_hidden (`int`, *optional*): Keep the first so many hidden tests; each costs a run per rollout.

    Returns:
        `dict`: `id`, `prompt` (chat messages), `public_tests` and `hidden_tests` (JSON text), `function` (`""` for
        scripts), `difficulty`.

    Raises:
        `ValueError`: an unknown schema, or tests that cannot be read; or a number of tests below 0.
    """
    for name, value in (("public", public), ("max_hidden", max_hidden)):
        if value is not None and value < 0:
            raise ValueError(f"`{name}` must not be negative, got {value}.")
    try:
        return _row(row, public, max_hidden)
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(
            f"A column is missing, empty or of another type ({type(error).__name__}: {error})."
        ) from error


def _row(row: dict[str, Any], public: int, max_hidden: int | None) -> dict[str, Any]:
    if "public_test_cases" in row:
        name = _metadata(row).get("func_name")
        shown, first = _cases(decode_tests(row["public_test_cases"]), name)
        hidden, second = _cases(decode_tests(row["private_test_cases"]), name)
        function = first or second
        text, starter, identity = row["question_content"], row.get("starter_code"), row.get("question_id")
    elif "tests" in row and "problem" in row:
        tests = json.loads(row["tests"]) if isinstance(row["tests"], str) else row["tests"]
        name = _metadata(row).get("func_name")
        if isinstance(tests, dict):  # TACO: columns instead of rows
            kind = "function_call" if tests.get("fn_name") else "stdin"
            pairs = zip(tests["inputs"], tests["outputs"], strict=True)
            tests = [{"type": kind, "fn_name": tests.get("fn_name"), "input": a, "output": b} for a, b in pairs]
        every, function = _cases(tests, name)
        shown, hidden = split_tests(every, public)
        text, starter, identity = row["problem"], row.get("starter_code"), row.get("id")
    elif "public_tests" in row and "prompt" in row:
        shown = [CodeTest(**test) for test in row["public_tests"]]
        hidden = [CodeTest(**test) for test in row["hidden_tests"]]
        function, identity = row["function"], row["id"]
        text = f"{row['prompt']}\n\n{_example(shown[0], function)}"
        starter = f"def {function}({', '.join(row['parameters'])}):\n    ..." if function else None
    else:
        raise ValueError(f"The columns {sorted(row)} are neither LiveCodeBench's nor DeepCoder's nor this package's.")
    ask = _SCRIPT
    if function:
        begin = f" It begins like this:\n\n```python\n{starter}\n```" if starter else ""
        ask = f"Write the Python function `{function}`. {_FENCE}{begin}"
    return {
        "id": str(identity if identity is not None else ""),
        "prompt": [{"role": "user", "content": f"{text.strip()}\n\n{ask}"}],
        "public_tests": write_tests(shown),
        "hidden_tests": write_tests(hidden[:max_hidden]),
        "function": function or "",
        "difficulty": str(row.get("difficulty") or ""),
    }


def load_code(
    name: str,
    config: str | None = None,
    split: str = "train",
    *,
    public: int = 2,
    max_hidden: int | None = None,
    keep: Callable[[dict[str, Any]], bool] | None = None,
) -> "Dataset":
    """
    A dataset of programming problems.

    Args:
        name (`str`): A local `.jsonl`, `.json` or `.parquet` file, or a Hub dataset:
            `livecodebench/code_generation_lite`, `agentica-org/DeepCoder-Preview-Dataset`, or one of the same schema.
        config (`str`, *optional*): Configuration on the Hub (`lcbv5`, `primeintellect`, `taco`, `codeforces`). For
            LiveCodeBench, whose loading script `datasets` no longer runs, `v1` to `v6` is what one release added and
            `release_v1` to `release_v6` all up to it; `v6` if it is not given.
        split (`str`): As in `datasets.load_dataset`; local files and LiveCodeBench have `train` alone.
        public, max_hidden: See [`code_row`].
        keep (`Callable`, *optional*): Whether a raw row is taken, such as by its difficulty or its date (which the
            JSON reader of `datasets` makes a `datetime`).

    Returns:
        `datasets.Dataset`: rows as of [`code_row`]. Rows without tests are left out, with a warning that counts them.
    """
    from datasets import load_dataset

    if name.endswith((".jsonl", ".json", ".parquet")):
        if Path(name).is_file() and not Path(name).stat().st_size:
            raise ValueError(f"{name} is empty.")
        kind = "parquet" if name.endswith(".parquet") else "json"
        raw = load_dataset(kind, data_files=name, split=split)
    elif name == LIVECODEBENCH:
        files = [f"hf://datasets/{LIVECODEBENCH}/{file}" for file in livecodebench_files(config or "v6")]
        raw = load_dataset("json", data_files=files, split=split)
    else:
        raw = load_dataset(name, config, split=split)

    def convert(row: dict[str, Any], number: int) -> dict[str, Any]:
        try:
            made = code_row(row, public=public, max_hidden=max_hidden)
        except ValueError as error:
            raise ValueError(f"Row {number} of {name}: {error}") from error
        return {**made, "id": made["id"] or str(number)}

    if keep is not None:
        raw = raw.filter(keep)
    # Small batches: the tests of a row may have hundreds of megabytes. No cache: it would outlive changes of the code.
    options = {"load_from_cache_file": False, "writer_batch_size": 8}
    made = raw.map(convert, with_indices=True, remove_columns=raw.column_names, **options)
    full = made.filter(
        lambda shown, hidden: not shown == hidden == "[]", input_columns=["public_tests", "hidden_tests"], **options
    )
    if len(full) < len(made):
        left_out = f"{len(made) - len(full)} problems of {name} have no tests and were left out."
        warnings.warn(left_out, stacklevel=2)
    return full


def livecodebench_files(version: str) -> list[str]:
    """The files of a LiveCodeBench version: `v3` is `test3.jsonl`, `release_v3` the first three."""
    number = version.removeprefix("release_").removeprefix("v")
    if number not in ("1", "2", "3", "4", "5", "6") or not version.endswith(f"v{number}"):
        raise ValueError(f"LiveCodeBench has the versions v1 to v6 and release_v1 to release_v6, got {version!r}.")
    names = ["test.jsonl", *(f"test{i}.jsonl" for i in range(2, 7))]
    return names[: int(number)] if version.startswith("release_") else [names[int(number) - 1]]


def own_problem_rows() -> list[dict[str, Any]]:
    """The sixty shipped problems as they are in the file, reference solutions included."""
    return [json.loads(line) for line in _PROBLEMS.read_text(encoding="utf-8").splitlines()]


def own_problems(split: str | None = None) -> "Dataset":
    """
    Sixty problems of this package, for offline use: thirty scripts and thirty functions, easy to hard, five to eight
    tests each, of which two are public.

    Args:
        split (`str`, *optional*): `"train"` (48) or `"test"` (12: every fifth); all of them if not given.
    """
    from datasets import Dataset

    if split not in (None, "train", "test"):
        raise ValueError(f"`split` must be 'train' or 'test' or left out, got {split!r}.")
    rows = [code_row(row) for row in own_problem_rows()]
    if split is not None:
        rows = [row for index, row in enumerate(rows) if (index % 5 == 4) == (split == "test")]
    return Dataset.from_list(rows)
