"""Rollouts of several turns: who acts, what is scored, and what stays context."""

import asyncio
import json
import os
from importlib import resources

import pytest
import tiny
import torch
from datasets import Dataset
from transformers import GPT2Config
from trl import GRPOTrainer
from trl.chat_template_utils import add_response_schema, parse_response

from sdpo_trl import SDPOTrainer
from sdpo_trl.report import read_table
from sdpo_trl.reprompt import well_formed
from sdpo_trl.tool_calls import ResponseReader

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


def call(name, **arguments):
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: The first.
        b: The second.

    Returns:
        Their sum.
    """
    return a + b


async def wait(seconds: float) -> str:
    """
    Wait.

    Args:
        seconds: How long.

    Returns:
        A word.
    """
    await asyncio.sleep(seconds)
    return "waited"


class Room:
    """An environment with an opening observation and a tool."""

    def reset(self, **kwargs):
        return " You see a door."

    def look(self, at: str) -> str:
        """
        Look at something.

        Args:
            at: What to look at.

        Returns:
            What is seen.
        """
        return f"{at} is closed"

    feedback = "look again"


class Hall(Room):
    """Another one."""

    def reset(self, **kwargs):
        return " You see a hall."

    def enter(self) -> str:
        """Enter it."""
        return "inside"


def make(folder, scripts=None, reward=None, **options):
    options = {
        "data": tiny.prompts(2, chat=True),
        "model": tiny.build_model(max_position_embeddings=8192),
        "trainer_processing_class": tiny.tool_tokenizer(),
        "max_completion_length": 400,
        "shuffle_dataset": False,
        **options,
    }
    trainer = tiny.trainer(folder, reward or tiny.telling("wrong"), **options)
    return trainer if scripts is None else tiny.acting(trainer, scripts)


def rows_of(trainer):
    """`(prompt, [(is a target, text), ...], teacher's prompt)` of each row of the first batch."""
    rows = []
    for inputs in tiny.micro_batches(trainer):
        for i in range(len(inputs["prompt_ids"])):
            prompt, hint = (
                trainer._tokenizer.decode(inputs[f"{name}_ids"][i][inputs[f"{name}_mask"][i].bool()])
                for name in ("prompt", "teacher_prompt")
            )
            used = inputs["completion_mask"][i].bool()
            ids = inputs["completion_ids"][i][used].tolist()
            active = trainer._active(inputs)[i][used].tolist()
            parts, start = [], 0
            for end in range(1, len(ids) + 1):
                if end == len(ids) or active[end] != active[start]:
                    parts.append((active[start], trainer._tokenizer.decode(ids[start:end])))
                    start = end
            rows.append((prompt, parts, hint))
    return rows


def observed(*replies):
    """What stands between two turns, under the tests' template."""
    return "".join(f"<|tool|>{reply}<|end|>" for reply in replies) + "<|assistant|>"


# Ways to act

WAYS = {
    "tools": ({"trainer_tools": [add]}, call("add", a=1, b=2), "3"),
    "async tools": ({"trainer_tools": [add, wait]}, call("wait", seconds=0.001), "waited"),
    "environment": ({"trainer_environment_factory": Room}, call("look", at="it"), "it is closed"),
    "environments": (
        {
            "trainer_environment_factory": {"room": Room, "hall": Hall},
            "data": tiny.prompts(2, chat=True, environment=["room", "hall"]),
        },
        call("look", at="it"),
        "it is closed",
    ),
    "both": ({"trainer_environment_factory": Room, "trainer_tools": [add]}, call("add", a=1, b=2), "3"),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_sampled_token_is_a_target_and_nothing_else(tmp_path, way):
    options, first, reply = WAYS[way]
    trainer = make(tmp_path, [[first + "$", first + first + "$", "done$"], ["at once$"]], **options)
    rows = rows_of(trainer)
    assert len(rows) == 8
    long = [
        (True, first + "<eos>"), (False, observed(reply)), (True, first + first + "<eos>"),
        (False, observed(reply, reply)), (True, "done<eos>"),
    ]  # fmt: skip
    assert sorted(len(parts) for _, parts, _ in rows) == [1] * 4 + [5] * 4
    for prompt, parts, hint in rows:
        assert parts == (long if len(parts) == 5 else [(True, "at once<eos>")])
        described = prompt[: prompt.index("<|user|>")]
        assert '"name": ' in described and hint.startswith(described)  # the same tools
        if way == "environments":
            assert ('"name": "enter"' in described) == ("You see a hall." in prompt)
        if "environment" in way:
            seen = "You see a hall." if "You see a hall." in prompt else "You see a door."
            assert seen in prompt and seen in hint
            assert "look again" in hint
        assert "wrong" in hint and hint.endswith("<|end|><|assistant|>")


@pytest.mark.parametrize("way", WAYS)
def test_it_trains(tmp_path, way):
    options, first, _ = WAYS[way]
    trainer = make(tmp_path, [[first + "$", "done$"], ["at once$"]], max_steps=2, **options)
    before = tiny.trained(trainer.model)
    trainer.train()
    assert all(row["loss"] > 0 for row in tiny.training_logs(trainer))
    assert any(not torch.equal(before[name], value) for name, value in tiny.trained(trainer.model).items())


def test_a_rollout_func_with_its_own_mask(tmp_path):
    text = "ab$OBScd$"
    mask = [1, 1, 1, 0, 0, 0, 1, 1, 1]

    def rollout(batch, trainer):
        prompt_ids, _, _ = trainer._tokenize_prompts(batch)
        ids = [i for part in ("ab$", "OBScd$") for i in tiny.answer_ids(trainer._tokenizer, part)]
        assert len(ids) == len(mask) == len(text)
        count = len(batch)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [ids] * count,
            "logprobs": None,
            "env_mask": [mask] * count,
        }

    for _, parts, _ in rows_of(make(tmp_path, trainer_rollout_func=rollout)):
        assert parts == [(True, "ab<eos>"), (False, "OBS"), (True, "cd<eos>")]


@pytest.mark.parametrize("weight", [1.0, 0.5])
@pytest.mark.parametrize("impl", ["fused", "reference"])
def test_changing_the_logits_of_context_changes_no_gradient(tmp_path, monkeypatch, weight, impl):
    options, first, _ = WAYS["tools"]
    trainer = make(
        tmp_path, [[first + "$", "done$"], ["at once$"]], distillation_weight=weight, distillation_impl=impl,
        reward=tiny.telling("wrong", tiny.even_length), **options,
    )  # fmt: skip
    (inputs,) = tiny.micro_batches(trainer)
    plain_loss, plain = tiny.gradient(trainer, inputs)
    context = ~trainer._loss_mask(inputs)  # tools, inserted markers, padding
    assert 0 < context.sum() < context.numel()
    head = trainer._tap.head
    moved = []

    def shifted(hidden):
        """Other logits wherever a token of the context is predicted."""
        if hidden.dim() == 3 and hidden.requires_grad:
            width = context.size(1)
            noise = torch.zeros_like(hidden)
            noise[:, -width - 1 : -1][context] = 5.0
            moved.append(noise.abs().sum())
            hidden = hidden + noise
        return head(hidden)

    monkeypatch.setattr(trainer._tap, "head", shifted)
    loss, gradient = tiny.gradient(trainer, inputs)
    assert moved and loss == plain_loss
    tiny.assert_equal(gradient, plain)


def test_a_context_token_is_read_by_student_and_teacher(tmp_path):
    """It predicts nothing, but what follows depends on it: other replies, another loss."""
    losses = []
    for reply in ("3", "4"):
        first = WAYS["tools"][1]

        def fixed(a: int, b: int, reply: str = reply) -> str:
            """
            Add.

            Args:
                a: One.
                b: Another.
                reply: Always the same.
            """
            return reply

        fixed.__name__ = "add"
        trainer = make(tmp_path, [[first + "$", "done$"]], trainer_tools=[fixed])
        (inputs,) = tiny.micro_batches(trainer)
        losses.append(tiny.gradient(trainer, inputs)[0])
    assert losses[0] != losses[1]


def test_the_divergence_falls_over_two_turns(tmp_path):
    """A controlled interaction: the same two turns, a teacher that is another model."""
    options, first, _ = WAYS["tools"]
    trainer = make(
        tmp_path, [[first + "$", "done$"]], reward=[tiny.never], teacher_context="none", learning_rate=1e-2,
        trainer_teacher_model=tiny.build_model(seed=7, max_position_embeddings=8192), max_steps=12,
        lr_scheduler_type="constant", **options,
    )  # fmt: skip
    trainer.train()
    values = [row["sdpo/divergence"] for row in tiny.training_logs(trainer)]
    assert values[-1] < 0.5 * values[0] and all(
        later < earlier for earlier, later in zip(values, values[3:], strict=False)
    )


# What goes wrong becomes an observation


def broken(a: int) -> int:
    """
    Fail.

    Args:
        a: Anything.
    """
    raise RuntimeError("überlastet: {a}")


async def broken_later() -> int:
    """Fail later."""
    raise RuntimeError("too late")


def listed() -> list:
    """Give a plain list."""
    return [1, "größer"]


def leave() -> str:
    """End the process."""
    raise SystemExit(3)


class Panic(BaseException):
    """As compiled code raises it: no `Exception`."""


def panic() -> str:
    """Raise what is no `Exception`."""
    raise Panic("out of bounds")


async def cancelled() -> str:
    """Be cancelled."""
    raise asyncio.CancelledError


async def impatient() -> str:
    """Run out of time, without a word."""
    raise TimeoutError


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("it has no words")


def mute() -> str:
    """Fail without words."""
    raise Mute


def forgotten() -> str:
    """Give what was never awaited."""
    return wait(0.0)


def picture() -> list:
    """Give an image."""
    return [{"type": "image", "image": 1}, {"type": "text", "text": "seen"}]


class Unreadable:
    def __str__(self):
        raise ValueError("it has no words")


def unreadable() -> str:
    """Give something without a text."""
    return Unreadable()


def long() -> str:
    """Give much."""
    return "0123456789" * 20 + "END"


WRONG = {
    "unknown": (call("missing", a=1), "Tool missing not found."),
    "json": ('<tool_call>{"name": "add", "arg</tool_call>', "The tool call could not be read"),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', "The tool call could not be read"),
    "a list": ("<tool_call>[1]</tool_call>", "The tool call could not be read"),
    "arguments": ('<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>', "must be a mapping, not list"),
    "text": ('<tool_call>{"name": "add", "arguments": "x"}</tool_call>', "must be a mapping, not str"),
    "too few": (call("add", a=1), "missing 1 required positional argument"),
    "raises": (call("broken", a=1), "überlastet: {a}"),
    "raises later": (call("broken_later"), "too late"),
    "named as ours": (call("invalid_tool_call"), "is not a tool"),
    "half a character": (call("add", a="\ud800"), "missing 1 required positional argument"),
    "half a character as its name": (call("X").replace("X", r"\ud800"), r"Tool \\ud800 not found."),
    "depth": (call("add", a=[[[1]]]).replace("[[[1]]]", "[" * 70 + "]" * 70), "more than 64 levels deep"),
    "exits": (call("leave"), "the tool ended with status 3"),
    "without words": (call("unreadable"), "it has no words"),
    "no exception": (call("panic"), "Panic: out of bounds"),
    "cancelled": (call("cancelled"), "CancelledError"),
    "no text": (call("impatient"), "TimeoutError"),
    "no words": (call("mute"), "Mute"),
    "a coroutine": (call("forgotten"), "declare it with `async def`"),
    "an image": (call("picture"), "gave an image, and this model reads text alone"),
}
EVERYTHING = [add, broken, broken_later, leave, listed, long, unreadable]
RARE = [panic, cancelled, impatient, mute, forgotten, picture]


@pytest.mark.parametrize("kind", WRONG)
def test_what_goes_wrong_is_read_by_the_student(tmp_path, kind):
    first, message = WRONG[kind]
    tools = [tool for tool in EVERYTHING + RARE if f'"{tool.__name__}"' in first] or [add]
    trainer = make(tmp_path, [[first + "$", "done$"]], trainer_tools=tools, max_completion_length=600)
    seen = []
    rewards = trainer._calculate_rewards
    trainer._calculate_rewards = lambda *args: (seen.extend(args[2]), rewards(*args))[1]
    for _, parts, _ in rows_of(trainer):
        assert [active for active, _ in parts] == [True, False, True]
        assert parts[0][1] == first + "<eos>" and parts[2][1] == "done<eos>"
        assert "<|tool|>{" in parts[1][1] and "error" in parts[1][1]
    assert len(seen) == 8
    for turns in seen:
        assert [turn["role"] for turn in turns] == ["assistant", "tool", "assistant"]
        assert message in turns[1]["content"]
    assert "parse_response" not in vars(trainer._tokenizer)
    assert trainer._failure_count == trainer._call_count == 8 and not trainer._tool_successes


def test_an_interrupt_of_the_users_is_no_reply(tmp_path):
    def interrupted() -> str:
        """Be interrupted."""
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny.micro_batches(make(tmp_path, [[call("interrupted") + "$", "done$"]], trainer_tools=[interrupted]))


def test_a_tool_may_change_what_it_is_given(tmp_path):
    """What the student wrote stays as it is."""

    def take(items: list) -> str:
        """
        Empty a list.

        Args:
            items: The list.
        """
        return f"{items.pop()} of {len(items) + 1}"

    trainer = make(tmp_path, [[call("take", items=[1, 2]) + "$", "done$"]], trainer_tools=[take])
    seen = []
    rewards = trainer._calculate_rewards
    trainer._calculate_rewards = lambda *args: (seen.extend(args[2]), rewards(*args))[1]
    for _, parts, _ in rows_of(trainer):
        assert parts[1] == (False, observed("2 of 2"))
    assert all(turns[0]["tool_calls"][0]["function"]["arguments"] == {"items": [1, 2]} for turns in seen)


@pytest.mark.parametrize("value", ["9" * 4301, "[" * 500 + "]" * 500, "[" * 100_000, '{"a":' * 5000])
def test_json_that_python_cannot_read_is_a_call_that_cannot_be_read(value):
    tokenizer = tiny.tool_tokenizer()
    text = f'<tool_call>{{"name": "add", "arguments": {{"a": {value}}}}}</tool_call>'
    for end in ("$", ""):
        ids = tiny.answer_ids(tokenizer, text + end)
        with ResponseReader(tokenizer, [tokenizer.eos_token_id]).reading():
            said = parse_response(tokenizer, ids, prefix=tiny.answer_ids(tokenizer, "<|assistant|>"))
        assert said["content"].startswith("<tool_call>")
        assert [made["function"]["name"] for made in said.get("tool_calls", [])] == ["invalid_tool_call"] * bool(end)


@pytest.mark.parametrize("template", ["qwen3_5_nothink", "glm4moe", "llama3_1", "qwen3"])
def test_a_call_in_a_form_that_the_template_does_not_know(template):
    """Where calls have a tag, what follows it is a call, however it is written; elsewhere it is an answer."""
    tokenizer = tiny.build_tokenizer()
    tokenizer.chat_template = resources.files("trl").joinpath(f"chat_templates/{template}.jinja").read_text()
    tokenizer = add_response_schema(tokenizer)
    question = [{"role": "user", "content": "q"}]
    prefix = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    tagged = template != "llama3_1"
    for text in ("<tool_call></tool_call>", "so: <tool_call> add 1 and 2", "<tool_call>", '{"name": "Bob"}'):
        for end in ("$", ""):
            with ResponseReader(tokenizer, [tokenizer.eos_token_id]).reading():
                said = parse_response(tokenizer, tiny.answer_ids(tokenizer, text + end), prefix=prefix)
            calls = [made["function"] for made in said.get("tool_calls", [])]
            if tagged and end and "<tool_call>" in text:
                assert len(calls) == 1, (text, said)
                assert calls[0]["name"] not in ("add", "Bob")
            elif end:
                assert not calls


def test_a_good_call_beside_bad_ones(tmp_path):
    first = call("missing") + call("add", a=1, b=2) + call("broken", a=1)
    trainer = make(tmp_path, [[first + "$", "done$"]], trainer_tools=EVERYTHING)
    for _, parts, _ in rows_of(trainer):
        assert parts[1][1].count("<|tool|>") == 3 and "<|tool|>3<|end|>" in parts[1][1]


def test_a_plain_list_is_shown_as_text(tmp_path):
    trainer = make(tmp_path, [[call("listed") + "$", "done$"]], trainer_tools=EVERYTHING)
    seen = []
    rewards = trainer._calculate_rewards
    trainer._calculate_rewards = lambda *args: (seen.extend(args[2]), rewards(*args))[1]
    rows_of(trainer)
    assert {turns[1]["content"] for turns in seen} == {"[1, 'größer']"}


REPLIES = {
    "half a character": ("a\ud800", "a\\ud800"),
    "objects with a type": ([{"type": "fruit", "name": "apple"}], "[{'type': 'fruit', 'name': 'apple'}]"),
    "no text in a text": ([{"type": "text"}], "[{'type': 'text'}]"),
    "no image in an image": ([{"type": "image", "url": "u"}], "[{'type': 'image', 'url': 'u'}]"),
    "texts": ([{"type": "text", "text": "a\ud800"}, {"type": "text", "text": "b"}], "a\\ud800b"),
    "nothing": (None, "None"),
    "an empty list": ([], "[]"),
    "bytes": (b"\xff", "b'\\xff'"),
}


@pytest.mark.parametrize("limit", [None, 1000])
@pytest.mark.parametrize("kind", REPLIES)
def test_what_a_tool_gives_is_read_as_text(tmp_path, kind, limit):
    result, text = REPLIES[kind]

    def give() -> str:
        """Give it."""
        return result

    trainer = make(tmp_path, [[call("give") + "$", "done$"]], trainer_tools=[give], max_observation_length=limit)
    for _, parts, _ in rows_of(trainer):
        assert parts[1] == (False, observed(text))


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_the_table_holds_whatever_was_called_with(tmp_path, weight):
    """Arguments of other types in each row, or none at all, are more than a column's type can say."""
    arguments = [{}, {"z": 1}, {"z": "1"}, {"z": [1]}, {"z": {"b": 10**30}}, [1], "x", {"z": "\ud800ü"}]
    scripts = [[call("add").replace("{}", json.dumps(value)) + "$", "done$"] for value in arguments]
    scripts[0][0] = call("typed") + "$"

    def typed() -> list:
        """Give blocks."""
        return [{"type": "text", "text": "x"}, {"type": "note", "note": 1}]

    options = {"log_completions": True, "max_steps": 1, "distillation_weight": weight, "trainer_tools": [add, typed]}
    trainer = make(tmp_path, scripts, tiny.never if weight == 0.0 else None, **options)
    trainer.train()
    rows = read_table(tmp_path / "completions" / "completions_00001.parquet")
    assert len(rows) == 8
    for row, value in zip(rows, arguments, strict=True):
        if weight == 0.0 and not isinstance(value, dict):
            continue  # TRL takes it for an answer
        _, reply, last = (message["content"] for message in row.completion)
        assert last == "done" and isinstance(reply, str)
        (made,) = row.completion[0]["tool_calls"]
        value = value if isinstance(value, dict) else {"arguments": value}
        assert well_formed(made["function"]["arguments"]) == well_formed(value)
    assert rows[0].completion[1]["content"] == "x[note]"


class Torn(Room):
    """What it says holds half a character."""

    feedback = "again \ud800"

    def reset(self, **kwargs):
        return " You see \ud83d."


def test_half_a_character_is_written_out_wherever_it_comes_from(tmp_path):
    options = {"trainer_environment_factory": Torn, "log_completions": True, "max_steps": 1}
    trainer = make(tmp_path, [["at once$"]], tiny.never, **options)
    for prompt, _, hint in rows_of(trainer):
        assert "You see \\ud83d." in prompt and "You see \\ud83d." in hint and "again \\ud800" in hint
    make(tmp_path, [["at once$"]], tiny.never, **options).train()
    assert {row.feedback for row in read_table(tmp_path / "completions/completions_00001.parquet")} == {
        "again \\ud800"
    }


@pytest.mark.parametrize("limit", [None, 1000, 203, 202, 40, 3])
def test_observations_are_cut_to_their_length(tmp_path, limit):
    trainer = make(tmp_path, [[call("long") + "$", "done$"]], trainer_tools=EVERYTHING, max_observation_length=limit)
    for _, parts, _ in rows_of(trainer):
        reply = parts[1][1].removeprefix("<|tool|>").removesuffix("<|end|><|assistant|>")
        assert len(reply) == min(limit or 203, 203)
        assert reply.startswith("012") and (reply.endswith("END") or limit == 3)
        assert ("\n...\n" in reply) == (limit in (202, 40))


def test_a_text_that_only_looks_odd_is_an_answer(tmp_path):
    """Broken JSON without a call, and a call that was cut: nothing is called."""
    trainer = make(tmp_path, [['{"name": "add$'], ['<tool_call>{"name": "ad']], trainer_tools=EVERYTHING)
    assert {parts[0][1] for _, parts, _ in rows_of(trainer)} == {'{"name": "add<eos>', '<tool_call>{"name": "ad'}


# Limits


def test_the_number_of_turns(tmp_path):
    first = call("add", a=1, b=2) + "$"
    trainer = make(tmp_path, [[first] * 9], trainer_tools=[add], max_tool_calling_iterations=2)
    for _, parts, _ in rows_of(trainer):
        assert [active for active, _ in parts] == [True, False, True, False, True]
        assert all(text == first.replace("$", "<eos>") for active, text in parts if active)


def test_a_reply_that_does_not_fit_ends_the_rollout_and_what_was_sampled_stays(tmp_path):
    first = call("long") + "$"
    trainer = make(tmp_path, [[first, "done$"]], trainer_tools=EVERYTHING, max_completion_length=len(first) + 50)
    for _, parts, _ in rows_of(trainer):
        assert parts == [(True, first.replace("$", "<eos>"))]


def test_the_tokens_of_the_last_turn_fill_what_is_left(tmp_path):
    first = call("add", a=1, b=2) + "$"
    room = len(first) + len("T3EA") + 5
    trainer = make(tmp_path, [[first, "abcdefghij$"]], trainer_tools=[add], max_completion_length=room)
    for _, parts, _ in rows_of(trainer):
        assert parts[-1] == (True, "abcde")


def test_the_tokens_of_a_turn(tmp_path):
    trainer = make(tmp_path, trainer_tools=[add], max_turn_length=5)
    assert trainer.generation_config.max_new_tokens == 5
    for inputs in tiny.micro_batches(trainer):
        assert inputs["completion_mask"].sum(dim=1).max() <= 5
        assert torch.equal(trainer._active(inputs), inputs["completion_mask"].bool())
    first = call("add", a=1, b=2)
    trainer = make(tmp_path, [[first, "done$"]], trainer_tools=[add], max_turn_length=len(first))
    for _, parts, _ in rows_of(trainer):  # whole, but cut before its end token: nothing is called
        assert parts == [(True, first)]


@pytest.mark.parametrize("acts", [False, True])
def test_a_prompt_that_leaves_no_room_is_named(tmp_path, acts):
    data = tiny.prompts(4, chat=True).to_list()
    data[1]["prompt"][0]["content"] = "x" * 2000
    options = {"trainer_tools": [add], "trainer_processing_class": tiny.tool_tokenizer()} if acts else {}
    trainer = tiny.trainer(
        tmp_path, tiny.never, data=Dataset.from_list(data), shuffle_dataset=False, **options,
        model=tiny.build_model(max_position_embeddings=2000),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"prompt of row 4 of the batch has 2\d\d\d tokens.*nothing is cut"):
        tiny.micro_batches(trainer)


def test_generation_ends_with_the_models_positions(tmp_path, caplog):
    """Learned positions: one more would be an error of the embedding."""
    config = GPT2Config(
        vocab_size=104, n_embd=24, n_layer=2, n_head=2, n_positions=256, bos_token_id=1, eos_token_id=1,
        pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    data = [{"prompt": "x" * 250}, {"prompt": "y" * 100}]
    trainer = tiny.trainer(
        tmp_path, None, model=tiny.from_config(config), data=Dataset.from_list(data), shuffle_dataset=False,
        teacher_context="none", trainer_teacher_model=tiny.from_config(config, seed=5), max_completion_length=20,
    )  # fmt: skip
    (inputs,) = tiny.micro_batches(trainer)
    assert inputs["completion_mask"].sum(dim=1).max() == 6 and trainer.generation_config.max_new_tokens == 20
    assert "leaves 6 of the model's 256 positions" in caplog.text
    assert torch.equal(trainer._active(inputs), inputs["completion_mask"].bool())


@pytest.mark.parametrize("turn", [0, 1])
def test_a_turn_that_the_whole_length_cuts_calls_nothing(tmp_path, turn):
    """Its call is whole, but nobody could read the reply: the tool is not run either."""
    ran = []

    def note(at: str) -> str:
        """
        Note it.

        Args:
            at: What.
        """
        ran.append(at)
        return "ok"

    first, last = call("note", at="a") + "$", call("note", at="b")
    scripts = [[first] * turn + [last]]
    room = len(last) + turn * (len(first) + len("TokEA"))
    trainer = make(tmp_path, scripts, trainer_tools=[note], max_completion_length=room)
    for _, parts, _ in rows_of(trainer):
        assert parts[-1] == (True, last)
    assert ran == ["a"] * 8 * turn and trainer._call_count == 8 * turn


@pytest.mark.parametrize("stop", [None, ["</tool_call>"]])
def test_a_turn_may_end_at_a_stop_string(tmp_path, stop):
    """Then it has no end token, and calls all the same."""
    options = {} if stop is None else {"generation_kwargs": {"stop_strings": stop}}
    trainer = make(tmp_path, [[call("add", a=1, b=2), "done$"]], trainer_tools=[add], **options)
    for _, parts, _ in rows_of(trainer):
        assert len(parts) == (1 if stop is None else 3)


def test_a_turn_that_the_positions_cut_calls_nothing(tmp_path):
    """The longest row of a batch limits all; the call of a shorter one is whole, but its turn has no end."""
    data = tiny.prompts(2, chat=True).to_list()
    data[0]["prompt"][0]["content"] = "x" * 200
    first = call("add", a=1, b=2)
    trainer = make(tmp_path, data=Dataset.from_list(data), trainer_tools=[add])
    longest = max(map(len, trainer._tokenize_prompts([row["prompt"] for row in data])[0]))
    trainer.model.config.max_position_embeddings = longest + len(first)
    ids = torch.tensor(tiny.answer_ids(trainer._tokenizer, first + "$"))

    def generate(input_ids, generation_config, **kwargs):
        turn = ids[: generation_config.max_new_tokens]
        return torch.cat([input_ids, turn.expand(len(input_ids), -1)], dim=1)

    trainer.model.generate = generate
    (inputs,) = tiny.micro_batches(trainer)
    assert inputs["completion_ids"].tolist() == [ids[:-1].tolist()] * 8 and trainer._call_count == 0


@pytest.mark.parametrize("turns", [False, True])
def test_a_teacher_reads_no_further_than_its_positions(tmp_path, turns):
    """Answers may be as long as the positions reach, so the feedback gets what they leave."""
    config = GPT2Config(
        vocab_size=104, n_embd=24, n_layer=2, n_head=2, n_positions=256, bos_token_id=1, eos_token_id=1,
        pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    texts = ["ab$" + "x" * 20 + "c" * length + "$" for length in (20, 60)]
    masks = [[1] * 3 + [0] * 20 + [1] * (length + 1) for length in (20, 60)]
    told = [(1, "hint " * 60)] if turns else "hint " * 60
    data = Dataset.from_list([{"prompt": "p" * 50}, {"prompt": "q" * 50}])
    trainer = tiny.trainer(
        tmp_path, tiny.never, model=tiny.from_config(config), data=data,
        trainer_rollout_func=tiny.scripted(texts, masks), max_completion_length=256, num_generations=4,
        trainer_feedback_func=lambda prompts, completions, rewards, **columns: [told] * len(prompts),
    )  # fmt: skip
    (inputs,) = tiny.micro_batches(trainer)
    loss, _ = tiny.gradient(trainer, inputs)
    answer = "teacher_completion_mask" if turns else "completion_mask"
    read = inputs["teacher_prompt_mask"].sum(dim=1) + inputs[answer].sum(dim=1)
    assert loss > 0 and (read <= 256).all() and (read > 250).all()


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ([[1, 1, 1], [1] * 9], "3 values of `env_mask` for the 9 tokens of row 0"),
        ([[1] * 12], "12 values of `env_mask` for the 9 tokens of row 0"),
        ([[2] * 9], "other values than 0 and 1"),
    ],
)
def test_a_mask_that_does_not_fit_its_tokens_is_refused(tmp_path, masks, message):
    with pytest.raises(ValueError, match=message):
        tiny.micro_batches(make(tmp_path, trainer_rollout_func=tiny.scripted(["abXOBScd$"], masks)))


def test_nothing_is_cut_from_the_left(tmp_path):
    """A prompt far longer than the answer may be arrives whole, at student and teacher."""
    data = tiny.prompts(2, chat=True).to_list()
    for row in data:
        row["prompt"][0]["content"] = "BEGIN" + "x" * 1500
    trainer = make(tmp_path, [["ok$"]], data=Dataset.from_list(data), trainer_tools=[add], max_completion_length=9)
    for prompt, _, hint in rows_of(trainer):
        assert prompt.endswith("BEGIN" + "x" * 1500 + "<|end|><|assistant|>") and "BEGIN" + "x" * 1500 in hint


# Logs


def lookup(at: str) -> str:
    """
    Look something up.

    Args:
        at: What.
    """
    return at


def test_the_logs_of_rollouts(tmp_path):
    good, bad = call("add", a=1, b=2), call("broken", a=1)
    scripts = [[good + bad + "$", good + "$", "done$"], [call("nothing") + "$", "ab"], ["cd$"], ["cd$"]]
    trainer = make(
        tmp_path, scripts, data=tiny.prompts(2, chat=True), trainer_tools=[add, broken, lookup], max_steps=1,
        teacher_model_kind="base",
    )  # fmt: skip
    trainer.train()
    (row,) = tiny.training_logs(trainer)
    lengths = [len(text.replace("$", "E")) for script in scripts for text in script]
    assert row["sdpo/turns"] == 7 / 4 and row["sdpo/tool_calls"] == 1.0 and row["sdpo/tool_failures"] == 0.5
    assert row["sdpo/assistant_tokens"] == sum(lengths) / 4 and row["sdpo/truncated_share"] == 0.25
    assert row["sdpo/tool_success/add"] == 1.0 and row["sdpo/tool_success/broken"] == 0.0
    assert row["sdpo/tool_success/lookup"] is None  # never called
    assert row["sdpo/divergence/turn_3"] is None and row["sdpo/divergence/turn_4_on"] is None
    counts = [lengths[0] + lengths[3] + lengths[5] + lengths[6], lengths[1] + lengths[4], lengths[2]]
    parts = [row[f"sdpo/divergence/turn_{turn}"] * count for turn, count in enumerate(counts)]
    assert sum(parts) / sum(counts) == pytest.approx(row["sdpo/divergence"], rel=1e-5)


def test_an_unanswered_call_is_truncated_too(tmp_path):
    first = call("add", a=1, b=2) + "$"
    trainer = make(tmp_path, [[first] * 3], trainer_tools=[add], max_tool_calling_iterations=2, max_steps=1)
    trainer.train()
    (row,) = tiny.training_logs(trainer)
    assert row["sdpo/truncated_share"] == 1.0 and row["sdpo/turns"] == 3.0


def test_the_keys_do_not_depend_on_what_happened(tmp_path):
    keys = []
    for scripts in ([["at once$"]], [[call("add", a=1, b=2) + "$", "done$"]]):
        trainer = make(tmp_path, scripts, trainer_tools=[add], max_steps=3, num_iterations=2)
        trainer.train()
        keys += [{name for name in row if name.startswith("sdpo/")} for row in tiny.training_logs(trainer)]
        keys += [{name.removeprefix("eval_") for name in trainer.evaluate(tiny.prompts(2, chat=True))}]
    training = [found for found in keys if "sdpo/distillation_weight" in found]
    assert len(training) == 6 and all(found == training[0] for found in training)
    assert keys[3] == keys[7] and {n for n in keys[3] if "/turn_" in n} == {n for n in keys[0] if "/turn_" in n}


def test_no_such_logs_for_single_turns(tmp_path):
    trainer = tiny.trainer(tmp_path, max_steps=1)
    trainer.train()
    assert not [name for name in tiny.training_logs(trainer)[0] if "turn" in name or "tool" in name]


# Nothing of it in GRPO


def test_without_distillation_it_is_grpo_bit_for_bit(tmp_path):
    """Also where a call cannot be read: TRL takes it for an answer."""
    scripts = [[call("add", a=1, b=2) + "$", "done$"], [WRONG["json"][0] + "$"], [call("broken", a=1) + "$", "no$"]]
    weights = []
    for cls in (SDPOTrainer, GRPOTrainer):
        args = tiny.config(tmp_path, distillation_weight=0.0, max_completion_length=400)
        trainer = cls(
            tiny.build_model(max_position_embeddings=8192), tiny.even_length, args, tiny.prompts(2, chat=True),
            processing_class=tiny.tool_tokenizer(), tools=[add, broken],
        )  # fmt: skip
        tiny.acting(trainer, scripts).train()
        weights.append(tiny.trained(trainer.model))
    tiny.assert_equal(*weights)


@pytest.mark.parametrize("feedback", ["wrong", [(1, "wrong")]])
def test_a_rollout_that_fills_the_positions_is_not_distilled_and_the_others_are(tmp_path, feedback, caplog):
    """Sampling decides how long an answer gets, so that it must not end the run."""
    texts = ["ab$" + "x" * 20 + "c" * 183, "ab$" + "x" * 20 + "c" * 20 + "$"]
    masks = [[1] * 3 + [0] * 20 + [1] * 183, [1] * 3 + [0] * 20 + [1] * 21]
    trainer = tiny.trainer(
        tmp_path, tiny.never, model=tiny.build_model(max_position_embeddings=256), max_completion_length=256,
        data=Dataset.from_list([{"prompt": "p" * 50}, {"prompt": "q" * 50}]), num_generations=4,
        trainer_rollout_func=tiny.scripted(texts, masks),
        trainer_feedback_func=lambda prompts, completions, rewards, **columns: [feedback] * len(prompts),
    )  # fmt: skip
    (inputs,) = tiny.micro_batches(trainer)
    lengths, active = inputs["completion_mask"].sum(1), trainer._active(inputs).sum(1)
    assert set(lengths.tolist()) == {206, 44}
    assert (active[lengths == 206] == 0).all() and (active[lengths == 44] == 24).all()
    assert not inputs["feedback_available"][lengths == 206].any()
    assert "fills the model's positions" in caplog.text
    trainer.compute_loss(trainer.model, inputs).backward()
