"""examples/test_time.py: counting to the first success, and whole runs on a model that knows nothing yet.

pytest -m slow tests/test_test_time.py     # minutes: six problems, learning against best of k
"""

import json
import shutil

import letters
import pytest
import small_programs
import test_time
from transformers import TrainerControl

from sdpo_trl import SDPOConfig
from sdpo_trl.environments import Sandbox

needs_bwrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is missing: apt-get install bubblewrap"
)
FAST = ["--num_generations", "4", "--per_device_train_batch_size", "4", "--budget", "12", "--problems", "2"]


@pytest.fixture
def untaught(monkeypatch):
    """The model built in code without its warm start, which takes a minute."""

    def build(rows, seed):
        tokenizer = small_programs.build_tokenizer()
        return letters.build_model(tokenizer, seed, hidden_size=32, positions=256), tokenizer

    monkeypatch.setattr(small_programs, "warm_started", build)


class Scripted:
    """A reward that passes the answers whose numbers, from 1, are given."""

    __name__ = "code_reward"

    def __init__(self, *passing):
        self.passing, self.seen, self.prompts = passing, 0, []

    def __call__(self, prompts, completions, log_extra=None, **columns):
        assert set(columns) >= {"public_tests", "hidden_tests", "function"}
        self.prompts.append(list(prompts))
        rewards = []
        for _ in completions:
            self.seen += 1
            rewards.append(float(self.seen in self.passing))
        if log_extra is not None:
            log_extra("feedback", [None if passed else f"no {i}" for i, passed in enumerate(rewards)])
        return rewards


def arguments(tmp_path, **more):
    return SDPOConfig(**{
        **test_time.DEFAULTS, "output_dir": str(tmp_path), "num_generations": 4, "per_device_train_batch_size": 4,
        "max_steps": 3, **more,
    })  # fmt: skip


@pytest.fixture
def parts(untaught):
    model, tokenizer = small_programs.warm_started(small_programs.table_rows, 0)
    return small_programs.table_row(0, [3, 1, 4]), model, tokenizer


def test_learning_stops_at_the_first_success_and_leaves_the_model_alone(parts, tmp_path):
    row, model, tokenizer = parts
    before = {name: value.clone() for name, value in model.state_dict().items()}
    reward = Scripted(7, 8)
    assert test_time.solve_by_learning(row, model, tokenizer, arguments(tmp_path), reward, None) == 7
    assert reward.seen == 8  # the step in which it was found was the last one
    reward = Scripted()
    assert test_time.solve_by_learning(row, model, tokenizer, arguments(tmp_path), reward, None) is None
    assert reward.seen == 12
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("reprompts", [False, True])
def test_sampling_counts_alike_and_reprompts_with_what_failed(parts, tmp_path, reprompts):
    row, model, tokenizer = parts
    args = arguments(tmp_path)
    asked = []

    def sample(model, tokenizer, args, prompts):
        asked.append(prompts)
        return ["x"] * len(prompts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_time, "sample", sample)
        shared = (row, model, tokenizer, args)
        assert test_time.solve_by_sampling(*shared, Scripted(6), 12, reprompts=reprompts) == 6
        assert [len(prompts) for prompts in asked] == [4, 4]
        assert asked[0] == [row["prompt"]] * 4
        told = [f"no {i};{row['prompt']}" for i in range(4)]  # each conversation reads its own failure
        assert asked[1] == (told if reprompts else [row["prompt"]] * 4)
        asked.clear()
        assert test_time.solve_by_sampling(*shared, Scripted(), 12, reprompts=reprompts) is None
        assert len(asked) == 3


def test_answers_are_sampled_at_the_temperature_of_training(parts, tmp_path):
    row, model, tokenizer = parts
    args = arguments(tmp_path, max_completion_length=5)
    answers = test_time.sample(model, tokenizer, args, [row["prompt"]] * 50)
    assert len(answers) == 50 and len(set(answers)) > 40  # an untaught model is near uniform: no top-k, no top-p
    cold = arguments(tmp_path, max_completion_length=5, temperature=1e-4)
    assert len(set(test_time.sample(model, tokenizer, cold, [row["prompt"]] * 8))) == 1


def test_discovery_is_a_share_of_problems():
    found = [3, None, 10, 1]
    assert [test_time.discovery(found, k) for k in (1, 2, 3, 9, 10, 99)] == [0.25, 0.25, 0.5, 0.5, 0.75, 0.75]


def test_the_callback_stops_only_when_solved():
    grader = test_time.Grader(Scripted())
    control = TrainerControl()
    test_time.StopWhenSolved(grader).on_step_end(None, None, control)
    assert not control.should_training_stop
    grader.first = 3
    test_time.StopWhenSolved(grader).on_step_end(None, None, control)
    assert control.should_training_stop


def test_the_papers_settings_are_the_defaults():
    """Section 5: reverse divergence, advantages cut at 5, one question x 16."""
    args = SDPOConfig(**test_time.DEFAULTS)
    assert (args.distillation_alpha, args.distillation_log_ratio_clip) == (1.0, 5.0)
    assert args.num_generations == args.generation_batch_size == 16


@needs_bwrap
def test_a_whole_run_writes_results_and_a_plot(untaught, tmp_path):
    results = test_time.main([*FAST, "--output_dir", str(tmp_path)])
    assert results == json.loads((tmp_path / "results.json").read_text())
    assert results["first_success"] == {"sdpo": [None, None], "best": [None, None], "reprompting": [None, None]}
    assert results["discovery"]["sdpo"] == {"4": 0.0, "8": 0.0, "12": 0.0}
    assert (tmp_path / "test_time.png").stat().st_size > 5000


@needs_bwrap
@pytest.mark.parametrize(
    ("line", "says"),
    [("--methods sdpo luck", "methods"), ("--dataset_name own", "--model_name_or_path"), ("--budget 0", "budget")],
)
def test_what_cannot_work_says_what_to_do(untaught, tmp_path, line, says):
    with pytest.raises(ValueError, match=says):
        test_time.main([*FAST, *line.split(), "--output_dir", str(tmp_path)])


@pytest.mark.slow
def test_learning_finds_more_than_sampling(tmp_path):
    """The warm start, then ten problems, graded outside the sandbox, which is quicker."""
    model, tokenizer = small_programs.warm_started(small_programs.table_rows, 0)
    args = arguments(tmp_path, num_generations=16, per_device_train_batch_size=16, max_steps=16)
    found = {"sdpo": [], "best": []}
    for number, table in enumerate(small_programs.hidden_tables(10, 0)):
        row = small_programs.table_row(number, table)
        found["sdpo"].append(test_time.solve_by_learning(row, model, tokenizer, args, Here(table), None))
        found["best"].append(
            test_time.solve_by_sampling(row, model, tokenizer, args, Here(table), 256, reprompts=False)
        )
    assert test_time.discovery(found["sdpo"], 256) > test_time.discovery(found["best"], 256) + 0.2, found


class Here:
    """The verdicts of `CodeReward` on tables, without running anything; its text on malformed programs is its own."""

    __name__ = "code_reward"

    def __init__(self, table):
        self.table = table
        self.tests = [small_programs.CodeTest([x], value) for x, value in enumerate(table)]

    def __call__(self, prompts, completions, log_extra=None, **columns):
        feedback = [self.judge(text) for text in completions]
        if log_extra is not None:
            log_extra("feedback", feedback)
        return [float(text is None) for text in feedback]

    def judge(self, text):
        begin, end = f"{small_programs.BEGIN}[", f"][x]{small_programs.END}"
        entries = text.removeprefix(begin).removesuffix(end).split(",")
        if not (text.startswith(begin) and text.endswith(end) and all(entry.isdigit() for entry in entries)):
            return "Your program failed public test 1 of 3: it ended with an error."
        for place, (value, entry) in enumerate(zip(self.table, entries, strict=False)):
            if int(entry) != value:
                return small_programs.failure(place, self.tests, int(entry))
        return None if len(entries) >= len(self.table) else "Your program failed public test 3 of 3: IndexError"


@needs_bwrap
def test_the_fast_grader_agrees_with_the_sandbox_on_well_formed_programs():
    """Malformed ones fail in both, but only the sandbox says why."""
    row = small_programs.table_row(0, [3, 1, 4])
    answers = [small_programs.fenced(f"[{entries}][x]") for entries in ("3,1,4", "3,1,5", "0,1,4", "3,2,0")]
    answers += [small_programs.fenced(text) for text in ("[3,1,4", "[3,1,x][x]", "")]
    columns = {name: [row[name]] * 7 for name in ("public_tests", "hidden_tests", "function")}
    said = {"real": {}, "here": {}}
    graders = {"real": test_time.CodeReward(Sandbox(), workers=2), "here": Here([3, 1, 4])}
    rewards = [
        grader([row["prompt"]] * 7, answers, log_extra=said[name].__setitem__, **columns)
        for name, grader in graders.items()
    ]
    assert rewards[0] == rewards[1] == [1.0] + [0.0] * 6
    real, here = said["real"]["feedback"], said["here"]["feedback"]
    assert real[:4] == here[:4]
    assert all(a != b for a, b in zip(real[4:], here[4:], strict=True))
