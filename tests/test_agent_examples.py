"""The two examples of agents: tools, tokenizer and remarks by hand, and runs of a few steps.

The whole runs take minutes each: `pytest -m slow tests/test_agent_examples.py`.
"""

import json
import random

import agent_desk as desk
import agent_distillation
import agent_feedback
import agent_house
import agent_model
import agent_tools
import pytest
import tiny
from trl import GRPOTrainer

from sdpo_trl import SDPOConfig, SDPOTrainer


def test_the_tools():
    assert agent_tools.weather("rome") == "25C"
    for given, unit, expected in (
        ("25C", "F", "77F"), ("77F", "C", "25C"), ("5C", "K", "278K"), ("20C", "R", "16R"), ("3h", "min", "180min"),
        ("90 min", "h", "1.50h"), ("-40C", "F", "-40F"),
    ):  # fmt: skip
        assert agent_tools.convert(given, unit) == expected
    for expression, value in (("77*2", "154"), ("1+2*(3-5)", "-3"), ("-7/2", "-3.50"), ("0.1+0.2", "0.30")):
        assert agent_tools.calculate(expression) == value
    assert agent_tools.calculate(" 77 * 2") == "154" and agent_tools.calculate(5, "*2") == "10"
    assert agent_tools.calculate("-1/300") == "0.00" and agent_tools.convert("-0.001s", "h") == "0.00h"
    assert agent_tools.calculate("7+1", "*2") == agent_tools.calculate("8", then="*2") == "16"


@pytest.mark.parametrize(
    "call",
    [
        lambda: agent_tools.weather("Rome!"),
        lambda: agent_tools.convert("25", "F"),
        lambda: agent_tools.convert("25C", "min"),
        lambda: agent_tools.convert("25X", "C"),
        lambda: agent_tools.calculate("__import__('os')"),
        lambda: agent_tools.calculate("2**9"),
        lambda: agent_tools.calculate("1/0"),
        lambda: agent_tools.calculate("(1"),
        lambda: agent_tools.calculate("True+1"),
        lambda: agent_tools.calculate("1e999"),
        lambda: agent_tools.calculate("1+" * 40 + "1"),
        lambda: agent_tools.calculate("1e300*1e300/7"),
        lambda: agent_tools.calculate("999999999*999999999"),
        lambda: agent_tools.calculate("9e307*" * 9 + "9"),
        lambda: agent_tools.calculate("\ud800"),
        lambda: agent_tools.calculate("nan"),
        lambda: agent_tools.calculate(""),
        lambda: agent_tools.calculate(["1"]),
        lambda: agent_tools.calculate(None),
        lambda: agent_tools.calculate("-" * 61),
        lambda: agent_tools.weather(["rome"]),
        lambda: agent_tools.convert("25C", ["F"]),
        lambda: agent_tools.convert({}, "F"),
        lambda: agent_tools.convert("\u0663C", "F"),  # a digit, but not one that people of this desk write
    ],
)
def test_nonsense_is_refused(call):
    with pytest.raises(ValueError):
        call()


def test_every_question_has_its_answer_and_no_held_out_one_is_trained_on():
    tasks = desk.all_tasks()
    assert len({task.question for task in tasks}) == len(tasks)
    assert not any("error" in task.answer for task in tasks)
    assert {task.answer for task in tasks if task.question == "rome in F times 2"} == {"154"}
    rest, held_out = desk.split(tasks, 40, random.Random(0))
    assert [sum(task.kind == kind for task in held_out) for kind in desk.KINDS] == [10] * 4
    assert not {task.question for task in rest} & {task.question for task in held_out}


@pytest.mark.parametrize("build", [agent_model.build_tokenizer, agent_house.build_tokenizer])
def test_the_tokenizer_reads_back_what_it_wrote_and_marks_the_assistants_turns(build):
    tokenizer = build()
    rng = random.Random(0)
    talks = [desk.solved(task, rng, slip_rate=0.3) for task in rng.sample(desk.all_tasks(), 30)]
    for talk, (ids, labels) in zip(talks, agent_model.encode(tokenizer, talks), strict=True):
        text = tokenizer.apply_chat_template(talk.messages, tools=agent_tools.TOOLS, tokenize=False)
        assert tokenizer.decode(ids) == text and tokenizer.unk_token_id not in ids
        turns = [message for message in talk.messages if message["role"] == "assistant"]
        learned = [turn for number, turn in enumerate(turns) if number not in talk.slips]
        assert labels.count(tokenizer.eos_token_id) == len(learned)
        own = tokenizer.decode([label for label in labels if label != -100]).split(agent_model.EOS)[:-1]
        for turn, said in zip(learned, own, strict=True):
            read = tokenizer.parse_response(tokenizer(said + agent_model.EOS).input_ids, prefix="<|assistant|>")
            assert read.get("tool_calls") == turn.get("tool_calls") and read.get("content", "") == turn["content"]


def test_the_careless_answer_in_the_end_with_what_they_saw():
    rng = random.Random(0)
    right = []
    for task in rng.sample(desk.all_tasks(), 200):
        talk = desk.careless(task, rng)
        assert "error" not in str(talk.messages)
        right.append(desk.is_right(talk.messages[1:], task.answer))
    assert 0.1 < sum(right) / len(right) < 0.5


@pytest.mark.parametrize(
    ("said", "right"),
    [("77F", 1), ("77 F", 1), ("77", 1), ("77C", 0), ("78F", 0), ("", 0), ("77F or so", 0)],
)
def test_the_reward(said, right):
    assert desk.right_answer([[{"role": "assistant", "content": said}]], ["77F"]) == [right]


def test_a_rollout_that_ends_in_a_call_has_no_answer():
    call = {"role": "assistant", "content": "77F", "tool_calls": [agent_tools.look_up("rome").message]}
    assert not desk.is_right([call], "77F") and not desk.is_right([], "77F")


ORDER = agent_house.Order("rome", "F", "*2")
RIGHT = [agent_tools.look_up("rome"), agent_tools.to_unit("25C", "F"), agent_tools.compute("77", "*2")]


STEPS = ["weather", "convert F", "calculate *2"]
RIGHTLY = [f"right step: {step}" for step in STEPS]


@pytest.mark.parametrize(
    ("turns", "remarks"),
    [
        ([*RIGHT, None], RIGHTLY),
        ([RIGHT[0], agent_tools.to_unit("25C", "K"), agent_tools.compute("298", "*2"), None],
         [RIGHTLY[0], "wrong unit: F", RIGHTLY[2]]),
        ([RIGHT[0], RIGHT[1], agent_tools.compute("77", "+3"), None], [*RIGHTLY[:2], "wrong step: calculate *2"]),
        ([RIGHT[0], RIGHT[2], RIGHT[2], None], [RIGHTLY[0], "wrong tool: convert F", RIGHTLY[2]]),
        ([RIGHT[0], None], [RIGHTLY[0], "missing step: convert F"]),
        ([None], ["missing step: weather"]),
        ([agent_tools.look_up("oslo"), *RIGHT[1:], None], ["wrong step: weather", *RIGHTLY[1:]]),
        ([agent_tools.to_unit("1C", "F"), agent_tools.to_unit("1C", "R"), RIGHT[2], None],
         ["wrong tool: weather", "wrong unit: F", RIGHTLY[2]]),
        ([*RIGHT, RIGHT[0], None], RIGHTLY),
        ([RIGHT[0], RIGHT[1], agent_tools.compute("77*2"), None], RIGHTLY),
    ],
)  # fmt: skip
def test_what_the_environment_says(turns, remarks):
    talk = desk.Conversation([])
    for call in turns:
        talk.say([call] if call else [], text="" if call else "154")
    assert agent_house.review(ORDER, talk.messages) == list(enumerate(remarks))


def test_new_words_have_no_meaning_in_the_warm_start():
    """A known word always goes with its step, a new one with each; told turns do what they are told."""
    house = agent_house.houses(0)
    talks = agent_house.warm_start_talks(house, 600, random.Random(0))
    meant = {}
    for talk in talks:
        question = talk.messages[0]["content"].split(";")[0]
        functions = [call["function"] for message in talk.messages for call in message.get("tool_calls", [])]
        unit = [f["arguments"]["unit"] for f in functions if f["name"] == "convert"]
        if not talk.slips:
            meant.setdefault(question.split()[1], set()).update(unit)
    for words, count in zip(house, (1, 3), strict=True):
        assert [len(meant[word]) for word in words.units] == [count] * 3
    for talk in talks:
        for line, said in zip(talk.messages, talk.messages[1:], strict=False):
            told = line["content"].rpartition(": ")[2].split()[-1] if line["role"] == "user" else ""
            turn = [m["role"] for m in talk.messages].index("assistant")
            slip = talk.messages.index(said) != turn and talk.slips
            if told and not slip and said.get("tool_calls") and ":" in line["content"]:
                function = said["tool_calls"][0]["function"]
                assert told in (function["name"], *function["arguments"].values())


# A few steps of each


def quick(module, folder, **options):
    return SDPOConfig(**{**module.DEFAULTS, "output_dir": str(folder), "per_device_train_batch_size": 8,
                         "max_steps": 2, "max_completion_length": 40, "num_generations": 2, **options})  # fmt: skip


def test_the_teachers_lines_stand_in_front_of_the_turns_that_they_are_about(tmp_path):
    tokenizer = agent_house.build_tokenizer()
    words = agent_house.houses(0)[1]
    args = quick(agent_feedback, tmp_path, max_completion_length=110)
    model = agent_model.build_model(tokenizer, 0, 16)
    trainer = agent_feedback.make(SDPOTrainer, model, tokenizer, args, agent_feedback.rows_of([ORDER] * 8, words))
    calls = (RIGHT[0], agent_tools.to_unit("25C", "K"), agent_tools.compute("298", "*2"))
    script = [f"<tool_call>{json.dumps(call.message['function'])}</tool_call>$" for call in calls]
    (inputs,) = tiny.micro_batches(tiny.acting(trainer, [[*script, "596$"]]))
    active = trainer._active(inputs)
    for row in range(8):
        read = inputs["teacher_completion_ids"][row][inputs["teacher_completion_mask"][row].bool()]
        assert "<|tool|>25C<|user|>wrong unit: F<|assistant|><tool_call>" in tokenizer.decode(read)
        distilled = tokenizer.decode(inputs["completion_ids"][row][active[row]])
        assert distilled == "".join(script).replace("$", agent_model.EOS)  # `hinted_turn`: all but the answer
    assert trainer.environments[0].feedback == [(0, RIGHTLY[0]), (1, "wrong unit: F"), (2, RIGHTLY[2])]


def test_a_small_run_of_the_feedback(tmp_path, capsys, monkeypatch):
    learned_from = {}
    plain = agent_feedback.make

    def watched(trainer_class, model, tokenizer, args, rows):
        learned_from.setdefault(trainer_class, []).append((args.learning_rate, args.num_generations, rows))
        return plain(trainer_class, model, tokenizer, args, rows)

    monkeypatch.setattr(agent_feedback, "make", watched)
    results = agent_feedback.main(
        ["--warm_steps", "2", "--max_steps", "2", "--held_out", "4", "--validation", "4", "--samples", "1",
         "--per_device_train_batch_size", "8", "--max_completion_length", "24", "--grpo_learning_rates", "1e-3",
         "--output_dir", str(tmp_path)]
    )  # fmt: skip
    written = json.loads((tmp_path / "results.json").read_text())
    assert written == json.loads(json.dumps(results))
    assert list(results["table"]) == ["before", "SDPO, own feedback", "GRPO"] and list(results["grpo"]) == ["0.001"]
    assert results["rollouts"] == 16 and results["table"]["GRPO"]["validation"] is not None
    assert "| SDPO, own feedback |" in capsys.readouterr().out and (tmp_path / "model.safetensors").exists()
    ((rate, group, rows),) = learned_from[GRPOTrainer]
    assert (rate, group) == (1e-3, 8)
    assert len(rows) == (len(agent_house.ORDERS) - 8) * 3 // 2  # a third of them in known words
    asked = learned_from[SDPOTrainer][0][2]["prompt"]  # the held-out ones
    assert len(asked) == 4 and not any(prompt in list(rows["prompt"]) for prompt in asked)


def test_the_share_of_known_words_is_checked():
    with pytest.raises(ValueError, match="known_share"):
        agent_feedback.FeedbackArguments(known_share=2)


def test_a_small_run_of_the_distillation(tmp_path, capsys):
    results = agent_distillation.main(
        ["--teacher_steps", "2", "--student_steps", "2", "--max_steps", "2", "--held_out", "4", "--prompts", "8",
         "--samples", "1", "--per_device_train_batch_size", "8", "--max_completion_length", "24",
         "--learning_rates", "1e-3", "2e-3", "--validation", "4", "--output_dir", str(tmp_path)]
    )  # fmt: skip
    written = json.loads((tmp_path / "results.json").read_text())
    assert written == json.loads(json.dumps(results))
    table = results["table"]
    assert list(table) == ["student before", "teacher", "student, on-policy", "student, fixed data"]
    learned = table["student, on-policy"]["tokens_trained"], table["student, fixed data"]["tokens_trained"]
    assert learned[0] > 0 and 0 <= learned[1] - learned[0] < 100  # the same budget, up to one trajectory
    for name, tried in results["rates"].items():
        assert list(tried) == ["0.001", "0.002"] and table[name] in tried.values()
        assert table[name]["validation"] == max(row["validation"] for row in tried.values())
    assert "| student, on-policy |" in capsys.readouterr().out
    again = agent_distillation.main(
        ["--model", str(tmp_path), "--teacher_model", str(tmp_path), "--max_steps", "1", "--held_out", "4",
         "--samples", "1", "--prompts", "4", "--per_device_train_batch_size", "4", "--max_completion_length", "24",
         "--learning_rates", "1e-3", "--validation", "4", "--output_dir", str(tmp_path / "again")]
    )  # fmt: skip
    assert again["table"]["teacher"] == again["table"]["student before"]
    with pytest.raises(ValueError, match="go together"):
        agent_distillation.main(["--model", str(tmp_path), "--output_dir", str(tmp_path)])


# Whole runs


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_on_policy_student_learns_at_least_what_fixed_data_teaches(tmp_path, seed):
    table = agent_distillation.main(["--seed", str(seed), "--output_dir", str(tmp_path)])["table"]
    accuracy = {name: row["accuracy"] for name, row in table.items()}
    assert accuracy["student, on-policy"] >= accuracy["student before"] + 0.25
    assert accuracy["student, on-policy"] >= accuracy["student, fixed data"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_agent_learns_from_what_its_environment_says(tmp_path, seed):
    table = agent_feedback.main(["--seed", str(seed), "--output_dir", str(tmp_path)])["table"]
    accuracy = {name: row["accuracy"] for name, row in table.items()}
    assert accuracy["SDPO, own feedback"] >= accuracy["before"] + 0.25
    assert accuracy["SDPO, own feedback"] > accuracy["GRPO"]
