"""Rows as people have them: pure conversions, then what student, tools and teacher make of them."""

import copy
import json
import os

import pytest
import tiny
from datasets import Dataset
from test_agents import add, call, make, rows_of

from sdpo_trl.rows import declared_tools, message, prompt_row, tool_name

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

ADD = {
    "name": "add",
    "description": "Adds, in this row's words.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
NESTED = {"type": "function", "function": ADD}
USER = {"role": "user", "content": "1+1?"}


# Pure


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ({"role": "user", "content": "q", "tool_calls": None}, {"role": "user", "content": "q"}),
        ({"from": "human", "value": "q"}, {"role": "user", "content": "q"}),
        ({"from": "gpt", "value": "a"}, {"role": "assistant", "content": "a"}),
        ({"from": "system", "value": "s"}, {"role": "system", "content": "s"}),
        ({"from": "AI", "value": "a"}, {"role": "assistant", "content": "a"}),
        ({"from": "chatgpt", "value": "a"}, {"role": "assistant", "content": "a"}),
        ({"from": "tool_response", "value": "3"}, {"role": "tool", "content": "3"}),
        ({"role": "Assistant", "content": "a"}, {"role": "assistant", "content": "a"}),
        ({"role": "ipython", "content": "3"}, {"role": "ipython", "content": "3"}),
        ({"from": "observation", "value": "größer"}, {"role": "tool", "content": "größer"}),
        ({"role": "tool", "content": "3", "name": "add"}, {"role": "tool", "content": "3", "name": "add"}),
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        (
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
            },
        ),
        (
            {
                "role": "assistant",
                "content": "x",
                "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}],
            },
            {
                "role": "assistant",
                "content": "x",
                "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
            },
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "q", "image": None}]},
            {"role": "user", "content": [{"type": "text", "text": "q"}]},
        ),
    ],
)
def test_a_turn_in_either_spelling(turn, expected):
    before = copy.deepcopy(turn)
    assert message(turn) == expected and turn == before


@pytest.mark.parametrize(
    ("turn", "error"),
    [
        ({"content": "q"}, "A turn needs `role` and `content`, or `from` and `value`"),
        ({"from": "function_call", "value": "add(1)"}, "not valid JSON"),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": "{"}]},
            "arguments of a tool call in a row is not valid JSON",
        ),
        ("hello", "A turn must be an object"),
        ({"from": "claude", "value": "a"}, "A turn is from 'claude', and that could be anybody. Known are: system"),
        ({"role": ["user"], "content": "q"}, "A turn needs `role`"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}, "with a `name` and `arguments`"),
        ({"role": "assistant", "tool_calls": ["add"]}, "with a `name` and `arguments`"),
        ({"role": "assistant", "tool_calls": "add"}, "`tool_calls` of a turn is not valid JSON"),
        ({"from": "function_call", "value": '"add"'}, "with a `name` and `arguments`"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[" * 5000}]}, "not valid JSON"),
    ],
)
def test_a_turn_that_cannot_be_read(turn, error):
    with pytest.raises(ValueError, match=error):
        message(turn)


@pytest.mark.parametrize("column", ["messages", "conversations"])
@pytest.mark.parametrize("answers", [0, 1, 2])
def test_a_trailing_answer_is_dropped_and_earlier_turns_stay(column, answers):
    earlier = [USER, {"role": "assistant", "content": "2"}, {"role": "tool", "content": "t"}]
    row = {column: [*earlier, *[{"role": "assistant", "content": "a"}] * answers], "answer": 7}
    before = copy.deepcopy(row)
    assert prompt_row(row) == {**row, "prompt": earlier} and row == before


def test_a_row_of_trls_is_returned_as_it_is():
    for row in (
        {"prompt": "q"},
        {"prompt": [USER]},
        {"prompt": [USER], "messages": [USER, USER]},
        {"environment": "x"},
    ):
        assert prompt_row(row) is row


def test_turns_and_calls_may_be_json_text():
    """As columns that could have no other type hold them."""
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    for written in (calls, json.dumps(calls), json.dumps(calls[0]), [{"name": "add", "arguments": '{"a": 1}'}]):
        row = {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": written}, USER]}
        expected = [USER, {"role": "assistant", "content": "", "tool_calls": calls}, USER]
        assert prompt_row(row)["prompt"] == prompt_row({"messages": json.dumps(row["messages"])})["prompt"] == expected
    for empty in ("", None, []):
        (turn, _) = prompt_row({"messages": [{"role": "assistant", "content": "x", "tool_calls": empty}, USER]})[
            "prompt"
        ]
        assert not turn.get("tool_calls")


@pytest.mark.parametrize("row", [{"messages": "hello"}, {"messages": {"role": ["user"]}}, {"prompt": ["hello"]}])
def test_what_is_no_conversation_is_refused(row):
    with pytest.raises(ValueError, match=r"not valid JSON|must be a list of turns|a list of messages"):
        prompt_row(row)


def test_nothing_to_answer():
    with pytest.raises(ValueError, match="hold nothing that could be answered"):
        prompt_row({"messages": [{"role": "assistant", "content": "hello"}]})


@pytest.mark.parametrize("source", ["prompt", "messages"])
@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_tools_of_the_system_message(source, text, role):
    tools = json.dumps([ADD]) if text else [ADD]
    row = {source: [{"role": role, "content": "s", "tools": tools}, USER]}
    made = prompt_row(row)
    assert made["prompt"] == [{"role": role, "content": "s"}, USER]
    assert declared_tools(made["tools"]) == [NESTED]
    assert prompt_row({**row, "tools": []})["tools"] == []  # the column counts


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ([], []),
        ("", []),
        ("null", None),
        ([ADD], [NESTED]),
        ([NESTED], [NESTED]),
        ([json.dumps(NESTED)], [NESTED]),
        (json.dumps([NESTED]), [NESTED]),
        (ADD, [NESTED]),
        (["add"], ["add"]),
        ([{**NESTED, "strict": None}], [NESTED]),
    ],
)
def test_declared_tools(value, expected):
    assert declared_tools(value) == expected
    assert [tool_name(tool) for tool in expected or []] == ["add"] * len(expected or [])


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (3, "must be a list of JSON schemas, got int"),
        ("[1", "not valid JSON"),
        ("[" * 5000, "not valid JSON"),
        ([{"function": "f"}], "has no `name`"),
        ([1], "by its JSON schema, or by its name; got int"),
        ([{"description": "x"}], "has no `name`"),
    ],
)
def test_tools_that_cannot_be_read(value, error):
    with pytest.raises(ValueError, match=error):
        declared_tools(value)


# In the trainer


def double(a: int) -> int:
    """
    Double a number.

    Args:
        a: The number.
    """
    return 2 * a


DOUBLE = {"name": "double", "description": "Doubles.", "parameters": {"type": "object", "properties": {}}}


def mixed_rows(**columns):
    """One row with its own `add`, one with `double` by name, one with nothing, one with all there is."""
    declared = [json.dumps([ADD]), json.dumps([DOUBLE]), "[]", None]
    rows = [{"messages": [{**USER, "content": f"task {i}"}, {"role": "assistant", "content": "-"}]} for i in range(4)]
    return Dataset.from_list([{**row, "tools": tools} for row, tools in zip(rows, declared, strict=True)])


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_only_the_declared_tools_are_described_and_run(tmp_path, weight):
    both = call("add", a=1, b=2) + call("double", a=5)
    data = mixed_rows()
    before = data.to_list()
    trainer = make(
        tmp_path, [[both + "$", "done$"]], data=data, trainer_tools=[add, double], per_device_train_batch_size=16,
        distillation_weight=weight, remove_unused_columns=True,
    )  # fmt: skip
    rows = rows_of(trainer)
    assert len(rows) == 16
    for prompt, parts, hint in rows:
        task = int(prompt.split("task ")[1][0])
        allowed = {0: ("add",), 1: ("double",), 2: (), 3: ("add", "double")}[task]
        for name, result in (("add", "<|tool|>3<|end|>"), ("double", "<|tool|>10<|end|>")):
            assert (f'"name": "{name}"' in prompt) == (f'"name": "{name}"' in hint) == (name in allowed)
            assert (result in parts[1][1]) == (name in allowed)
            assert (f"Tool {name} not found" in parts[1][1].replace("<unk>", "")) == (name not in allowed)
        assert ("in this row's words" in prompt) == (task == 0)
        assert "<|assistant|>-" not in prompt
    assert data.to_list() == before
    trainer.train()


def test_a_tool_that_nothing_runs_is_refused(tmp_path):
    data = Dataset.from_list([{"messages": [USER], "tools": json.dumps([{**ADD, "name": "other"}])}] * 2)
    with pytest.raises(ValueError, match=r"Row 0 of the batch declares the tool 'other', which nothing runs.*add"):
        tiny.micro_batches(make(tmp_path, data=data, trainer_tools=[add]))
    with pytest.raises(ValueError, match=r"known: none"):
        tiny.micro_batches(make(tmp_path, data=data))


def test_a_row_that_cannot_be_read_is_named(tmp_path):
    data = Dataset.from_list([{"messages": [USER]}, {"messages": [{"role": "assistant", "content": "a"}]}])
    with pytest.raises(ValueError, match=r"Row 4 of the batch cannot be read\. The `messages` of a row hold nothing"):
        tiny.micro_batches(make(tmp_path, data=data))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["a", None], r"Row 4 of the batch cannot be read\. Its prompt is missing"),
        (["a", ""], "The prompt of row 4 of the batch is empty"),
        ([[USER], []], r"Row 4 of the batch cannot be read\. Its prompt is missing or has no message"),
        ([[USER], None], r"Row 4 of the batch cannot be read\. Its prompt is missing"),
    ],
)
def test_a_row_without_a_prompt_is_named(tmp_path, prompts, message):
    with pytest.raises(ValueError, match=message):
        tiny.micro_batches(make(tmp_path, data=Dataset.from_dict({"prompt": prompts})))


def test_tools_for_a_text_are_refused(tmp_path):
    data = tiny.prompts(2, tools=[json.dumps([ADD])] * 2)
    with pytest.raises(ValueError, match="declares tools, but its prompt is plain text"):
        tiny.micro_batches(make(tmp_path, data=data))
    for rows in (data, tiny.prompts(2)):
        with pytest.raises(ValueError, match="row 0 of the batch is plain text, which has no place for tools"):
            tiny.micro_batches(make(tmp_path, data=rows, trainer_tools=[add]))


class Room:
    """An environment with two tools."""

    def reset(self, **kwargs):
        return " Go."

    def look(self) -> str:
        """Look."""
        return "dark"

    def jump(self) -> str:
        """Jump."""
        return "up"


def test_rows_choose_among_an_environments_tools(tmp_path):
    data = Dataset.from_list([{"messages": [{**USER, "content": f"task {i}"}], "tools": [name]}
                              for i, name in enumerate(("look", "jump"))])  # fmt: skip
    trainer = make(
        tmp_path, [[call("look") + call("jump") + "$", "done$"]], data=data, trainer_environment_factory=Room,
    )  # fmt: skip
    for prompt, parts, hint in rows_of(trainer):
        first = "task 0" in prompt
        for text in (prompt, hint):
            assert ('"name": "look"' in text) == first and ('"name": "jump"' in text) == (not first)
            assert "Go." in text
        assert ("dark" in parts[1][1]) == first and ("<|tool|>up" in parts[1][1]) == (not first)


def test_a_rollout_func_sees_the_rows_tools(tmp_path):
    trainer = make(tmp_path, data=mixed_rows(), trainer_rollout_func=tiny.scripted(["ok$"]))
    for prompt, _, hint in rows_of(trainer):
        assert prompt.split("<|user|>")[0] == hint.split("<|user|>")[0]
        assert ("in this row's words" in prompt) == ("task 0" in prompt)


class Yard(Room):
    """Another environment, with a tool of its own."""

    def dig(self) -> str:
        """Dig."""
        return "a bone"


def test_a_tool_of_another_environment_is_refused(tmp_path):
    data = Dataset.from_list([{"prompt": [USER], "environment": name, "tools": ["dig"]} for name in ("yard", "room")])
    trainer = make(tmp_path, data=data, trainer_environment_factory={"room": Room, "yard": Yard})
    with pytest.raises(
        ValueError, match=r"Row 4 of the batch declares the tool 'dig', which nothing runs.*jump, look"
    ):
        tiny.micro_batches(trainer)


def test_a_name_without_a_schema_is_refused_where_a_function_of_the_users_acts(tmp_path):
    data = Dataset.from_list([{"prompt": [USER], "tools": ["foo"]}] * 2)
    with pytest.raises(ValueError, match="declares the tool 'foo' by its name alone"):
        tiny.micro_batches(make(tmp_path, data=data, trainer_rollout_func=tiny.scripted(["ok$"])))


def test_only_the_declared_tools_run_without_distillation_too(tmp_path):
    """What is compared with GRPO has the same tools."""
    trainer = make(
        tmp_path, [[call("add", a=1, b=2) + "$", "done$"]], tiny.even_length, data=mixed_rows(),
        trainer_tools=[add, double], per_device_train_batch_size=16, distillation_weight=0.0,
    )  # fmt: skip
    (inputs,) = tiny.micro_batches(trainer)
    for i in range(16):
        prompt, answer = (trainer._tokenizer.decode(inputs[f"{name}_ids"][i]) for name in ("prompt", "completion"))
        task = int(prompt.split("task ")[1][0])
        assert ("<|tool|>3<|end|>" in answer) == (task in (0, 3)) and ("Tool add not found" in answer) == (
            task in (1, 2)
        )


@pytest.mark.parametrize("first", [0, 1])
def test_rows_with_and_without_tools_of_their_system_message(tmp_path, first):
    """Also where reward and feedback functions take all columns of the rows."""
    system = {"from": "system", "value": "s", "tools": json.dumps([ADD])}
    talks = [[system, {"from": "human", "value": "task 0"}], [{"from": "human", "value": "task 1"}]]
    data = Dataset.from_list([{"conversations": talks[first]}, {"conversations": talks[1 - first]}])
    seen = []

    def judge(prompts, completions, rewards, tools, **columns):
        seen.extend(tools)
        return ["wrong"] * len(prompts)

    trainer = make(
        tmp_path, [[call("double", a=5) + "$", "done$"]], tiny.never, data=data, trainer_tools=[add, double],
        trainer_feedback_func=judge,
    )  # fmt: skip
    for prompt, parts, hint in rows_of(trainer):
        told = "task 0" in prompt
        assert ("in this row's words" in prompt) == ("in this row's words" in hint) == told
        assert ("Tool double not found" in parts[1][1]) == told and ("<|tool|>10<|end|>" in parts[1][1]) != told
    assert sum(tools is None for tools in seen) == 4
