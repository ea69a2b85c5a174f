"""The two examples of agents: tools, tokenizer and remarks by hand, and runs of a few steps.

The whole runs take minutes each: `pytest -m slow tests/test_agent_examples.py`.
"""

import json
import random
from dataclasses import fields

import agent_desk as desk
import agent_distillation
import agent_feedback
import agent_house
import agent_model
import agent_run
import agent_tools
import agent_zones
import pytest
import tiny
import torch
from transformers import LlamaForCausalLM, TrainingArguments
from trl import GRPOTrainer, SFTTrainer

from sdpo_trl import SDPOConfig, SDPOTrainer
from sdpo_trl.faults import CheckpointError


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


def test_a_zone_has_to_be_right_and_the_error_says_it():
    assert len(agent_tools.ZONE_OF) == 48
    assert {len(cities.split()) for cities in agent_tools.ZONES.values()} == {8}
    assert agent_tools.measure("rome", "red") == f"{agent_tools.ZONE_CELSIUS['rome']}C"
    for arguments, said in (
        (("rome", "blue"), "rome is red"), (("oslo", ["blue"]), "oslo is blue"), (("atlantis", "red"), "no city"),
        ((["rome"], "red"), "no city"), (("rome", ""), "rome is red"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            agent_tools.measure(*arguments)


def test_every_question_has_its_answer_and_the_groups_of_cities_share_none():
    tasks = agent_zones.questions(list(agent_tools.ZONE_OF))
    assert len({task.question for task in tasks}) == len(tasks)
    assert not any("error" in task.answer for task in tasks)
    (answer,) = [task.answer for task in tasks if task.question == "rome in F times 2"]
    celsius = agent_tools.ZONE_CELSIUS["rome"]
    assert answer == str((celsius * 9 // 5 + 32) * 2)
    groups = agent_zones.deal((24, 8, 16), random.Random(0))
    assert [len(group) for group in groups] == [24, 8, 16]
    assert sorted(city for group in groups for city in group) == sorted(agent_tools.ZONE_OF)
    chosen = agent_zones.choose(groups[2], 40, "held_out", random.Random(0))
    assert [sum(task.kind == kind for task in chosen) for kind in agent_zones.KINDS] == [10] * 4
    assert {city for task in chosen for city in agent_zones.asked_about(task)} <= set(groups[2])
    assert len({task.question for task in chosen}) == 40


def test_the_models_are_not_taught_the_questions_of_the_table(tmp_path, monkeypatch):
    taught, asked = [], []
    encode, rows_of = agent_model.encode, agent_distillation.rows_of
    monkeypatch.setattr(
        agent_model, "encode", lambda tokenizer, talks, tools: taught.extend(talks) or encode(tokenizer, talks, tools)
    )
    monkeypatch.setattr(
        agent_distillation, "rows_of", lambda tasks, system: asked.append(tasks) or rows_of(tasks, system)
    )
    few(agent_distillation, tmp_path, "--student_steps 40 --teacher_steps 40 --max_steps 1")
    names = {talk.messages[0]["content"].rpartition("; ")[2] for talk in taught}
    held_out, validation = asked[:2]
    assert len(taught) == 2 * 32 * 40
    assert not names & {task.question for task in (*held_out, *validation)}
    cities = [{city for task in tasks for city in agent_zones.asked_about(task)} for tasks in asked]
    assert not (cities[0] & cities[1] or cities[0] & cities[2] or cities[1] & cities[2])


def some_talks(count):
    """Conversations of everybody in the examples, each with its tools."""
    rng, house = random.Random(0), agent_house.houses(0)
    tasks = rng.sample(agent_zones.questions(list(agent_tools.ZONE_OF)), count)
    return [
        (lambda: agent_model.build_tokenizer(agent_zones.WORDS), agent_tools.ZONE_TOOLS,
         [agent_zones.solved(task, rng, slip_rate=0.3) for task in tasks]),
        (lambda: agent_model.build_tokenizer(agent_zones.WORDS), agent_tools.ZONE_TOOLS,
         [agent_zones.gives_up(task, rng) for task in tasks]),
        (agent_house.build_tokenizer, agent_tools.TOOLS, agent_house.warm_start_talks(house, count, rng)),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", range(3))
def test_the_tokenizer_reads_back_what_it_wrote_and_marks_the_assistants_turns(kind):
    build, tools, talks = some_talks(30)[kind]
    tokenizer = build()
    for talk, (ids, labels) in zip(talks, agent_model.encode(tokenizer, talks, tools), strict=True):
        text = tokenizer.apply_chat_template(talk.messages, tools=tools, tokenize=False)
        assert tokenizer.decode(ids) == text and tokenizer.unk_token_id not in ids
        turns = [message for message in talk.messages if message["role"] == "assistant"]
        learned = [turn for number, turn in enumerate(turns) if number not in talk.slips]
        assert labels.count(tokenizer.eos_token_id) == len(learned)
        own = tokenizer.decode([label for label in labels if label != -100]).split(agent_model.EOS)[:-1]
        for turn, said in zip(learned, own, strict=True):
            read = tokenizer.parse_response(tokenizer(said + agent_model.EOS).input_ids, prefix="<|assistant|>")
            assert read.get("tool_calls") == turn.get("tool_calls") and read.get("content", "") == turn["content"]


def test_the_teacher_gets_over_its_slips_and_the_student_mostly_gives_up():
    rng = random.Random(0)
    tasks = rng.sample(agent_zones.questions(list(agent_tools.ZONE_OF)), 400)
    for task in tasks[:100]:
        talk = agent_zones.solved(task, rng, slip_rate=0.3)
        assert desk.is_right(talk.messages[1:], task.answer)
        if 0 in talk.slips:  # a zone is wrong, and said
            assert "error" in str([m["content"] for m in talk.messages[2 : 2 + len(talk.messages[1]["tool_calls"])]])
    assert all("error" not in str(agent_zones.solved(task, rng).messages) for task in tasks[:20])
    ends = {True: [], False: []}  # told, or not
    for task in tasks:
        talk = agent_zones.gives_up(task, rng)
        told = ";" in talk.messages[0]["content"]
        ends[told].append(desk.is_right(talk.messages[1:], task.answer))
        failed = "error" in str(talk.messages)
        assert not (told and failed)
        assert ends[told][-1] or (failed and talk.messages[-1]["content"] == "no" and talk.turns == 2)
    assert all(ends[True]) and 0.2 < sum(ends[False]) / len(ends[False]) < 0.45
    assert 0.3 < len(ends[True]) / len(tasks) < 0.5


def test_elsewhere_a_city_has_another_zone_each_time():
    rng = random.Random(0)
    task = next(task for task in agent_zones.questions(["rome"]) if task.kind == "one step")
    zones = {agent_zones.gives_up(task, rng, told=1.0).messages[0]["content"].split("; ")[0] for _ in range(200)}
    assert zones == {f"rome is {zone}" for zone in agent_tools.ZONES}


@pytest.mark.parametrize(
    ("said", "right"),
    [("77F", 1), ("77 F", 1), ("77", 1), ("77C", 0), ("78F", 0), ("", 0), ("77F or so", 0)],
)
def test_the_reward(said, right):
    assert desk.right_answer([[{"role": "assistant", "content": said}]], ["77F"]) == [right]


def test_a_rollout_that_ends_in_a_call_has_no_answer():
    call = {"role": "assistant", "content": "77F", "tool_calls": [agent_tools.look_up("rome").message]}
    assert not desk.is_right([call], "77F") and not desk.is_right([], "77F")


TASK = desk.chain("rome", "F", look_up=agent_zones.look_up)
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
    checked = 0
    for talk in talks:
        for line, said in zip(talk.messages, talk.messages[1:], strict=False):
            told = line["content"].rpartition(": ")[2].split()[-1] if line["role"] == "user" else ""
            turn = [m["role"] for m in talk.messages].index("assistant")
            slip = talk.messages.index(said) != turn and talk.slips
            if told and not slip and said.get("tool_calls") and ":" in line["content"]:
                function = said["tool_calls"][0]["function"]
                assert told in (function["name"], *function["arguments"].values())
                checked += 1
    assert checked > 300


def test_a_warm_start_learns_from_one_row_what_it_learns_from_the_same_row_twice():
    tokenizer = agent_model.build_tokenizer(agent_zones.WORDS)
    talk = agent_zones.solved(TASK, random.Random(0))
    trained = []
    for count in (1, 2):
        trained.append(agent_model.build_model(tokenizer, 0, 16))
        agent_model.warm_start(trained[-1], tokenizer, [talk] * count, 0, steps=2, batch_size=count)
    for one, two in zip(*(model.parameters() for model in trained), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 10, 11])
def test_a_warm_start_can_be_of_any_length(steps):
    tokenizer = agent_model.build_tokenizer()
    model = agent_model.build_model(tokenizer, 0, 16)
    before = model.lm_head.weight.detach().clone()
    talks = [agent_zones.solved(TASK, random.Random(0))]
    agent_model.warm_start(model, tokenizer, talks, 0, steps=steps, batch_size=1)
    assert not torch.equal(model.lm_head.weight, before)


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

    def watched(trainer_class, model, tokenizer, args, rows, *reward):
        learned_from.setdefault(trainer_class, []).append((args.learning_rate, args.num_generations, rows))
        return plain(trainer_class, model, tokenizer, args, rows, *reward)

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


FEW = {
    agent_distillation: (
        "--teacher_steps 2 --student_steps 2 --max_steps 2 --held_out 4 --prompts 8 --samples 1 --validation 4 "
        "--per_device_train_batch_size 8 --max_completion_length 24 --learning_rates 1e-3"
    ),
    agent_feedback: (
        "--warm_steps 2 --max_steps 2 --held_out 4 --validation 4 --samples 1 --per_device_train_batch_size 8 "
        "--max_completion_length 24 --grpo_learning_rates 1e-3"
    ),
}


def few(example, folder, options=""):
    """A run of two small steps; later options win."""
    return example.main([*FEW[example].split(), "--output_dir", str(folder), *options.split()])


@pytest.mark.parametrize(
    ("example", "options", "said"),
    [
        (agent_feedback, "--known_share 2", "known_share"),
        (agent_feedback, "--held_out 0", "held_out"),
        (agent_feedback, "--samples 0", "samples"),
        (agent_feedback, "--held_out 300 --validation 132", "none to train on"),
        (agent_feedback, "--grpo_learning_rates nan", "grpo_learning_rates"),
        (agent_feedback, "--per_device_train_batch_size 4", "multiple of 8"),
        (agent_feedback, "--beta 0.1", "beta"),
        (agent_feedback, "--resume_from_checkpoint there", "resume_from_checkpoint"),
        (agent_distillation, "--resume_from_checkpoint there", "resume_from_checkpoint"),
        (agent_distillation, "--held_out 5", "multiple of 4"),
        (agent_distillation, "--validation 0", "multiple of 4"),
        (agent_distillation, "--prompts 2", "multiple of 4"),
        (agent_distillation, "--validation 64", "asks for 16 questions of the kind 'one step'"),
        (agent_distillation, "--teacher_steps 0", "teacher_steps"),
        (agent_distillation, "--learning_rate 1e-3", "learning_rates"),
        (agent_distillation, "--learning_rates 0", "learning_rates"),
        (agent_distillation, "--learning_rates 1e-3 1e-3", "learning_rates"),
        (agent_distillation, "--teacher_context feedback", "teacher_context"),
        (agent_distillation, "--model there", "go together"),
        (agent_distillation, "--eval_strategy steps", "eval_strategy"),
        (agent_distillation, "--eval_on_start true", "eval_on_start"),
        (agent_distillation, "--teacher_model_kind live", "teacher_model_kind"),
        (agent_distillation, '--model_init_kwargs {{"dtype":"bfloat16"}}', "model_init_kwargs"),
        (agent_distillation, '--teacher_model_init_kwargs {{"dtype":"bfloat16"}}', "teacher_model_init_kwargs"),
        (agent_distillation, "--model {folder} --teacher_model there", "`--model .* is the `--output_dir`"),
        (agent_distillation, "--model there --teacher_model {folder}", "`--teacher_model .* is the `--output_dir`"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_computed(tmp_path, monkeypatch, example, options, said):
    monkeypatch.setattr(agent_model, "build_model", None)
    with pytest.raises(ValueError, match=said):
        few(example, tmp_path, options.format(folder=tmp_path))


def test_rates_that_a_file_leaves_empty_are_refused():
    with pytest.raises(ValueError, match="learning_rates"):
        agent_distillation.DistillationArguments(learning_rates=[])


@pytest.mark.parametrize("example", FEW)
def test_a_folder_that_cannot_be_written_is_refused_and_old_results_do_not_stay(tmp_path, monkeypatch, example):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(agent_model, "build_model", None)  # the first thing that takes time
    with pytest.raises(CheckpointError):
        few(example, tmp_path / "file" / "runs")
    (tmp_path / "results.json").write_text("of an earlier run")
    with pytest.raises(TypeError):
        few(example, tmp_path)
    assert not (tmp_path / "results.json").exists()


def test_the_accuracy_is_the_share_of_all_answers_also_where_batches_differ_in_size(tmp_path, monkeypatch):
    given = []

    def some(completions, answer, **columns):
        given.append([float(len(given) == 0)] * len(completions))
        return given[-1]

    monkeypatch.setattr(desk, "right_answer", some)
    tokenizer = agent_model.build_tokenizer(agent_zones.WORDS)
    rows = agent_distillation.rows_of(agent_zones.questions(["rome", "oslo"])[:8], False)
    args = quick(
        agent_distillation, tmp_path, per_device_eval_batch_size=5, max_completion_length=4, dataloader_drop_last=True
    )
    report, _ = agent_distillation.act(agent_model.build_model(tokenizer, 0, 16), tokenizer, args, rows)
    assert [len(rewards) for rewards in given] == [5, 3]
    assert report["accuracy"] == 5 / 8  # the mean of the batches' means is a half


def test_no_call_is_no_share_of_calls():
    names = ("tool_calls", "tool_failures", "truncated_share", "turns", "assistant_tokens")
    report = desk.summary({f"eval_sdpo/{name}": 0.0 for name in names}, [1.0, 0.0])
    assert report["good_calls"] is None and report["accuracy"] == 0.5
    assert "tool calls" not in desk.markdown({"before": report})


def test_a_recorded_rollout_is_what_was_sampled_and_nothing_else(tmp_path):
    """Replies are read and not learned; a turn that was cut has no end token, and a broken call stays as it was."""
    tokenizer = agent_model.build_tokenizer(agent_zones.WORDS)
    args = quick(agent_distillation, tmp_path, max_completion_length=400, num_generations=1)
    rows = agent_distillation.rows_of([TASK] * 8, False)
    trainer = agent_run.RecordingTrainer(
        agent_model.build_model(tokenizer, 0, 16), None, args, train_dataset=rows, processing_class=tokenizer,
        tools=agent_tools.ZONE_TOOLS, teacher_model=agent_model.build_model(tokenizer, 1, 16),
    )  # fmt: skip
    call = f"<tool_call>{json.dumps(agent_zones.look_up('rome').message['function'])}</tool_call>"
    script = [call + "$", '<tool_call>{"name": oops</tool_call>$', "77"]
    (inputs,) = tiny.micro_batches(tiny.acting(trainer, [script]))
    trainer.compute_loss(trainer.model, inputs)
    assert len(trainer.read) == 8
    for ids, labels in trainer.read:
        text, end = tokenizer.decode(ids), agent_model.EOS
        assert text.startswith("<|system|>measure convert calculate<|user|>rome in F<|assistant|><tool_call>")
        assert f"<|tool|>{TASK.turns[0][0].run()}<|assistant|>" in text and text.endswith("<|assistant|>77")
        assert tokenizer.decode([label for label in labels if label != -100]) == "".join(script).replace("$", end)
    learned = sum(label != -100 for _, labels in trainer.read for label in labels)
    assert agent_run.tokens_in(trainer.read) == learned > 0


def test_fixed_data_is_sampled_anew_until_there_is_enough(tmp_path):
    """The trainers set the seed, so that a second round with the same one would repeat the first."""
    tokenizer = agent_model.build_tokenizer(agent_zones.WORDS)
    model = agent_model.build_model(tokenizer, 0, 16)
    args = quick(agent_distillation, tmp_path, max_completion_length=12)
    rows = agent_distillation.rows_of(agent_zones.questions(["rome", "oslo"])[:4], False)
    data = agent_distillation.write_down(lambda: model, tokenizer, args, rows, 150)
    assert len(data) > 10 and len({tuple(ids) for ids, _ in data}) == len(data)
    assert 0 <= agent_run.tokens_in(data) - 150 < 12
    assert args.seed == SDPOConfig.seed


def test_both_ways_of_training_have_the_same_options(tmp_path, monkeypatch):
    tokenizer = agent_model.build_tokenizer(agent_zones.WORDS)
    model = agent_model.build_model(tokenizer, 0, 16)
    row = agent_model.encode(tokenizer, [agent_zones.solved(TASK, random.Random(0))])[0]
    args = quick(
        agent_distillation, tmp_path, adam_beta2=0.9, warmup_steps=3, weight_decay=0.2, lr_scheduler_type="cosine",
        optim="adafactor", num_generations=1, gradient_accumulation_steps=2, logging_steps=7,
        dataloader_drop_last=True,
    )  # fmt: skip
    seen = []
    monkeypatch.setattr(SFTTrainer, "train", lambda trainer: seen.append(trainer.args))
    agent_distillation.finetune(lambda: model, tokenizer, args, [row] * 4, 1e-3)
    changed = {
        "output_dir", "num_train_epochs", "max_steps", "learning_rate", "remove_unused_columns",
        "dataloader_drop_last",
    }  # fmt: skip
    for field in fields(TrainingArguments):
        if field.init and field.name not in changed:
            assert getattr(seen[0], field.name) == getattr(args, field.name), field.name
    assert seen[0].learning_rate == 1e-3 and not seen[0].dataloader_drop_last  # what was written is learned


@pytest.mark.parametrize(
    ("options", "rollouts", "updates_of_each"),
    [
        ("--logging_steps 5", 16, 1),  # no step is logged
        ("--max_steps -1 --num_train_epochs 2", 16, 1),
        ("--gradient_accumulation_steps 2 --prompts 16", 32, 1),
        ("--steps_per_generation 2 --prompts 16", 16, 1),
        ("--num_iterations 2", 8, 2),
    ],
)
def test_the_budget_is_what_the_updates_read(tmp_path, options, rollouts, updates_of_each):
    results = few(agent_distillation, tmp_path, f"--max_completion_length 1 {options}")
    assert results["rollouts"] == rollouts  # of one token each
    assert results["table"]["student, on-policy"]["tokens_trained"] == rollouts * updates_of_each
    assert results["table"]["student, fixed data"]["tokens_trained"] == rollouts * updates_of_each


def test_grpo_makes_as_many_rollouts_also_where_epochs_are_counted(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(agent_run, "rollouts", lambda trainer, count=agent_run.rollouts: made.append(count(trainer)))
    monkeypatch.setattr(agent_feedback, "ORDERS", agent_house.ORDERS[:24])
    few(agent_feedback, tmp_path, "--max_completion_length 1 --max_steps -1 --num_train_epochs 1")
    assert made == [24, 24]  # 16 orders, 8 of them also in known words


@pytest.mark.parametrize("example", FEW)
def test_each_training_keeps_its_checkpoints(tmp_path, example):
    few(example, tmp_path, "--save_strategy steps --save_steps 2")
    folders = {path.parent.name for path in tmp_path.glob("*/checkpoint-2")}
    assert folders == {
        agent_distillation: {"on_policy_0.001", "fixed_data_0.001"}, agent_feedback: {"sdpo", "grpo_0.001"},
    }[example]  # fmt: skip


def test_two_runs_of_a_seed_agree(tmp_path):
    runs = []
    for name in "ab":
        results = few(agent_feedback, tmp_path / name)
        costs = ("seconds", "peak_mib")
        rows = [{key: value for key, value in row.items() if key not in costs} for row in results["table"].values()]
        runs.append((rows, (tmp_path / name / "model.safetensors").read_bytes()))
    assert runs[0] == runs[1]


def test_all_models_are_told_the_same(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(agent_model, "success_rate", lambda model, tokenizer, talks: told.append(talks) or 0.5)
    few(agent_feedback, tmp_path)
    assert len(told) == 3 and told[0] == told[1] == told[2]


def test_a_small_run_of_the_distillation(tmp_path, capsys, caplog):
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
    assert (tmp_path / "teacher" / "model.safetensors").exists() and "no tokenizer" not in caplog.text
    again = agent_distillation.main(
        ["--model", str(tmp_path), "--teacher_model", str(tmp_path / "teacher"), "--max_steps", "1", "--held_out", "4",
         "--samples", "1", "--prompts", "4", "--per_device_train_batch_size", "4", "--max_completion_length", "24",
         "--learning_rates", "1e-3", "--validation", "4", "--output_dir", str(tmp_path / "again")]
    )  # fmt: skip
    assert list(again["table"]) == list(table) and not (tmp_path / "again" / "teacher").exists()


def test_each_model_has_its_part(tmp_path, monkeypatch):
    """Who learns, from whom, in both trainings: told by the weights, at the time."""
    seen = []

    def watch(name, *roles):
        plain = getattr(agent_distillation, name)

        def watched(*args):
            seen.append((name, *(build().state_dict() for build in args[: len(roles)])))  # each build is a model anew
            return plain(*args)

        monkeypatch.setattr(agent_distillation, name, watched)

    watch("distil", "student", "teacher")
    watch("write_down", "teacher")
    watch("finetune", "student")
    few(agent_distillation, tmp_path / "tiny")
    tokenizer = agent_model.build_tokenizer(agent_zones.WORDS)
    for name, seed in (("student", 1), ("teacher", 2)):
        agent_model.build_model(tokenizer, seed, 16).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    few(agent_distillation, tmp_path / "out", f"--model {tmp_path / 'student'} --teacher_model {tmp_path / 'teacher'}")
    teachers, students = (tmp_path / "tiny" / "teacher", tmp_path / "teacher"), (None, tmp_path / "student")
    for part, teacher, student in zip((seen[:3], seen[3:]), teachers, students, strict=True):
        (first, own, other), (second, wrote), (third, own_again) = part
        assert [first, second, third] == ["distil", "write_down", "finetune"]
        expected = LlamaForCausalLM.from_pretrained(teacher).state_dict()
        torch.testing.assert_close([other, wrote, own], [expected, expected, own_again], rtol=0, atol=0)
        assert not torch.equal(own["lm_head.weight"], other["lm_head.weight"])
        if student is not None:
            torch.testing.assert_close(own, LlamaForCausalLM.from_pretrained(student).state_dict(), rtol=0, atol=0)


# Whole runs


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_on_policy_student_learns_more_than_its_teachers_own_trajectories_teach(tmp_path, seed):
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
