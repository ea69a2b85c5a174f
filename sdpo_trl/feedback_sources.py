"""The sources of feedback: columns, reward functions, environments, a function of the user's.

Knows: texts, rows, coroutines. Deliberately does not know: tokenizers, models, losses.
"""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from .feedback import Feedback, TurnText, check_texts, join_texts, join_turns
from .reprompt import Prompt


def column_texts(inputs: Sequence[dict[str, Any]], column: str) -> list[str | None]:
    """The texts of a dataset column, `None` where it or its text is missing."""
    return check_texts([row.get(column) for row in inputs], len(inputs), f"The dataset column `{column}`")


def logged_texts(calls: Sequence[Any], count: int) -> list[list[Feedback]]:
    """
    What reward functions gave to `log_extra("feedback", ...)`: one list per round over the rollouts.

    A round is one call with a text per rollout, or as many calls with a single text.

    Args:
        calls (`Sequence`): The values of each call, in order.
        count (`int`): Number of rollouts.
    """
    source = "`log_extra('feedback', ...)`"
    rounds: list[list[Feedback]] = []
    singles: list[Any] = []
    for call in calls:
        if isinstance(call, str):
            raise TypeError(f"{source} needs a list with one `str` or `None` per rollout, got a `str`: {call[:80]!r}.")
        if not isinstance(call, Sequence):
            raise TypeError(f"{source} needs a list with one `str` or `None` per rollout, got {type(call).__name__}.")
        if len(call) == count:
            rounds.append(check_texts(call, count, source, turns=True))
        elif len(call) == 1:
            singles.extend(call)
        else:
            check_texts(call, count, source)
    if len(singles) % count:
        check_texts(singles, count, source)
    rounds += [check_texts(singles[i : i + count], count, source, turns=True) for i in range(0, len(singles), count)]
    return rounds


def environment_texts(environments: Sequence[Any] | None) -> list[Feedback] | None:
    """The `feedback` of each rollout's environment, `None` where it has no such attribute; `None` without any."""
    if environments is None:
        return None

    def text_of(environment: Any) -> Any:
        try:
            return environment.feedback
        except AttributeError:
            # A property that breaks is no environment without feedback.
            if inspect.getattr_static(environment, "feedback", None) is not None:
                raise
            return None

    source = "The environments' `feedback`"
    return check_texts([text_of(x) for x in environments], len(environments), source, turns=True)


def function_texts(
    func: Callable[..., Any],
    prompts: list[Prompt],
    completions: list[Prompt],
    rewards: list[float],
    inputs: Sequence[dict[str, Any]],
    event_loop: Callable[[], asyncio.AbstractEventLoop],
) -> list[Feedback]:
    """Call `feedback_func(prompts, completions, rewards, **columns)`, on `event_loop()` if it gives a coroutine."""
    columns = {key: [row[key] for row in inputs] for key in inputs[0] if key != "prompt"}
    taken = sorted(columns.keys() & {"prompts", "completions", "rewards"})
    if taken:
        raise ValueError(f"The dataset column `{taken[0]}` collides with an argument of `feedback_func`. Rename it.")
    texts = func(prompts, completions, rewards, **columns)
    if inspect.iscoroutine(texts):  # asyncio's own check takes generators for coroutines
        texts = asyncio.run_coroutine_threadsafe(texts, event_loop()).result()
    return check_texts(texts, len(prompts), "`feedback_func`", turns=True)


def gather_feedback(sources: Sequence[list[Feedback] | None], count: int) -> list[str | None]:
    """Join the texts of all sources that exist, in their order."""
    return join_texts([source for source in sources if source is not None], count)


def gather_turn_feedback(sources: Sequence[list[Feedback] | None], count: int) -> list[tuple[TurnText, ...]]:
    """Join the texts per turn of all sources that exist, in their order."""
    return join_turns([source for source in sources if source is not None], count)


def shown_feedback(text: str | None, turns: tuple[TurnText, ...]) -> str | None:
    """One rollout's feedback as a table shows it."""
    parts = [] if text is None else [text]
    return "\n\n".join([*parts, *(f"[turn {turn}] {told}" for turn, told in turns)]) or None
