"""Which numbers of a run stand together in which chart.

Knows: the names under which TRL and the trainer log. Deliberately does not know: HTML, drawing, files.
"""

import math
from collections.abc import Sequence

from ..timing import PARTS
from .charts import Chart, Series
from .run import RunRecord

# More points than this are thinned out: no screen shows them, and pages stay small.
MOST_POINTS = 1000

_PART_NAMES = {"teacher_update": "teacher's update", "optimizer": "optimizer", "other": "the rest"}
# Title, unit, whether shares, and the lines: what it is, the name in the logs, whether all zeros are worth a line.
_CHARTS = (
    ("Reward", "weighted sum", False, (("training", "reward", True), ("evaluation", "eval_reward", True))),
    (
        "Success", "share", True,
        (
            ("rollouts that pass", "sdpo/success_share", True),
            ("prompts with a success", "sdpo/success_group_share", True),
            ("evaluation", "eval_sdpo/success_share", True),
            ("self-teacher with feedback, in evaluation", "eval_sdpo/teacher_success_share", True),
        ),
    ),
    (
        "Divergence from the teacher", "nats per token", False,
        (("training", "sdpo/divergence", True), ("evaluation", "eval_sdpo/divergence", False)),
    ),
    (
        "Gap of the sampled token", "log p of teacher \N{MINUS SIGN} of student", False,
        (("mean", "sdpo/teacher_student_gap", True), ("mean size", "sdpo/gap_size", True)),
    ),
    (
        "Entropy of the next token", "nats", False,
        (("student", "sdpo/student_entropy", True), ("teacher", "sdpo/teacher_entropy", True)),
    ),
    (
        "What the teachers are told", "share of rollouts", True,
        (
            ("anything", "sdpo/hinted_share", True),
            ("a sibling's success", "sdpo/demonstration_share", True),
            ("feedback of its own", "sdpo/feedback_share", True),
            ("distilled", "sdpo/distilled_share", True),
            ("an earlier success", "sdpo/remembered_share", False),
            ("cut to fit", "sdpo/shortened_share", False),
        ),
    ),
    (
        "Length of answers", "tokens", False,
        (
            ("mean", "completions/mean_length", True),
            ("longest", "completions/max_length", True),
            ("shortest", "completions/min_length", True),
        ),
    ),
    (
        "What is cut", "share", True,
        (
            ("answers at the limit", "completions/clipped_ratio", True),
            ("importance ratios", "sdpo/ratio_clipped_share", False),
            ("log-ratios", "sdpo/log_ratio_clipped_share", False),
        ),
    ),
    ("Distance of the teacher's weights", "L2 norm", False, (("to the student's", "sdpo/teacher_distance", True),)),
    ("Loss", "", False, (("training", "loss", True), ("evaluation", "eval_loss", False))),
    ("Gradient", "L2 norm", False, (("before it is clipped", "grad_norm", True),)),
    (
        "Turns and tool calls", "per rollout", False,
        (
            ("turns", "sdpo/turns", True),
            ("tool calls", "sdpo/tool_calls", True),
            ("calls that failed", "sdpo/tool_failures", True),
        ),
    ),
)  # fmt: skip


def thin(points: Sequence[tuple[int, float]], most: int = MOST_POINTS) -> tuple[tuple[int, float], ...]:
    """At most so many of them, evenly, the first and the last among them."""
    if len(points) <= most:
        return tuple(points)
    return tuple(points[i * (len(points) - 1) // (most - 1)] for i in range(most))


def names_of(run: RunRecord, name: str) -> list[tuple[str, str]]:
    """Under which names a number was logged, and what tells them apart: one for each evaluation set."""
    if not name.startswith("eval_"):
        return [(name, "")]
    return [
        (f"{prefix}_{name.removeprefix('eval_')}", "" if prefix == "eval" else f" ({prefix.removeprefix('eval_')})")
        for prefix in run.evaluations
    ]


def charts(run: RunRecord) -> list[Chart]:
    """All charts for which the run has numbers, the time of a step last."""
    made = []
    for title, unit, share, lines in _CHARTS:
        found = [
            (label + suffix, run.series(name), always) for label, under, always in lines
            for name, suffix in names_of(run, under)
        ]  # fmt: skip
        series = [
            Series(label, thin(points)) for label, points, always in found
            if points and (always or any(value for _, value in points))
        ]  # fmt: skip
        if series:
            made.append(Chart(title, unit, tuple(series), share=share))
    made += _by_function(run)
    times = _times(run)
    return [*made, times] if times else made


def _by_function(run: RunRecord) -> list[Chart]:
    """The reward functions one by one, where there are several."""
    names = sorted({
        name for _, values in run.logs for name in values
        if name.startswith("rewards/") and name.endswith("/mean")
    })  # fmt: skip
    lines = [Series(name.split("/", 1)[1].removesuffix("/mean"), thin(run.series(name))) for name in names]
    lines = [line for line in lines if line.points]
    return [Chart("Rewards by function", "mean", tuple(lines))] if len(lines) > 1 else []


def _times(run: RunRecord) -> Chart | None:
    """Where the time of a step goes, parts upon one another."""
    rows = [
        (step, [values.get(f"sdpo/time/{part}", 0.0) for part in PARTS])
        for step, values in run.logs
        if math.isfinite(sum(value for name, value in values.items() if name.startswith("sdpo/time/")))
        and "sdpo/time/step" in values
    ]
    if not rows:
        return None
    series = []
    for index, part in enumerate(PARTS):
        points = [(step, parts[index]) for step, parts in rows]
        if any(value for _, value in points):
            series.append(Series(_PART_NAMES.get(part, part), thin(points)))
    return Chart("Time of a step", "seconds", tuple(series), stacked=True) if series else None
