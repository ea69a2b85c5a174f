"""The five feedback sources, end to end: what each rollout's teacher reads."""

import asyncio
import math
import os
from functools import partial

import pandas
import pytest
import tiny
import torch
from datasets import Dataset

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

LATEX = r"at \frac{1}{2} expected {x: [1, 2]} but got {prompt} {0} \\n \g<0> %s $y_{i}$"
CLOSING = "Correctly solve the original question."


def text_of(value):
    return value if isinstance(value, str) else value[-1]["content"]


def tag(prompt, completion):
    """A text that belongs to one rollout alone."""
    return f"[{text_of(prompt)} -> {text_of(completion)}]"


def tags(prompts, completions, **kwargs):
    return [tag(p, c) for p, c in zip(prompts, completions, strict=True)]


def told_rows(trainer):
    """`(student prompt, answer, teacher prompt or None)` of each row of the first rollout batch, decoded."""
    rows = []
    for inputs in tiny.micro_batches(trainer):
        for i, available in enumerate(inputs["feedback_available"].tolist()):
            prompt, answer, hint = (
                trainer._tokenizer.decode(inputs[f"{name}_ids"][i][inputs[f"{name}_mask"][i].bool()])
                for name in ("prompt", "completion", "teacher_prompt")
            )
            rows.append((prompt, answer.removesuffix("<eos>"), hint if available else None))
    return rows


# Each source reaches exactly its rollout


def by_log_extra():
    def reward(prompts, completions, log_extra, **kwargs):
        log_extra("feedback", tags(prompts, completions))
        return [0.0] * len(completions)

    return {"reward": reward}


def by_async_log_extra():
    async def reward(prompts, completions, log_extra, **kwargs):
        await asyncio.sleep(0.001)
        log_extra("feedback", tags(prompts, completions))
        return [0.0] * len(completions)

    return {"reward": reward}


def by_function():
    return {"trainer_feedback_func": lambda prompts, completions, rewards, **columns: tags(prompts, completions)}


async def async_tags(prompts, completions, rewards, **columns):
    await asyncio.sleep(0.001)
    return tags(prompts, completions)


def by_async_function():
    return {"trainer_feedback_func": async_tags}


def by_bound_async_function():
    class Judge:
        async def __call__(self, prompts, completions, rewards, **columns):
            return await async_tags(prompts, completions, rewards)

    return {"trainer_feedback_func": Judge()}


def by_partial_function():
    def judge(strictness, prompts, completions, rewards, **columns):
        return tags(prompts, completions)

    return {"trainer_feedback_func": partial(judge, 3)}


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    "source",
    [by_log_extra, by_async_log_extra, by_function, by_async_function, by_bound_async_function, by_partial_function],
)
def test_each_rollout_is_told_its_own_text(tmp_path, source, chat):
    options = {"reward": tiny.never, "data": tiny.prompts(8, chat=chat), **source()}
    trainer = tiny.trainer(
        tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=4, num_generations=4, **options
    )
    rows = told_rows(trainer)
    assert len({prompt for prompt, *_ in rows}) == 4 and len({answer for _, answer, _ in rows}) > 8
    for prompt, answer, hint in rows:
        question = prompt.removeprefix("<|user|>").removesuffix("<|end|><|assistant|>")
        sampled = answer
        for special in ("<pad>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"):
            sampled = sampled.replace(special, "")
        assert hint.count("->") == 1
        assert f"[{question} -> {sampled}]" in hint


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("column", ["privileged_context", "demonstration"])
@pytest.mark.parametrize("remove_unused_columns", [False, True])
def test_a_column_reaches_the_rollouts_of_its_prompt(tmp_path, chat, column, remove_unused_columns):
    texts = [f"note number {i}." if i % 2 else None for i in range(8)]
    data = tiny.prompts(8, chat=chat, **{column: texts})
    trainer = tiny.trainer(
        tmp_path, tiny.never, data=data, per_device_train_batch_size=4, gradient_accumulation_steps=8,
        remove_unused_columns=remove_unused_columns,
    )  # fmt: skip
    rows = told_rows(trainer)
    assert len(rows) == 32
    for prompt, _, hint in rows:
        number = int(prompt.split("task ")[1][0])
        if number % 2:
            assert f"note number {number}." in hint and hint.count("note number") == 1
            assert ("Correct solution:" in hint) == (column == "demonstration")
        else:
            assert hint is None


class Room:
    """An environment with an opening observation, a tool, and feedback of its own."""

    def reset(self, **kwargs):
        self.looked = []
        return f" You see door {kwargs['door']}."

    def look(self, at: str) -> str:
        """
        Look at something.

        Args:
            at: What to look at.

        Returns:
            What is seen.
        """
        self.looked.append(at)
        return f"{at} is closed"

    @property
    def feedback(self):
        return f"you looked at {self.looked}" if self.looked else None


def call(at):
    return f'<tool_call>{{"name": "look", "arguments": {{"at": "{at}"}}}}</tool_call>$'


def test_an_environment_tells_its_own_rollout(tmp_path):
    answers = [call("attic"), "hello$", call("cellar"), "bye$"]
    data = tiny.prompts(4, chat=True, door=["A", "B", "C", "D"])
    trainer = tiny.trainer(
        tmp_path, tiny.never, data=data, max_completion_length=200, trainer_rollout_func=tiny.scripted(answers),
        trainer_environment_factory=Room, trainer_processing_class=tiny.tool_tokenizer(), model=big_model(),
    )  # fmt: skip
    rows = told_rows(trainer)
    assert sum(hint is not None for *_, hint in rows) == 4
    for prompt, answer, hint in rows:
        looked = [place for place in ("attic", "cellar") if place in answer]
        assert (hint is not None) == bool(looked)
        if looked:
            (place,) = looked
            assert f"you looked at ['{place}']" in hint
            assert f"{place} is closed" in answer  # what the tool said is context
            door = prompt.split("You see door ")[1][0]
            assert f"You see door {door}." in hint
            assert '"name": "look"' in prompt and '"name": "look"' in hint  # the tools are described to both
            assert hint.endswith("<|end|><|assistant|>") and prompt.endswith("<|end|><|assistant|>")
    inputs = tiny.micro_batches(trainer)[0]
    active = tiny.scored(inputs)
    for row in active.any(dim=1).nonzero().squeeze(1).tolist():
        scored = trainer._tokenizer.decode(inputs["completion_ids"][row][active[row]])
        assert "is closed" not in scored and "<tool_call>" in scored


def big_model():
    return tiny.build_model(max_position_embeddings=8192)


class Silent:
    """An environment without a tool or feedback."""

    def reset(self, **kwargs):
        return None


class Wrong(Silent):
    feedback = 3


def test_an_environment_without_feedback_gives_none(tmp_path):
    options = {"data": tiny.prompts(2, chat=True), "trainer_processing_class": tiny.tool_tokenizer()}
    trainer = tiny.trainer(tmp_path, tiny.never, trainer_environment_factory=Silent, **options)
    assert {hint for *_, hint in told_rows(trainer)} == {None}
    trainer = tiny.trainer(tmp_path, tiny.never, trainer_environment_factory=Wrong, **options)
    with pytest.raises(TypeError, match="The environments' `feedback` gave a int as the text of rollout 0"):
        told_rows(trainer)


def test_several_sources_for_one_rollout_are_joined_in_order(tmp_path):
    def reward(completions, log_extra, **kwargs):
        log_extra("feedback", ["first."] * len(completions))
        return [0.0] * len(completions)

    def second(completions, log_extra, **kwargs):
        log_extra("feedback", ["second."] * len(completions))
        return [0.0] * len(completions)

    trainer = tiny.trainer(
        tmp_path, [reward, second], data=tiny.prompts(4, privileged_context=["fourth."] * 4),
        trainer_feedback_func=lambda prompts, completions, rewards, **columns: ["third.", *[None] * 7],
    )  # fmt: skip
    hints = [hint for *_, hint in told_rows(trainer)]
    assert sorted(hint.count("third.") for hint in hints) == [0] * 7 + [1]
    assert sum("first.\n\nsecond.\n\nthird.\n\nfourth." in hint for hint in hints) == 1
    assert sum("first.\n\nsecond.\n\nfourth." in hint for hint in hints) == 7


@pytest.mark.parametrize("chat", [False, True])
def test_half_a_character_is_written_out(tmp_path, chat):
    """As a program's output has it that is no UTF-8, read with `surrogateescape`; no tokenizer takes it."""

    def told(completions, log_extra, **kwargs):
        log_extra("feedback", ["bad \udcff byte"] * len(completions))
        log_extra("output", ["\udcff"] * len(completions))
        return [0.0] * len(completions)

    trainer = tiny.trainer(tmp_path, told, data=tiny.prompts(4, chat=chat), log_completions=True)
    trainer.train()
    table = pandas.read_parquet(tmp_path / "completions" / "completions_00002.parquet")
    assert set(table["feedback"]) == {"bad \\udcff byte"} and set(table["output"]) == {"\\udcff"}
    assert table["teacher_prompt"].str.contains("bad \\udcff byte", regex=False).all()


@pytest.mark.parametrize("blank", ["", "  \n\t", None])
def test_a_blank_text_is_no_feedback(tmp_path, blank):
    trainer = tiny.trainer(
        tmp_path, tiny.never, trainer_feedback_func=lambda prompts, completions, rewards, **columns: [blank] * 8
    )
    assert {hint for *_, hint in told_rows(trainer)} == {None}


def test_a_worked_solution_is_shown_where_no_rollout_succeeded(tmp_path):
    data = tiny.prompts(2, demonstration=["WORKED 0", "WORKED 1"])
    trainer = tiny.trainer(
        tmp_path,
        lambda prompts, completions, **kwargs: [
            float(text == "good" and p.startswith("task 0")) for p, text in zip(prompts, completions, strict=True)
        ],
        data=data,
        trainer_rollout_func=tiny.scripted(["good$", "bad$", "bad$", "bad$"]),
    )  # fmt: skip
    rows = told_rows(trainer)
    assert len(rows) == 8
    for prompt, answer, hint in rows:
        if prompt.startswith("task 1"):
            assert "Correct solution:\n\nWORKED 1\n" in hint
        elif answer == "good":
            assert hint is None  # the group has a success, which is not shown to itself
        else:
            assert "Correct solution:\n\ngood\n" in hint and "WORKED" not in hint


# Columns and arguments


def test_columns_reach_both_functions(tmp_path):
    seen = {}

    def reward(prompts, completions, answer, level, **kwargs):
        seen["reward"] = (answer, level)
        return [0.25 if i % 2 else None for i in range(len(prompts))]

    def half(completions, **kwargs):
        return [0.5 if i % 4 else None for i in range(len(completions))]

    def judge(prompts, completions, rewards, answer, level, **columns):
        seen["judge"] = (answer, level)
        seen["rewards"], seen["rest"] = rewards, sorted(columns)
        return [f"expected {a}" for a in answer]

    data = tiny.prompts(2, answer=["one", "two"], level=[1, 2], privileged_context=["look", None])
    trainer = tiny.trainer(
        tmp_path, [reward, half], data=data, reward_weights=[1.0, 2.0], trainer_feedback_func=judge,
        success_reward_threshold=9.0,
    )  # fmt: skip
    rows = told_rows(trainer)
    assert seen["reward"] == seen["judge"]
    assert sorted(seen["judge"][0]) == ["one"] * 4 + ["two"] * 4 and sorted(seen["judge"][1]) == [1] * 4 + [2] * 4
    assert seen["rest"] == ["privileged_context"]
    nothing, *others = seen["rewards"][:4]
    assert math.isnan(nothing) and others == [1.25, 1.0, 1.25]
    for prompt, _, hint in rows:
        assert ("expected one" if prompt.startswith("task 0") else "expected two") in hint


def test_rows_are_unchanged_after_two_epochs(tmp_path):
    data = tiny.prompts(
        4, chat=True, privileged_context=["a", "b", "c", "d"], door=list("ABCD"), answer=[{"x": 1}] * 4
    )
    before = data.to_list()
    trainer = tiny.trainer(
        tmp_path, tiny.never, data=data, max_steps=-1, num_train_epochs=2, trainer_environment_factory=Room,
        trainer_processing_class=tiny.tool_tokenizer(), model=big_model(),
    )  # fmt: skip
    seen = []
    generate = trainer._generate_and_score_completions

    def watched(inputs):
        seen.append([{**row, "prompt": [dict(message) for message in row["prompt"]]} for row in inputs])
        output = generate(inputs)
        assert [{**row} for row in inputs] == seen[-1]
        return output

    trainer._generate_and_score_completions = watched
    trainer.train()
    assert len(seen) == 4
    assert trainer.train_dataset.to_list() == before and data.to_list() == before
    for rows in seen:
        assert all(row in before for row in rows)


# Errors


def gives(value):
    return {"trainer_feedback_func": lambda prompts, completions, rewards, **columns: value}


def logs(value):
    def reward(completions, log_extra, **kwargs):
        log_extra("feedback", value)
        return [0.0] * len(completions)

    return {"reward": reward}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (gives(["a"] * 7), ValueError, "`feedback_func` gave 7 feedback texts, but there are 8 rollouts"),
        (gives("text"), TypeError, "`feedback_func` must give a list with one `str` or `None` per rollout, got str"),
        (gives(None), TypeError, "`feedback_func` must give a list.*got NoneType"),
        (gives(text for text in "abcdefgh"), TypeError, "`feedback_func` must give a list.*got generator"),
        (gives([None] * 5 + [4] + ["a"] * 2), TypeError, "`feedback_func` gave a int as the text of rollout 5"),
        (logs(["a"] * 3), ValueError, r"log_extra\('feedback', ...\)` gave 3 feedback texts, but there are 8"),
        (logs(["a"] * 3 + [1.5] + ["a"] * 4), TypeError, r"`log_extra\('feedback', ...\)` gave a float.*rollout 3"),
        (logs("wrong!!!"), TypeError, "needs a list with one `str` or `None` per rollout, got (one|a) `str`"),
        ({"data": tiny.prompts(privileged_context=[1, 2, 3, 4])}, TypeError, "column `privileged_context` gave a int"),
        ({"data": tiny.prompts(demonstration=[["a"]] * 4)}, TypeError, "column `demonstration` gave a list"),
        (
            {**gives(["a"] * 8), "data": tiny.prompts(rewards=[1, 2, 3, 4])},
            ValueError,
            "column `rewards` collides with an argument of `feedback_func`",
        ),
    ],
)
def test_a_bad_value_is_named(tmp_path, options, error, message):
    trainer = tiny.trainer(tmp_path, **{"reward": tiny.never, **options})
    with pytest.raises(error, match=message):
        told_rows(trainer)


def test_a_function_that_returns_a_coroutine_without_being_async(tmp_path):
    """Such a wrapper is called as any other async function."""
    trainer = tiny.trainer(
        tmp_path, tiny.never, trainer_feedback_func=lambda *args, **columns: async_tags(*args, **columns)
    )
    assert all("->" in hint for *_, hint in told_rows(trainer))


# What surrounds the feedback


def conversation(system="be brief", extra=()):
    turns = [{"role": "system", "content": system}, *extra]
    rows = [[*turns, {"role": "user", "content": f"task {i}?"}] for i in range(2)]
    return Dataset.from_dict({"prompt": rows})


@pytest.mark.parametrize("think", [False, True])
@pytest.mark.parametrize("placement", ["last_user", "append"])
@pytest.mark.parametrize("feedback", [LATEX, "line\n" * 600], ids=["latex", "long"])
def test_system_turn_question_feedback_and_header_are_all_there(tmp_path, think, placement, feedback):
    earlier = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    trainer = tiny.trainer(
        tmp_path, tiny.never, model=big_model(), data=conversation(extra=earlier), reprompt_placement=placement,
        chat_template_kwargs={"think": think}, success_reward_threshold=9.0,
        trainer_feedback_func=lambda *args, **columns: [feedback, *[None] * 7],
    )  # fmt: skip
    rows = [row for row in told_rows(trainer) if row[2] is not None]
    assert len(rows) == 1
    for prompt, _, hint in rows:
        header = "<|assistant|><think>" if think else "<|assistant|>"
        assert prompt.endswith("<|end|>" + header) and hint.endswith("<|end|>" + header)
        assert feedback in hint and CLOSING in hint
        question = prompt.removesuffix(header)
        beginning = question.removesuffix("<|end|>")
        assert hint.startswith(beginning)
        assert beginning.startswith("<|system|>be brief<|end|><|user|>hi<|end|><|assistant|>hello<|end|><|user|>task ")
        assert hint.count("<|system|>") == 1 and hint.count("be brief") == 1
        assert hint.count("<|assistant|>") == 2 and hint.count("<|user|>") == (2 if placement == "last_user" else 3)
        if placement == "append":
            assert hint.startswith(question + "<|user|>")
            assert hint.count("task ") == 1


def test_a_demonstration_is_shown_in_a_chat(tmp_path):
    trainer = tiny.trainer(
        tmp_path,
        lambda completions, **kwargs: [1.0 if text_of(c) == r"\frac{1}{2} {x}" else 0.0 for c in completions],
        data=tiny.prompts(2, chat=True),
        trainer_rollout_func=tiny.scripted([r"\frac{1}{2} {x}$", "no$", "nn$", "mm$"]),
        max_completion_length=20,
    )
    rows = told_rows(trainer)
    assert sum(hint is None for *_, hint in rows) == 2
    for _, answer, hint in rows:
        if hint is not None:
            assert "Correct solution:\n\n\\frac{1}{2} {x}\n\n" in hint and answer in ("no", "nn", "mm")


def test_a_conversation_that_does_not_end_with_the_user_is_appended_to(tmp_path):
    turns = [{"role": "assistant", "content": "A"}, {"role": "tool", "content": "T"}]
    rows = [[{"role": "user", "content": f"task {i}"}, *turns] for i in range(2)]
    trainer = tiny.trainer(tmp_path, tiny.telling("bad"), data=Dataset.from_dict({"prompt": rows}))
    for prompt, _, hint in told_rows(trainer):
        assert hint.startswith(prompt.removesuffix("<|assistant|>") + "<|user|>")
        assert "bad" in hint


def test_a_template_that_refuses_two_user_turns_says_what_to_do(tmp_path):
    tokenizer = tiny.build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if not loop.first and m['role'] == loop.previtem['role'] %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    options = {"data": tiny.prompts(2, chat=True), "trainer_processing_class": tokenizer}
    with pytest.raises(ValueError, match=r"roles must alternate.*`reprompt_placement='last_user'`"):
        tiny.trainer(tmp_path, tiny.telling(), reprompt_placement="append", **options)
    assert all(
        hint.count("<|user|>") == 1 for *_, hint in told_rows(tiny.trainer(tmp_path, tiny.telling(), **options))
    )


# The budget


LONG = "".join(map(chr, range(48, 123))) * 20


def shortened_trainer(folder, budget, feedback=LONG, **options):
    return tiny.trainer(
        folder, tiny.never, data=conversation(), max_reprompt_len=budget,
        trainer_feedback_func=lambda *args, **columns: [feedback] * 8, **options,
    )  # fmt: skip


@pytest.mark.parametrize("budget", [200, 400])
@pytest.mark.parametrize("placement", ["last_user", "append"])
def test_feedback_is_cut_to_the_budget_and_nothing_else(tmp_path, budget, placement):
    trainer = shortened_trainer(tmp_path, budget, reprompt_placement=placement)
    inputs = tiny.micro_batches(trainer)[0]
    lengths = inputs["teacher_prompt_mask"].sum(dim=1)
    assert lengths.max() == lengths.min() and budget - 8 <= lengths.max() <= budget
    for prompt, _, hint in told_rows(trainer):
        assert hint.startswith(prompt.removesuffix("<|end|><|assistant|>"))
        assert hint.endswith(f"{CLOSING}\n<|end|><|assistant|>")
        assert "feedback from your unsuccessful earlier attempt:\n\n0123" in hint and "\n...\n" in hint
    trainer.train()
    assert all(row["sdpo/shortened_share"] == 1.0 for row in tiny.training_logs(trainer))


def test_nothing_is_cut_within_the_budget(tmp_path):
    trainer = shortened_trainer(tmp_path, 600, feedback="short")
    trainer.train()
    assert all(row["sdpo/shortened_share"] == 0.0 for row in tiny.training_logs(trainer))


def test_a_frame_that_is_too_long_is_an_error(tmp_path):
    trainer = shortened_trainer(tmp_path, 60)
    with pytest.raises(
        ValueError, match=r"prompt of row 0 leaves no room for its feedback within `max_reprompt_len=60`.*Raise"
    ):
        told_rows(trainer)


def test_a_frame_that_fits_is_no_error(tmp_path):
    """The longest budget that is refused is shorter than the frame with one character of feedback."""
    frame = len(told_rows(shortened_trainer(tmp_path, 600, feedback="z"))[0][2].replace("<|end|>", "E"))
    frame -= sum(len(name) - 1 for name in ("<|system|>", "<|user|>", "<|assistant|>"))
    shortened_trainer(tmp_path, frame, feedback="z")  # exactly one character
    told_rows(shortened_trainer(tmp_path, frame, feedback="z"))
    for text in ("zy", "zyx", "zyxwvu", "zyxwvutsrqponm"):
        told_rows(shortened_trainer(tmp_path, frame, feedback=text))


# Success


def test_success_is_the_weighted_reward(tmp_path):
    """0.7 + 0.2 + 0.1 in float32 reaches a threshold of 1; None counts as nothing."""

    def constant(value):
        return lambda completions, **kwargs: [value] * len(completions)

    for rewards, weights, expected in (
        ([0.7, 0.2, 0.1], None, 1.0),
        ([0.7, 0.2, 0.05], None, 0.0),
        ([1.0, None, None], [0.5, 1.0, 1.0], 0.0),
        ([1.0, None, 2.0], [0.5, 1.0, 0.25], 1.0),
        ([None, None, None], None, 0.0),
    ):
        trainer = tiny.trainer(tmp_path, [constant(value) for value in rewards], reward_weights=weights, max_steps=1)
        trainer.train()
        assert tiny.training_logs(trainer)[0]["sdpo/success_share"] == expected, (rewards, weights)


def test_success_is_never_the_advantage(tmp_path):
    """The best of a group of failures is a failure, the worst of a group of successes a success."""
    trainer = tiny.trainer(
        tmp_path,
        lambda prompts, completions, **kwargs: [
            (0.1 if p.startswith("task 0") else 1.0) * (1 + i % 4) for i, p in enumerate(prompts)
        ],
        data=tiny.prompts(2),
    )
    for prompt, _, hint in told_rows(trainer):
        assert (hint is not None) == prompt.startswith("task 1")


# Thinking


@pytest.mark.parametrize("parsed", [False, True], ids=["plain", "response_template"])
@pytest.mark.parametrize("opened", [False, True], ids=["own", "opened"])
def test_demonstrations_come_without_their_thinking(tmp_path, opened, parsed):
    start = "" if opened else "<think>"
    answers = [f"{start}secret</think>open$", "no$", f"{start}never ends$", "no$"]

    def reward(completions, **kwargs):
        return [1.0 if i in (0, 6) else 0.0 for i in range(len(completions))]

    tokenizer = tiny.build_tokenizer()
    if parsed:
        tokenizer.response_template = tiny.RESPONSE_TEMPLATE
    trainer = tiny.trainer(
        tmp_path, reward, data=tiny.prompts(2, chat=True), trainer_rollout_func=tiny.scripted(answers),
        chat_template_kwargs={"think": opened}, trainer_processing_class=tokenizer, max_completion_length=40,
    )  # fmt: skip
    rows = told_rows(trainer)
    hints = [hint for *_, hint in rows if hint is not None]
    assert len(hints) == 3  # the second group's success never answered
    for hint in hints:
        assert "Correct solution:\n\nopen\n\n" in hint
        assert "secret" not in hint and "never" not in hint


@pytest.mark.parametrize("question", ["task", "first <think> so"])
def test_a_text_is_not_taken_for_thinking(tmp_path, question):
    """Answers of a model that does not think, under a header that opened nothing; also if the question is about it."""
    trainer = tiny.trainer(
        tmp_path,
        tiny.always,
        data=Dataset.from_dict({"prompt": [[{"role": "user", "content": question}]] * 2}),
        trainer_rollout_func=tiny.scripted(["plain$", "other$"]),
    )
    for _, answer, hint in told_rows(trainer):
        assert ("other" if answer == "plain" else "plain") in hint or "plain" in hint


def test_rows_without_feedback_count_nowhere(tmp_path):
    def some(prompts, completions, rewards, **columns):
        return ["told" if i in (1, 6) else None for i in range(8)]

    trainer = tiny.trainer(
        tmp_path, tiny.never, trainer_feedback_func=some, trainer_rollout_func=tiny.scripted(["abcd$"]), max_steps=1
    )
    inputs = tiny.micro_batches(trainer)[0]
    assert inputs["feedback_available"].sum() == 2
    assert (inputs["active_rows"], inputs["active_tokens"]) == (2, 10)
    trainer.train()
    (log,) = tiny.training_logs(trainer)
    assert log["sdpo/feedback_share"] == log["sdpo/distilled_share"] == 0.25
    assert log["loss"] == pytest.approx(log["sdpo/divergence"], rel=1e-5)
    assert torch.isfinite(torch.tensor(log["grad_norm"]))
