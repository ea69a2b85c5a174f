"""A trainer for problems that can be solved once and for all: solved ones rest, and no batch is trained on half empty.

Knows: which problems the training set holds, who solved them when. Deliberately does not know: how programs or answers
are graded, losses.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset

from .batches import merge_rows
from .rows import prompt_row
from .run_state import question_key
from .trainer import SDPOTrainer

_NAMING = ("prompt", "messages", "conversations", "tools")


@dataclass(frozen=True)
class ProblemPlan:
    """
    Which problems are tried, and when a rollout batch is full.

    Args:
        skip_solved (`bool`): A solved problem gives its place in a batch to an unsolved one that is not in it yet. It
            stays where there is none.
        solved_share (`float`): A problem is solved if at least this share of its last group of answers succeeded, in
            `(0, 1]`.
        rest_steps (`int`, *optional*): Optimizer steps after which a solved problem is tried again; `None`: never.
        signal_rows (`int`): Rollouts (of all processes) that must carry a signal, so that they are distilled or, with
            a policy term, have an advantage. While there are fewer, other problems are tried, and rollouts without a
            signal give way to theirs. 0: every batch is trained on as it comes.
        max_rounds (`int`): Rounds of rollouts for one batch at most, the first one included.
        key (`str`, *optional*): Dataset column that names a problem; `None`: its prompt.
    """

    skip_solved: bool = False
    solved_share: float = 1.0
    rest_steps: int | None = None
    signal_rows: int = 0
    max_rounds: int = 4
    key: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.solved_share <= 1:
            raise ValueError(f"`solved_share` must be in (0, 1], got {self.solved_share}.")
        if self.rest_steps is not None and self.rest_steps < 1:
            raise ValueError(f"`rest_steps` must be at least 1, or `None`, got {self.rest_steps}.")
        if self.signal_rows < 0 or self.max_rounds < 1:
            raise ValueError(
                f"`signal_rows` must not be negative and `max_rounds` at least 1, got {self.signal_rows} and "
                f"{self.max_rounds}."
            )
        idle = [] if self.signal_rows else ["max_rounds"]
        idle += [] if self.active else ["solved_share", "rest_steps", "key"]
        for name in idle:
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                needed = "`signal_rows`" if name == "max_rounds" else "`skip_solved` or `signal_rows`"
                raise ValueError(
                    f"`{name}={getattr(self, name)!r}` has no effect without {needed}: set it, or drop this."
                )

    @property
    def active(self) -> bool:
        """Whether it asks for anything."""
        return self.skip_solved or self.signal_rows > 0


class SolvedProblems:
    """
    When each problem was solved last; the same on every process, and kept in checkpoints.

    Args:
        share (`float`): Of a group's answers that must succeed.
        rest_steps (`int`, *optional*): As of [`ProblemPlan`].
    """

    def __init__(self, share: float, rest_steps: int | None) -> None:
        self._share, self._rest_steps = share, rest_steps
        self._solved: dict[str, int] = {}

    def note(self, keys: Sequence[str], success: Sequence[bool], step: int) -> None:
        """The answers of one round, of all processes."""
        answers: dict[str, list[bool]] = {}
        for key, passed in zip(keys, success, strict=True):
            answers.setdefault(key, []).append(passed)
        for key, passes in answers.items():
            if sum(passes) >= self._share * len(passes) - 1e-9:
                self._solved[key] = step
            else:
                self._solved.pop(key, None)

    def rests(self, key: str, step: int) -> bool:
        """Whether a problem is not to be tried now."""
        solved = self._solved.get(key)
        return solved is not None and (self._rest_steps is None or step - solved < self._rest_steps)

    def state(self) -> dict[str, Any]:
        return {"solved": self._solved}

    def restore(self, state: dict[str, Any]) -> None:
        self._solved = dict(state["solved"])


class ProblemTrainer(SDPOTrainer):
    """
    [`SDPOTrainer`] whose batches are made of problems that can still teach.

    Works with all of its options but those that compare the rows of a whole rollout batch with each other, which are
    refused with `signal_rows` above 0: `distillation_routing="failed"`, `prompt_weighting="difficulty"` and
    `token_weighting="teacher_entropy"`; so are images, environments, own rollout functions and streamed datasets.
    Logs `problems/solved_share` (of the training set), `problems/replaced_share` (of a batch) and `problems/rounds`.

    Args:
        problem_plan ([`ProblemPlan`], *optional*): Without one it is an [`SDPOTrainer`].
        **kwargs: All of [`SDPOTrainer`]'s.
    """

    def __init__(self, *positional: Any, problem_plan: ProblemPlan | None = None, **kwargs: Any) -> None:
        super().__init__(*positional, **kwargs)
        self._plan = problem_plan or ProblemPlan()
        if not self._plan.active:
            return
        self._check_plan()
        self._solved = SolvedProblems(self._plan.solved_share, self._plan.rest_steps)
        self._remembers["solved_problems"] = self._solved
        rows = self.train_dataset
        if isinstance(rows, Dataset):  # tests of a problem may have hundreds of megabytes: they stay unread
            named = [name for name in rows.column_names if name in _NAMING or name == self._plan.key]
            rows = rows.select_columns(named)
        self._place = {self._problem(prompt_row(row)): place for place, row in enumerate(rows)}
        self._draws = (-1, 0)  # the optimizer step, and how often was drawn within it

    def _check_plan(self) -> None:
        args, plan = self.args, self._plan
        if not self._distills:
            raise ValueError(
                "`distillation_weight=0` is TRL's GRPO, whose checkpoints know nothing of solved problems. Drop "
                "`skip_solved` and `signal_rows`, or raise the weight."
            )
        if not hasattr(self.train_dataset, "__len__"):
            raise ValueError("Problems are chosen by number, so the training set cannot be streamed. Load it whole.")
        if plan.key is not None and self._train_columns and plan.key not in self._train_columns:
            raise ValueError(
                f"The problem plan's `key={plan.key!r}` is not a column of the training set. Its columns: "
                f"{sorted(self._train_columns)}."
            )
        if plan.key is None and (self._train_columns & {"image", "images"} or self.environment_factories is not None):
            raise ValueError(
                "Problems are known by their prompts, which lack images and what an environment shows. Name them by a "
                "dataset column: `ProblemPlan(key='id')`."
            )
        if not plan.signal_rows:
            return
        rollouts = args.generation_batch_size
        if plan.signal_rows > rollouts:
            raise ValueError(
                f"`signal_rows={plan.signal_rows}` is more than the {rollouts} rollouts of a batch. Lower it, or "
                "raise the batch size."
            )
        for name, value in (
            ("distillation_routing", "failed"), ("prompt_weighting", "difficulty"),
            ("token_weighting", "teacher_entropy"),
        ):  # fmt: skip
            if getattr(args, name) == value:
                raise ValueError(
                    f"`{name}={value!r}` compares the rows of one round of rollouts, and `signal_rows` mixes several. "
                    "Drop one of them."
                )
        if self._is_vlm or self.environment_factories is not None or self.rollout_func is not None:
            raise ValueError(
                "`signal_rows` mixes the rows of several rounds, which images, environments and own rollout functions "
                "do not allow. Set it to 0."
            )

    def _problem(self, row: dict[str, Any]) -> str:
        return question_key(row, row["prompt"], self._plan.key, "ProblemPlan.key")

    # Choosing

    def _draw(self, candidates: list[str], count: int) -> list[str]:
        """A sample of at most `count`, the same on every process and in a resumed run."""
        step = self.state.global_step
        self._draws = (step, self._draws[1] + 1 if self._draws[0] == step else 0)
        source = random.Random(f"{self.args.seed} {step} {self._draws[1]}")
        return source.sample(candidates, min(count, len(candidates)))

    def _unsolved(self, excluded: set[str]) -> list[str]:
        step = self.state.global_step
        return [key for key in self._place if key not in excluded and not self._solved.rests(key, step)]

    def _without_solved(self, inputs: list[dict[str, Any]], tried: set[str]) -> list[dict[str, Any]]:
        """The rows of this process, those of solved problems replaced, group by group; notes what is tried."""
        keys = [self._problem(prompt_row(row)) for row in inputs]
        everyones = list(dict.fromkeys(gather_object(keys)))  # over all processes, in order
        resting = []
        if self._plan.skip_solved:
            resting = [key for key in everyones if self._solved.rests(key, self.state.global_step)]
        chosen = self._draw(self._unsolved(set(everyones)), len(resting)) if resting else []
        given = dict(zip(resting, chosen, strict=False))  # fewer unsolved ones: the rest stays
        tried.update(given.get(key, key) for key in everyones)
        metrics = self._metrics["train"]
        metrics["problems/replaced_share"].append(len(given) / len(everyones))
        return [
            self.train_dataset[self._place[given[key]]] if key in given else row
            for key, row in zip(keys, inputs, strict=True)
        ]

    def _other_problems(self, count: int, tried: set[str]) -> list[dict[str, Any]]:
        """`count` rows of this process with problems that this batch has not tried, as far as there are any."""
        groups = count * self.accelerator.num_processes // self.num_generations
        chosen = self._draw(self._unsolved(tried), groups)
        again = [key for key in self._place if key not in set(chosen)]
        again.sort(key=lambda key: (self._solved.rests(key, self.state.global_step), key in tried))
        while len(chosen) < groups:
            chosen += again[: groups - len(chosen)] if again else chosen[: groups - len(chosen)]
        tried.update(chosen)
        repeated = [key for key in chosen for _ in range(self.num_generations)]
        return [self.train_dataset[self._place[key]] for key in repeated[self._local_rows(count)]]

    # Rounds

    def _generate_and_score_completions(self, inputs):
        if not self._plan.active or not self.model.training:
            return super()._generate_and_score_completions(inputs)
        tried: set[str] = set()
        count = len(inputs)
        output = super()._generate_and_score_completions(self._without_solved(inputs, tried))
        rounds = 1
        while rounds < self._plan.max_rounds and self._signals(output) < self._plan.signal_rows:
            more = super()._generate_and_score_completions(self._other_problems(count, tried))
            output = self._merged(output, more)
            rounds += 1
        resting = sum(self._solved.rests(key, self.state.global_step) for key in self._place)
        metrics = self._metrics["train"]
        metrics["problems/rounds"].append(float(rounds))
        metrics["problems/solved_share"].append(resting / len(self._place))
        return output

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self._plan.active and self._trains:
            keys = gather_object([self._problem(row) for row in inputs])
            self._solved.note(keys, self._succeeded(rewards).tolist(), self.state.global_step)
        return rewards

    def _carries_signal(self, output: dict[str, Any]) -> torch.Tensor:
        """Which rows would move the student, bool of shape `(B,)`."""
        rows = self._active(output).any(dim=1)
        if self.args.has_policy_term:
            rows |= (output["advantages"] != 0) & self._loss_mask(output).any(dim=1)
        return rows

    def _signals(self, output: dict[str, Any]) -> int:
        return int(self.accelerator.reduce(self._carries_signal(output).sum(), reduction="sum"))

    def _merged(self, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
        """The first round's batch, whose rows without a signal have given way to the second's with one."""
        free = (~self._carries_signal(first)).nonzero().squeeze(1)
        found = self._carries_signal(second).nonzero().squeeze(1)
        count = min(free.numel(), found.numel())
        output = merge_rows(first, second, free[:count], found[:count], self._tokenizer.pad_token_id)
        tokens = self._loss_mask(output).sum()
        counts = self._active_counts(self._active(output))
        output["num_items_in_batch"] = self.accelerator.reduce(tokens, reduction="sum")
        output["active_tokens"], output["active_rows"] = counts[0], counts[1]
        return output
