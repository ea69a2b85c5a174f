"""What one rollout batch has to say: texts from each source, successes, and who is shown what."""

import asyncio
import copy
import math
import random
from types import SimpleNamespace

import pytest
import torch
from trl.trainer.utils import shutdown_event_loop_in_daemon, start_event_loop_in_daemon

from sdpo_trl.feedback_sources import column_texts, environment_texts, function_texts, gather_feedback, logged_texts
from sdpo_trl.reprompt import Hint
from sdpo_trl.rollouts import Rollouts, RoutingRule, demonstrations, route, succeeded, weighted_rewards

NAN = float("nan")


# Sources


def test_logged_texts_of_one_and_of_several_functions():
    assert logged_texts([], 3) == []
    assert logged_texts([["a", None, " "]], 3) == [["a", None, None]]
    assert logged_texts([["a", None, "c"], ("d", "e", None)], 3) == [["a", None, "c"], ["d", "e", None]]
    assert logged_texts([["a"], ["b"]], 1) == [["a"], ["b"]]


@pytest.mark.parametrize(
    ("calls", "error", "parts"),
    [
        ([["a"]], ValueError, ["log_extra", "1", "3"]),
        ([["a", "b", "c"], ["d"]], ValueError, ["log_extra", "3"]),
        ([["a", "b", "c", "d"]], ValueError, ["log_extra", "4", "3"]),
        ([["a", "b"], ["c", "d", "e", "f"]], ValueError, ["log_extra", "3"]),
        (["abc"], TypeError, ["log_extra", "str"]),
        ([["a", 2, "c"]], TypeError, ["log_extra", "int", "rollout 1"]),
        ([["a", "b", "c"], [None, None, 0.5]], TypeError, ["log_extra", "float", "rollout 2"]),
    ],
)
def test_logged_texts_name_what_is_wrong(calls, error, parts):
    with pytest.raises(error) as caught:
        logged_texts(calls, 3)
    for part in parts:
        assert part in str(caught.value)


def test_environment_texts():
    class Computed:
        @property
        def feedback(self):
            return "f(2)=4"

    assert environment_texts(None) is None
    environments = [SimpleNamespace(feedback="a"), Computed(), SimpleNamespace(), SimpleNamespace(feedback=None)]
    assert environment_texts(environments) == ["a", "f(2)=4", None, None]
    assert environment_texts([SimpleNamespace(feedback=" \n")]) == [None]
    with pytest.raises(TypeError, match=r"environments.*feedback.*int.*rollout 1"):
        environment_texts([SimpleNamespace(), SimpleNamespace(feedback=3)])


def test_an_environment_whose_property_breaks_is_not_an_environment_without_feedback():
    class Broken:
        @property
        def feedback(self):
            return self.missing_state

    with pytest.raises(AttributeError, match="missing_state"):
        environment_texts([Broken()])


def test_a_wrapped_environment_still_speaks():
    class Wrapper:
        """Hands on whatever it lacks, as environment wrappers do."""

        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

    silent = SimpleNamespace()
    assert environment_texts([Wrapper(SimpleNamespace(feedback="a")), Wrapper(silent)]) == ["a", None]


def test_column_texts():
    assert column_texts([{"hint": "a"}, {"hint": None}, {}, {"hint": "  "}], "hint") == ["a", None, None, None]
    with pytest.raises(TypeError, match=r"column `hint`.*list.*rollout 1"):
        column_texts([{"hint": "a"}, {"hint": ["b"]}], "hint")


INPUTS = [
    {"prompt": "p0", "answer": "1", "meta": {"k": 0}},
    {"prompt": "p0", "answer": "1", "meta": {"k": 0}},
    {"prompt": "p1", "answer": "2", "meta": {"k": 1}},
]


def call_function(func, inputs=INPUTS, loop=None):
    return function_texts(
        func, [row["prompt"] for row in inputs], ["a", "b", "c"], [1.0, 0.0, NAN], inputs, lambda: loop
    )


def test_function_texts_sees_all_columns_in_order():
    seen = {}

    def judge(prompts, completions, rewards, answer, **columns):
        seen.update(columns, prompts=prompts, completions=completions, rewards=rewards)
        rows = zip(prompts, completions, rewards, answer, strict=True)
        return [f"{p}: {c} is not {a}" if r == 0.0 else None for p, c, r, a in rows]

    before = copy.deepcopy(INPUTS)
    assert call_function(judge) == [None, "p0: b is not 1", None]
    assert seen["prompts"] == ["p0", "p0", "p1"] and seen["completions"] == ["a", "b", "c"]
    assert seen["rewards"][:2] == [1.0, 0.0] and math.isnan(seen["rewards"][2])
    assert seen["meta"] == [{"k": 0}, {"k": 0}, {"k": 1}] and "prompt" not in seen
    assert before == INPUTS


def test_function_texts_async():
    async def judge(prompts, completions, rewards, **columns):
        await asyncio.sleep(0)
        return [f"{completion}?" for completion in completions[:-1]] + [" "]

    class Judge:
        async def __call__(self, prompts, completions, rewards, **columns):
            return await judge(prompts, completions, rewards)

    thread, loop, ready = start_event_loop_in_daemon(name="test")
    ready.wait()
    try:
        assert call_function(judge, loop=loop) == ["a?", "b?", None]
        assert call_function(Judge(), loop=loop) == ["a?", "b?", None]
    finally:
        shutdown_event_loop_in_daemon(thread, loop)


@pytest.mark.parametrize(
    ("given", "error", "pattern"),
    [
        (["a"], ValueError, r"feedback_func.*1.*3"),
        (["a"] * 4, ValueError, r"feedback_func.*4.*3"),
        ("abc", TypeError, r"feedback_func.*str"),
        (None, TypeError, r"feedback_func.*NoneType"),
        (["a", None, 1], TypeError, r"feedback_func.*int.*rollout 2"),
    ],
)
def test_function_texts_name_the_source(given, error, pattern):
    with pytest.raises(error, match=pattern):
        call_function(lambda *args, **columns: given)


@pytest.mark.parametrize("name", ["prompts", "completions", "rewards"])
def test_function_texts_refuse_a_colliding_column(name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        call_function(lambda *args, **columns: [None] * 3, [{**row, name: 1} for row in INPUTS])


def test_gather_feedback_skips_absent_sources():
    assert gather_feedback([None, ["a", None], None, ["b", None]], 2) == ["a\n\nb", None]
    assert gather_feedback([None, None], 2) == [None, None]


# Success


def test_weighted_rewards():
    rewards = torch.tensor([[1.0, 0.5], [NAN, 0.5], [1.0, NAN], [NAN, NAN], [0.0, 0.0]])
    total = weighted_rewards(rewards, torch.tensor([2.0, -1.0]))
    assert total[:3].tolist() == [1.5, -0.5, 2.0] and total[4].item() == 0.0
    assert total[3].isnan() and total.dtype == torch.float64


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.7, 0.2, 0.1]])
def test_sums_that_miss_by_rounding_succeed(weights):
    parts = torch.tensor([[0.7, 0.2, 0.1]]) / torch.tensor(weights)
    assert succeeded(weighted_rewards(parts, torch.tensor(weights)), 1.0).tolist() == [True]
    assert succeeded(parts.mul(torch.tensor(weights)).sum(1), 1.0).tolist() == [True]  # summed in float32
    assert succeeded(torch.tensor([0.1 + 0.2]), 0.3).tolist() == [True]


def test_succeeded():
    rewards = torch.tensor([NAN, 0.0, 0.999, 1.0, 7.0, float("inf"), float("-inf"), -1.0])
    assert succeeded(rewards, 1.0).tolist() == [False, False, False, True, True, True, False, False]
    assert succeeded(rewards, 0.0).tolist() == [False, True, True, True, True, True, False, False]
    assert succeeded(rewards, -1.0).tolist() == [False, True, True, True, True, True, False, True]
    thousands = torch.tensor([1000.0, 999.9995, 999.9], dtype=torch.float64)
    assert succeeded(thousands, 1000.0).tolist() == [True, True, False]
    assert succeeded(torch.tensor([0.5, 1.0], dtype=torch.bfloat16), 1.0).tolist() == [False, True]


# Demonstrations


def rollouts(completions=None, feedback=None, worked=None, count=4):
    return Rollouts(
        prompts=["p"] * count,
        completions=completions or [f"answer {i}" for i in range(count)],
        rewards=torch.zeros(count, 1),
        feedback=feedback or [None] * count,
        worked_solutions=worked or [None] * count,
    )


def test_demonstrations_are_the_texts_of_successes():
    batch = rollouts(["a", [{"role": "assistant", "content": "b"}], "c", " \n"])
    success = torch.tensor([True, True, False, True])
    assert demonstrations(batch, success, True, [False] * 4) == ["a", "b", None, None]
    assert demonstrations(batch, success, False, [False] * 4) == ["a", "b", None, None]
    assert demonstrations(batch, ~success, True, [False] * 4) == [None, None, "c", None]


def test_demonstrations_without_thinking():
    batch = rollouts(["<think>a</think>x", "b</think>x", "b</think>x", "never closed"])
    success = torch.tensor([True] * 4)
    opened = [False, False, True, True]
    assert demonstrations(batch, success, True, opened) == ["x", "x", "x", None]
    assert demonstrations(batch, success, False, opened) == batch.completions
    assert batch.completions[0] == "<think>a</think>x"


# Routing

RULE = RoutingRule(
    use_successful_as_teacher=True, exclude_self=True, include_feedback=True, feedback_only_without_solution=True
)


def rule(**changes):
    return RoutingRule(**{**vars(RULE), **changes})


def route_one(batch, success, the_rule, group_size, local=slice(None)):
    """Route a batch that one process holds in full, or the local part of it."""
    success = torch.tensor(success)
    texts = [text if passed else None for text, passed in zip(batch.completions, success.tolist(), strict=True)]
    rich = torch.tensor([text is not None for text in batch.feedback])
    size = len(batch.completions)
    start, stop, _ = local.indices(size)
    here = Rollouts(
        batch.prompts[start:stop],
        batch.completions[start:stop],
        batch.rewards,
        batch.feedback[start:stop],
        batch.worked_solutions[start:stop],
    )
    return route(here, success, texts, rich, slice(start, stop), group_size, the_rule)


def test_route_of_one_batch_by_hand():
    """Two groups of four: one has two successes, the other none."""
    batch = rollouts(
        completions=[f"answer {i}" for i in range(8)],
        feedback=["f0", None, "f2", None, "f4", None, "f6", None],
        worked=["w0"] * 4 + ["w1"] * 2 + [None] * 2,
        count=8,
    )
    success = [False, True, True, False] + [False] * 4
    hints = route_one(batch, success, RULE, 4).hints
    assert hints == [
        Hint("answer 1"),
        Hint("answer 2"),  # not itself
        Hint("answer 1"),
        Hint("answer 1"),
        Hint("w1"),
        Hint("w1"),
        Hint(feedback="f6"),
        None,
    ]
    both = route_one(batch, success, rule(feedback_only_without_solution=False), 4).hints
    assert both == [
        Hint("answer 1", "f0"),
        Hint("answer 2"),
        Hint("answer 1", "f2"),
        Hint("answer 1"),
        Hint("w1", "f4"),
        Hint("w1"),
        Hint(feedback="f6"),
        None,
    ]
    own = route_one(batch, success, rule(exclude_self=False), 4).hints
    assert own[:4] == [Hint("answer 1"), Hint("answer 1"), Hint("answer 2"), Hint("answer 1")]
    blind = route_one(batch, success, rule(include_feedback=False), 4).hints
    assert blind == [*hints[:6], None, None]


def test_route_without_demonstrations_from_rollouts():
    batch = rollouts(feedback=["f0", None, None, None], worked=["w", None, "w", None])
    hints = route_one(batch, [True, True, False, False], rule(use_successful_as_teacher=False), 2).hints
    assert hints == [Hint("w"), None, Hint("w"), None]
    hints = route_one(
        rollouts(feedback=["f0", None, "f2", None]), [True] * 4, rule(use_successful_as_teacher=False), 2
    )
    assert hints.hints == [Hint(feedback="f0"), None, Hint(feedback="f2"), None]


def test_a_lone_success_is_masked_or_uses_its_own_feedback():
    silent = route_one(rollouts(worked=["w"] * 4), [True, False, False, False], RULE, 4)
    assert silent.hints == [None, *[Hint("answer 0")] * 3]  # the worked solution is for groups without a success
    assert silent.stats["lone_success_share"] == 1.0
    told = route_one(rollouts(feedback=["slow", None, None, None]), [True, False, False, False], RULE, 4)
    assert told.hints == [Hint(feedback="slow"), *[Hint("answer 0")] * 3]
    assert told.stats["lone_success_share"] == 1.0
    own = route_one(rollouts(), [True, False, False, False], rule(exclude_self=False), 4)
    assert own.hints == [Hint("answer 0")] * 4
    assert own.stats["lone_success_share"] == 0.0


def test_a_success_with_nothing_to_show_is_no_demonstration():
    """Its thinking never closed: the others, and it, are told something else."""
    batch = rollouts(feedback=[None, "f1", None, None], worked=["w", "w", None, None])
    success = torch.tensor([True, False, True, True])
    hints = route(
        batch, success, [None, None, None, "answer 3"], torch.tensor([0, 1, 0, 0]).bool(), slice(0, 4), 2, RULE
    )
    assert hints.hints == [Hint("w"), Hint("w"), Hint("answer 3"), None]
    assert hints.stats["success_share"] == 3.0 and hints.stats["success_group_share"] == 4.0


@pytest.mark.parametrize("outcome", [True, False])
@pytest.mark.parametrize("group_size", [1, 2, 4])
def test_groups_that_all_pass_or_all_fail(outcome, group_size):
    routing = route_one(rollouts(), [outcome] * 4, RULE, group_size)
    told = outcome and group_size > 1
    assert [hint is not None for hint in routing.hints] == [told] * 4
    assert all(math.isfinite(value) for value in routing.stats.values())
    assert routing.stats["hinted_share"] == (4.0 if told else 0.0)
    assert routing.stats["lone_success_share"] == (4.0 if outcome and not told else 0.0)


def test_stats_are_counts():
    batch = rollouts(feedback=["f0", None, "f2", "f3"], worked=[None, None, "w", None])
    stats = route_one(batch, [True, False, False, False], rule(feedback_only_without_solution=False), 2).stats
    assert stats == {
        "rollouts": 4.0,
        "success_share": 1.0,
        "success_group_share": 2.0,
        "demonstration_share": 2.0,  # the failure beside the success, and the worked solution
        "feedback_share": 3.0,
        "hinted_share": 4.0,
        "remembered_share": 0.0,
        "lone_success_share": 1.0,
    }


def naive_hint(batch, success, row, group_size, the_rule):
    """One row's hint as the contract words it."""
    first = row // group_size * group_size
    group = range(first, first + group_size)
    showing = [i for i in group if success[i]] if the_rule.use_successful_as_teacher else []
    candidates = [i for i in showing if i != row] if the_rule.exclude_self else showing
    solution = None
    if row in candidates:
        solution = batch.completions[row]
    elif candidates:
        solution = batch.completions[candidates[0]]
    elif not showing:
        solution = batch.worked_solutions[row]
    feedback = batch.feedback[row] if the_rule.include_feedback else None
    if solution is not None and the_rule.feedback_only_without_solution:
        feedback = None
    return None if solution is None and feedback is None else Hint(solution, feedback)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_route_equals_the_naive_rule_on_every_process(processes):
    """Groups span processes; each process finds its own rows of the same answer."""
    generator = random.Random(5)
    for _ in range(60):
        the_rule = RoutingRule(*(generator.random() < 0.5 for _ in range(4)))
        group_size = generator.choice([1, 2, 3, 4, 6, 12])
        batch = rollouts(
            completions=[f"answer {i}" for i in range(12)],
            feedback=[generator.choice([None, f"feedback {i}"]) for i in range(12)],
            worked=[generator.choice([None, f"worked {i}"]) for i in range(12)],
            count=12,
        )
        success = [generator.random() < generator.choice([0.0, 0.3, 1.0]) for _ in range(12)]
        expected = [naive_hint(batch, success, row, group_size, the_rule) for row in range(12)]
        size = 12 // processes
        parts = [
            route_one(batch, success, the_rule, group_size, slice(i * size, (i + 1) * size)) for i in range(processes)
        ]
        assert [hint for part in parts for hint in part.hints] == expected
        groups = [any(success[i : i + group_size]) for i in range(0, 12, group_size)]
        total = {name: sum(part.stats[name] for part in parts) for name in parts[0].stats}
        assert total["rollouts"] == 12
        assert total["success_share"] == sum(success)
        assert total["success_group_share"] == sum(groups) * group_size
        assert total["demonstration_share"] == sum(hint is not None and hint.solution is not None for hint in expected)
        assert total["hinted_share"] == sum(hint is not None for hint in expected)
        assert total["feedback_share"] == sum(text is not None for text in batch.feedback)
