"""What one rollout batch has to say: its successes, and the hint that each row's teacher gets.

Knows: texts, rewards, groups. Deliberately does not know: tokenizers, models, losses. Rows are local to a process
unless a name says `all`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from .feedback import TurnText, join_turns, select_feedback
from .reprompt import Hint, Prompt, completion_text, hint_of, strip_thinking, well_formed


@dataclass(frozen=True)
class Rollouts:
    """
    One batch as it was scored.

    Args:
        prompts (`list`): The student's prompts, with an environment's opening observation and images.
        completions (`list`): What was sampled: text, or messages.
        rewards (`torch.Tensor`): Of all processes, shape `(N, F)`, NaN where a function gave none.
        feedback (`list[str | None]`): The joined texts of all sources.
        worked_solutions (`list[str | None]`): The `demonstration` column.
        keys (`list[str]`, *optional*): What names each question across steps, where a success buffer is kept.
        turn_feedback (`list[tuple[TurnText, ...]]`, *optional*): The texts that belong to single turns.
    """

    prompts: list[Prompt]
    completions: list[Prompt]
    rewards: torch.Tensor
    feedback: list[str | None]
    worked_solutions: list[str | None]
    keys: list[str] | None = None
    turn_feedback: list[tuple[TurnText, ...]] | None = None

    @property
    def rich(self) -> list[bool]:
        """Whether each rollout has feedback of its own."""
        return [text is not None or bool(turns) for text, turns in zip(self.feedback, self.turns, strict=True)]

    @property
    def turns(self) -> list[tuple[TurnText, ...]]:
        """The texts per turn, empty where there are none."""
        return [()] * len(self.prompts) if self.turn_feedback is None else self.turn_feedback


def weighted_rewards(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """TRL's weighted sum: `(N, F)`, `(F,)` -> `(N,)` in float64; NaN where no function gave a reward."""
    total = (rewards.double() * weights.to(rewards.device, torch.float64)).nansum(dim=1)
    return total.masked_fill(rewards.isnan().all(dim=1), float("nan"))


def succeeded(rewards: torch.Tensor, threshold: float) -> torch.Tensor:
    """
    Whether each attempt passed, by its reward and never by its advantage: `(N,)` -> bool `(N,)`.

    Up to a relative 1e-6, so that 0.7 + 0.2 + 0.1 in float32 reaches 1.0. NaN is no success.
    """
    return rewards.double() >= threshold - 1e-6 * max(1.0, abs(threshold))


def differing_groups(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """
    Whether each row's group has different rewards, beyond rounding: `(N, F)` -> bool `(N,)`.

    Where all are equal, GRPO's advantages are the rounding of their mean, and their signs mean nothing.
    """
    groups = rewards.double().nan_to_num().view(-1, group_size, rewards.size(1))  # (N / G, G, F)
    spread = groups.amax(dim=1) - groups.amin(dim=1)
    scale = groups.abs().amax(dim=1).clamp(min=1.0)
    return (spread > 1e-6 * scale).any(dim=1).repeat_interleave(group_size)


_REASONING = ("reasoning_content", "thinking")  # where response parsers of transformers put the thinking


def demonstrations(
    rollouts: Rollouts, success: torch.Tensor, remove_thinking: bool, thinking_opened: Sequence[bool]
) -> list[str | None]:
    """The text that each local success could show to others; `None` for failures and where nothing is left to show."""
    texts: list[str | None] = []
    for completion, passed, opened in zip(rollouts.completions, success.tolist(), thinking_opened, strict=True):
        text = completion_text(completion) if passed else None
        parts = [] if isinstance(completion, str) else [m.get(key) for m in completion for key in _REASONING]
        reasoning = [part for part in parts if part]
        if text is not None and remove_thinking:
            text = strip_thinking(text, opened=opened and not reasoning)
        elif text is not None and reasoning:
            text = "\n".join([*reasoning, text])
        texts.append(text if text is not None and text.strip() else None)
    return texts


@dataclass(frozen=True)
class Routing:
    """
    What each local row's teacher is told, and how the batch stands.

    Args:
        hints (`list[Hint | None]`): `None` where the row has no feedback and is not scored.
        stats (`dict[str, float]`): Local sums, for the metrics of the same names.
    """

    hints: list[Hint | None]
    stats: dict[str, float]


@dataclass(frozen=True)
class RoutingRule:
    """The options that decide which hint a row gets; see [`SDPOConfig`]."""

    use_successful_as_teacher: bool
    exclude_self: bool
    include_feedback: bool
    feedback_only_without_solution: bool


def demonstration_order(
    choice: Literal["first", "shortest", "random"], texts: Sequence[str | None], seed: int
) -> torch.Tensor | None:
    """
    The rows in the order in which they are considered as demonstrations, int64 of shape `(N,)`; `None`: as they are.

    Args:
        choice (`str`): `"first"`, `"shortest"` (in characters) or `"random"`.
        texts (`Sequence[str | None]`): `N` demonstrations.
        seed (`int`): Of `"random"`; the same on every process.
    """
    if choice == "first":
        return None
    if choice == "shortest":
        return torch.tensor([len(text or "") for text in texts]).argsort(stable=True)
    return torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))


def _select_in_order(
    order: torch.Tensor | None, questions: torch.Tensor, success: torch.Tensor, rich: torch.Tensor, exclude_self: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """[`select_feedback`] with another meaning of "the smallest row": the first in `order`."""
    if order is None:
        return select_feedback(questions, success, rich, exclude_self=exclude_self)
    order = order.to(questions.device)
    chosen, available = select_feedback(questions[order], success[order], rich[order], exclude_self=exclude_self)
    rows, back = torch.empty_like(chosen), torch.empty_like(available)
    rows[order] = torch.where(chosen >= 0, order[chosen.clamp(min=0)], -1)
    back[order] = available
    return rows, back


def route(
    rollouts: Rollouts,
    all_success: torch.Tensor,
    all_texts: Sequence[str | None],
    all_rich: torch.Tensor,
    local: slice,
    group_size: int,
    rule: RoutingRule,
    *,
    remembered: Sequence[str | None] | None = None,
    order: torch.Tensor | None = None,
) -> Routing:
    """
    Apply [`select_feedback`] to the global batch and turn this process' slice into hints.

    A remembered success of an earlier step, and after it a worked solution of the dataset, is shown where the group
    has no success of its own to show (none succeeded, their demonstrations are unusable, or
    `use_successful_as_teacher` is off).

    Args:
        rollouts ([`Rollouts`]): The local rows.
        all_success (`torch.Tensor`): bool of shape `(N,)`.
        all_texts (`Sequence[str | None]`): `N` demonstrations, `None` where a row has none to show.
        all_rich (`torch.Tensor`): bool of shape `(N,)`: the row has a feedback text.
        local (`slice`): This process' rows.
        group_size (`int`): Consecutive rows that answer one prompt.
        rule ([`RoutingRule`]): Options.
        remembered (`Sequence[str | None]`, *optional*): Per local row, an earlier success at the same question.
        order (`torch.Tensor`, *optional*): int64 of shape `(N,)`, see [`demonstration_order`].
    """
    device = all_success.device
    shown = torch.tensor([text is not None for text in all_texts], device=device)
    shown &= rule.use_successful_as_teacher
    questions = torch.arange(shown.numel(), device=device) // group_size
    rich = all_rich & rule.include_feedback
    index, available = _select_in_order(order, questions, shown, rich, rule.exclude_self)
    remembered = [None] * len(rollouts.prompts) if remembered is None else remembered
    group_shows = shown.view(-1, group_size).any(dim=1).repeat_interleave(group_size)

    hints: list[Hint | None] = []
    recalled = 0
    chosen = zip(index[local].tolist(), available[local].tolist(), group_shows[local].tolist(), strict=True)
    for row, (source, has_feedback, has_sibling) in enumerate(chosen):
        solution = all_texts[source] if source >= 0 else None
        if solution is None and not has_sibling:
            solution = remembered[row] or rollouts.worked_solutions[row]
            recalled += solution is not None and solution is remembered[row]
        feedback, turns = (rollouts.feedback[row], rollouts.turns[row]) if rule.include_feedback else (None, ())
        if solution is not None and rule.feedback_only_without_solution:
            feedback, turns = None, ()
        told = has_feedback or solution is not None
        hints.append(hint_of(solution, feedback, turns) if told else None)

    return Routing(
        hints, {**_stats(rollouts, hints, all_success, local, group_size), "remembered_share": float(recalled)}
    )


def route_without_feedback(rollouts: Rollouts, all_success: torch.Tensor, local: slice, group_size: int) -> Routing:
    """As [`route`] where the teacher reads nothing but the student's own context: every row is distilled."""
    hints: list[Hint | None] = [Hint()] * len(rollouts.prompts)
    return Routing(hints, _stats(rollouts, hints, all_success, local, group_size))


def rerouted(
    routing: Routing,
    chosen: Sequence[Hint | None],
    rollouts: Rollouts,
    all_success: torch.Tensor,
    local: slice,
    group_size: int,
) -> Routing:
    """
    The routing with the hints that a subclass chose instead, and their metrics.

    Raises:
        `TypeError`, `ValueError`: they are not one [`Hint`] or `None` per local row.
    """
    source = "`choose_hints`"
    if not isinstance(chosen, Sequence) or isinstance(chosen, str):
        raise TypeError(f"{source} must return a list with one `Hint` or `None` per rollout, got {chosen!r:.80}.")
    if len(chosen) != len(routing.hints):
        raise ValueError(f"{source} must return one `Hint` or `None` per rollout: {len(routing.hints)} were sampled, "
                         f"{len(chosen)} returned.")  # fmt: skip
    for row, hint in enumerate(chosen):
        if hint is not None and not isinstance(hint, Hint):
            raise TypeError(
                f"{source} returned {hint!r:.80} for rollout {row}. Return a `sdpo_trl.reprompt.Hint`, say "
                "`Hint(feedback=text)`, or `None`."
            )
    hints = [None if hint is None else _tidied(hint, row) for row, hint in enumerate(chosen)]
    if hints == routing.hints:
        return routing
    recalled = {"remembered_share": routing.stats["remembered_share"]}
    return Routing(hints, {**_stats(rollouts, hints, all_success, local, group_size), **recalled})


def _tidied(hint: Hint, row: int) -> Hint | None:
    """
    As the trainer's own sources make hints: blank texts are none, halves of surrogate pairs are written out, texts on
    one turn are joined, and what is told to the first turn stands in the prompt.
    """
    whole = [("`solution`", hint.solution), ("`feedback`", hint.feedback)]
    for name, text in whole:
        if not (isinstance(text, str) or text is None):
            raise TypeError(_wrong_text(name, text, row))
    for name, value in (("turns", hint.turns), ("hinted", () if hint.hinted is None else hint.hinted)):
        if not isinstance(value, (list, tuple)):
            raise TypeError(
                f"`choose_hints` returned a hint for rollout {row} whose `{name}` are a {type(value).__name__} "
                f"({value!r:.80}). Give a tuple."
            )
    for pair in hint.turns:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise TypeError(
                f"`choose_hints` returned a hint for rollout {row} whose `turns` hold {pair!r:.80}. Give pairs "
                "`(turn, text)`."
            )
        if not isinstance(pair[1], str):
            raise TypeError(_wrong_text("text on a turn", pair[1], row))
    for turn in [*(turn for turn, _ in hint.turns), *(hint.hinted or ())]:
        if not isinstance(turn, int) or isinstance(turn, bool) or turn < 0:
            raise ValueError(
                f"`choose_hints` returned a hint for rollout {row} with the turn {turn!r}. Turns are whole numbers, "
                "the first one is 0."
            )
    if hint.hinted is not None and not tuple(hint.hinted):
        raise ValueError(
            f"`choose_hints` returned a hint for rollout {row} that hints no turn (`hinted=()`). Return `None` for a "
            "rollout that is not distilled, or a hint with `hinted=None` for one that is distilled whole."
        )
    solution, feedback = (well_formed(text) if text and text.strip() else None for _, text in whole)
    (turns,) = join_turns([[tuple((turn, well_formed(text)) for turn, text in hint.turns if text.strip())]], 1)
    tidied = replace(
        hint_of(solution, feedback, turns), hinted=None if hint.hinted is None else tuple(sorted({*hint.hinted}))
    )
    return None if tidied.is_empty else tidied


def _wrong_text(name: str, text: object, row: int) -> str:
    return (
        f"The {name} of rollout {row} is a {type(text).__name__} ({text!r:.80}) in the hint that `choose_hints` "
        "returned. Give one text, or `None` for no hint."
    )


def _stats(
    rollouts: Rollouts, hints: list[Hint | None], all_success: torch.Tensor, local: slice, group_size: int
) -> dict[str, float]:
    """Local sums, named as the metrics."""
    success = all_success[local].tolist()
    group_solved = all_success.view(-1, group_size).any(dim=1)
    shown = [hint is not None and hint.solution is not None for hint in hints]
    return {
        "rollouts": float(len(hints)),
        "success_share": float(sum(success)),
        # Groups may span processes, so each one is counted once, in equal parts, by all of its rows.
        "success_group_share": group_solved.repeat_interleave(group_size)[local].sum().item(),
        "demonstration_share": float(sum(shown)),
        "feedback_share": float(sum(rollouts.rich)),
        "hinted_share": float(sum(hint is not None for hint in hints)),
        "remembered_share": 0.0,
        "lone_success_share": float(sum(passed and not had for passed, had in zip(success, shown, strict=True))),
    }
