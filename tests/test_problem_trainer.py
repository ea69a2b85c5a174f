"""Problems that were solved rest, and rollouts without a signal give way to others."""

from itertools import pairwise

import pytest
import tiny
import torch
from datasets import Dataset
from test_continuation import compare

from sdpo_trl.batches import merge_rows
from sdpo_trl.problem_trainer import ProblemPlan, ProblemTrainer, SolvedProblems
from sdpo_trl.trainer import SDPOTrainer


def trainer(folder, reward, plan, data=None, **options):
    return ProblemTrainer(
        model=tiny.build_model(), reward_funcs=reward, args=tiny.config(folder, **options),
        train_dataset=tiny.prompts(8) if data is None else data, processing_class=tiny.build_tokenizer(),
        problem_plan=plan,
    )  # fmt: skip


def number(prompt):
    return int(prompt.split(":")[0].removeprefix("task "))


def watched(made):
    """The numbers of the problems of each round, and how the batches that were trained on looked."""
    rounds, batches = [], []
    calculate, prepare = made._calculate_rewards, made._generate_and_score_completions

    def calculating(inputs, prompts, *rest):
        if made.model.training:
            rounds.append(list(dict.fromkeys(map(number, prompts))))
        return calculate(inputs, prompts, *rest)

    def preparing(inputs):
        batches.append(prepare(inputs))
        return batches[-1]

    made._calculate_rewards, made._generate_and_score_completions = calculating, preparing
    return rounds, batches


def solves(*numbers):
    """Solves these problems; the others fail, without feedback."""

    def reward(prompts, completions, **columns):
        return [float(number(prompt) in numbers) for prompt in prompts]

    return reward


def told_about(*numbers):
    """Nobody succeeds; feedback exists for these problems alone."""

    def reward(prompts, completions, log_extra, **columns):
        log_extra("feedback", [f"no {i}" if number(p) in numbers else None for i, p in enumerate(prompts)])
        return [0.0] * len(prompts)

    return reward


def test_a_problem_is_solved_by_a_share_of_its_last_answers():
    solved = SolvedProblems(0.5, rest_steps=3)
    solved.note(["a", "b", "a", "b"], [True, False, False, False], 10)
    assert [solved.rests(key, 10) for key in "abc"] == [True, False, False]
    assert [solved.rests("a", step) for step in (12, 13)] == [True, False]
    solved.note(["a", "a"], [False, False], 11)
    assert not solved.rests("a", 11)
    solved.note(["b"], [True], 12)
    again = SolvedProblems(0.5, rest_steps=None)
    again.restore(solved.state())
    assert again.rests("b", 10**6) and not again.rests("a", 12)


def test_solved_problems_give_their_places_to_unsolved_ones(tmp_path):
    made = trainer(tmp_path, solves(0, 1, 2, 3), ProblemPlan(skip_solved=True), max_steps=12)
    rounds, _ = watched(made)
    made.train()
    tried = [n for numbers in rounds for n in numbers]
    assert [tried.count(n) for n in range(4)] == [1] * 4  # solved at the first try, never again
    assert len(tried) == 24 and min(tried.count(n) for n in range(4, 8)) >= 4
    assert all(len(numbers) == 2 for numbers in rounds)  # no problem twice in a batch
    log = tiny.training_logs(made)
    assert log[-1]["problems/solved_share"] == 0.5
    assert any(row["problems/replaced_share"] > 0 for row in log) and all(row["problems/rounds"] == 1 for row in log)


def test_solved_problems_stay_where_nothing_else_is_left_and_come_back_after_their_rest(tmp_path):
    made = trainer(tmp_path / "a", solves(*range(8)), ProblemPlan(skip_solved=True), max_steps=8)
    rounds, _ = watched(made)
    made.train()
    assert all(len(numbers) == 2 for numbers in rounds)
    assert tiny.training_logs(made)[-1]["problems/solved_share"] == 1.0
    made = trainer(tmp_path / "b", solves(0), ProblemPlan(skip_solved=True, rest_steps=4), max_steps=16)
    rounds, _ = watched(made)
    made.train()
    at = [step for step, numbers in enumerate(rounds) if 0 in numbers]
    assert len(at) > 1 and min(b - a for a, b in pairwise(at)) >= 4


def test_rounds_fill_a_batch_with_rows_that_carry_a_signal(tmp_path):
    """Two problems of eight have feedback: a batch of two groups is full when both have been found."""
    plan = ProblemPlan(signal_rows=8, max_rounds=6)
    made = trainer(tmp_path, told_about(2, 5), plan, max_steps=4)
    rounds, batches = watched(made)
    made.train()
    logs = tiny.training_logs(made)
    assert sum(int(row["problems/rounds"]) for row in logs) == len(rounds)
    place = 0
    for row, batch in zip(logs, batches, strict=True):
        numbers = rounds[place : place + int(row["problems/rounds"])]
        place += len(numbers)
        flat = [n for some in numbers for n in some]
        assert len(set(flat)) == min(len(flat), 8)  # no problem twice before all have been tried
        assert ({2, 5} <= set(flat)) == (int(batch["active_rows"]) == 8)
        assert set(flat) & {2, 5} or len(numbers) == 6
        assert len(numbers) == 1 or not {2, 5} <= {n for some in numbers[:-1] for n in some}
    assert any(int(row["problems/rounds"]) > 1 for row in logs)
    assert all(row["loss"] > 0 for row in logs)


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_merged_rows_are_those_of_their_rounds_with_their_teachers(tmp_path, weight):
    made = trainer(tmp_path, told_about(2, 5), ProblemPlan(signal_rows=8, max_rounds=8), distillation_weight=weight)
    parts = []
    plain = SDPOTrainer._generate_and_score_completions

    def one_round(self, inputs):
        parts.append(plain(self, inputs))
        return dict(parts[-1])

    made.model.train()
    made.current_gradient_accumulation_steps = 1
    unsolved = [row for row in tiny.prompts(8) if number(row["prompt"]) not in (2, 5)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SDPOTrainer, "_generate_and_score_completions", one_round)
        merged = made._generate_and_score_completions([row for row in unsolved[:2] for _ in range(4)])
    assert len(parts) > 1

    def bare(batch, row, name):
        return batch[f"{name}_ids"][row][batch[f"{name}_mask"][row].bool()].tolist()

    names = ("prompt", "completion", "teacher_prompt")
    told = [
        tuple(bare(part, row, name) for name in names)
        for part in parts for row in range(8) if part["feedback_available"][row]
    ]  # fmt: skip
    assert [tuple(bare(merged, row, name) for name in names) for row in range(8)] == told[:8]
    assert bool(merged["feedback_available"].all())
    lengths = [len(completion) for _, completion, _ in told[:8]]
    assert int(merged["num_items_in_batch"]) == int(merged["active_tokens"]) == sum(lengths)
    assert int(merged["active_rows"]) == 8

    kept = made._teacher_pass.head(merged, tiny.scored(merged))
    fresh = tiny.teacher_head(made, merged)
    torch.testing.assert_close(kept.hidden, fresh.hidden, rtol=1e-4, atol=1e-5)
    loss, gradient = tiny.gradient(made, merged)
    alone = []
    for row in range(8):  # the normaliser is that of the whole batch
        single = {key: value[row : row + 1] if value.dim() else value for key, value in merged.items()}
        alone.append(tiny.gradient(made, single))
    assert loss == pytest.approx(sum(value for value, _ in alone), rel=1e-4)
    summed = {name: sum(part[name] for _, part in alone) for name in gradient}
    tiny.assert_near(summed, gradient, rtol=1e-4)


def test_merging_pads_each_side_where_it_belongs():
    first = {
        "prompt_ids": torch.tensor([[7, 8], [0, 9]]), "prompt_mask": torch.tensor([[1, 1], [0, 1]]),
        "completion_ids": torch.tensor([[3, 4, 1], [5, 1, 0]]),
        "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "advantages": torch.tensor([0.5, -0.5]), "active_rows": torch.tensor(1),
    }  # fmt: skip
    second = {
        "prompt_ids": torch.tensor([[6], [2]]), "prompt_mask": torch.tensor([[1], [1]]),
        "completion_ids": torch.tensor([[4, 4, 4, 1], [2, 1, 0, 0]]),
        "completion_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
        "advantages": torch.tensor([0.1, 0.2]), "active_rows": torch.tensor(2),
        "teacher_hidden": torch.ones(2, 4, 2),
    }  # fmt: skip
    kept = {key: value.clone() for key, value in first.items()}
    merged = merge_rows(first, second, torch.tensor([1]), torch.tensor([0]), pad_token_id=0)
    assert merged["prompt_ids"].tolist() == [[7, 8], [0, 6]] and merged["prompt_mask"].tolist() == [[1, 1], [0, 1]]
    assert merged["completion_ids"].tolist() == [[3, 4, 1, 0], [4, 4, 4, 1]]
    assert merged["completion_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert merged["advantages"].tolist() == pytest.approx([0.5, 0.1])
    assert merged["teacher_hidden"][0].abs().sum() == 0 and merged["teacher_hidden"][1].sum() == 8
    tiny.assert_equal(first, kept)


def test_with_a_policy_term_an_advantage_is_a_signal(tmp_path):
    """GRPO's term alone teaches here: one answer of a group succeeds, and has no sibling to read."""

    def reward(prompts, completions, **columns):
        return [float(number(p) == 3 and i % 4 == 0) for i, p in enumerate(prompts)]

    options = {"distillation_weight": 0.5, "use_successful_as_teacher": False, "max_steps": 1}
    made = trainer(tmp_path, reward, ProblemPlan(signal_rows=4, max_rounds=4), **options)
    rounds, batches = watched(made)
    made.train()
    assert 3 in rounds[-1] and not any(3 in numbers for numbers in rounds[:-1])
    assert int((batches[0]["advantages"] != 0).sum()) == 4


def test_evaluation_and_a_trainer_without_a_plan_are_left_alone(tmp_path):
    plan = ProblemPlan(skip_solved=True, signal_rows=8)
    made = trainer(tmp_path / "a", solves(*range(8)), plan, per_device_eval_batch_size=4)
    made.evaluate(tiny.prompts(2))
    assert made._solved.state() == {"solved": {}}
    logs = []
    for cls in (SDPOTrainer, ProblemTrainer):
        torch.manual_seed(0)
        args = tiny.config(tmp_path / cls.__name__, max_steps=3)
        run = cls(
            model=tiny.build_model(), reward_funcs=tiny.even_length, args=args, train_dataset=tiny.prompts(8),
            processing_class=tiny.build_tokenizer(),
        )  # fmt: skip
        run.train()
        logs.append((tiny.training_logs(run), tiny.trained(run.model)))
    assert logs[0][0] == logs[1][0]
    tiny.assert_equal(logs[0][1], logs[1][1])


def test_a_resumed_run_goes_on_with_the_same_problems(tmp_path):
    def reward(prompts, completions, log_extra, **columns):
        log_extra("feedback", [f"no {i}" if number(p) % 2 else None for i, p in enumerate(prompts)])
        return [float(number(p) in (0, 1, 2)) for p in prompts]

    def build(folder, **options):
        return trainer(folder, reward, ProblemPlan(skip_solved=True, signal_rows=6, max_rounds=3), **options)

    compare(tmp_path, build, 3, 7)


@pytest.mark.parametrize(
    ("plan", "options", "says"),
    [
        ({"skip_solved": True}, {"distillation_weight": 0.0}, "solved problems"),
        ({"signal_rows": 9}, {}, "more than the 8 rollouts"),
        (
            {"signal_rows": 2},
            {"distillation_weight": 0.5, "distillation_routing": "failed"},
            "distillation_routing='failed'",
        ),
        ({"signal_rows": 2}, {"token_weighting": "teacher_entropy"}, "token_weighting"),
        ({"signal_rows": 2}, {"prompt_weighting": "difficulty"}, "prompt_weighting"),
        ({"skip_solved": True, "key": "name"}, {}, "is not a column"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, plan, options, says):
    with pytest.raises(ValueError, match=says):
        trainer(tmp_path, tiny.never, ProblemPlan(**plan), **options)


def test_problems_must_be_countable_and_have_names(tmp_path):
    streamed = tiny.prompts(8).to_iterable_dataset()
    with pytest.raises(ValueError, match="cannot be streamed"):
        trainer(tmp_path, tiny.never, ProblemPlan(skip_solved=True), streamed)

    class Desk:
        def reset(self, **row):
            return None

        def look(self) -> str:
            """Look."""
            return "nothing"

    with pytest.raises(ValueError, match="Name them by a dataset column"):
        ProblemTrainer(
            model=tiny.build_model(), reward_funcs=tiny.never, args=tiny.config(tmp_path),
            train_dataset=tiny.prompts(8, chat=True), processing_class=tiny.tool_tokenizer(),
            environment_factory=Desk, problem_plan=ProblemPlan(skip_solved=True),
        )  # fmt: skip


def test_a_problem_without_a_name_is_an_error_about_the_plan(tmp_path):
    data = tiny.prompts(8, name=["a"] * 7 + [None])
    with pytest.raises(ValueError, match=r"`ProblemPlan\.key='name'`: a row has no such value"):
        trainer(tmp_path, tiny.never, ProblemPlan(skip_solved=True, key="name"), data)


def test_only_what_names_a_problem_is_read_at_the_start(tmp_path):
    """Chats under `messages`, beside a column that is heavy in practice."""
    rows = [[{"role": "user", "content": f"task {i}"}, {"role": "assistant", "content": "x"}] for i in range(8)]
    data = Dataset.from_dict({"messages": rows, "hidden_tests": ["[]"] * 8})
    made = trainer(tmp_path, tiny.always, ProblemPlan(skip_solved=True), data, max_steps=4)
    made.train()
    assert len(made._place) == 8 and len(made._solved.state()["solved"]) == 8


@pytest.mark.parametrize(
    "wrong", [{"solved_share": 0.0}, {"solved_share": 1.1}, {"rest_steps": 0}, {"signal_rows": -1}, {"max_rounds": 0}]
)
def test_ranges_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ProblemPlan(**wrong)


@pytest.mark.parametrize(
    "idle",
    [{"rest_steps": 3}, {"solved_share": 0.5}, {"key": "id"}, {"max_rounds": 2, "skip_solved": True}],
)
def test_what_would_have_no_effect_is_refused(idle):
    with pytest.raises(ValueError, match=f"{next(iter(idle))}.* has no effect"):
        ProblemPlan(**idle)
    ProblemPlan(**{**idle, "signal_rows": 4})


def test_problems_may_be_named_by_a_column(tmp_path):
    data = tiny.prompts(4, name=["a", "a", "b", "b"])
    made = trainer(tmp_path, solves(0, 1), ProblemPlan(skip_solved=True, key="name"), data, max_steps=4)
    rounds, _ = watched(made)
    made.train()
    assert made._solved.state()["solved"].keys() == {"a"}
    assert len(rounds) == 4
