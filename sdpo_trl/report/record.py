"""What a heat map shows, as plain data: text, token ids and numbers that survive a trip through JSON.

Knows: the standard library. Deliberately does not know: models, tensors, HTML.
"""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

TokenRole = Literal["scored", "context", "unscored"]


@dataclass(frozen=True)
class Candidate:
    """
    One of the likeliest next tokens.

    Args:
        id (`int`): Its id.
        text (`str`): Its text.
        probability (`float`): In `[0, 1]`, at the sampling temperature.
    """

    id: int
    text: str
    probability: float


@dataclass(frozen=True)
class TokenValues:
    """
    What both models say about one sampled token, in nats.

    Args:
        divergence (`float`): As the loss has it; with `"sampled_token"` its one-sample estimate, minus the log-ratio.
        log_ratio (`float`): `log p_T - log p_S` of the sampled token: above 0, the teacher raises it.
        student_log_prob (`float`): Of the sampled token.
        teacher_log_prob (`float`): Of the sampled token.
        student_entropy (`float`): Of the next-token distribution.
        teacher_entropy (`float`): Likewise.
        student_top (`tuple[Candidate, ...]`): The student's likeliest tokens, the first one most.
        teacher_top (`tuple[Candidate, ...]`): The teacher's.
    """

    divergence: float
    log_ratio: float
    student_log_prob: float
    teacher_log_prob: float
    student_entropy: float
    teacher_entropy: float
    student_top: tuple[Candidate, ...]
    teacher_top: tuple[Candidate, ...]


@dataclass(frozen=True)
class TokenView:
    """
    One token of an answer.

    Args:
        id (`int`): Its id.
        text (`str`): Its text, as the tokenizer decodes it.
        role (`str`): `"scored"`, `"context"` (a tool or the environment wrote it) or `"unscored"` (sampled, but there
            was nothing to compare).
        values ([`TokenValues`], *optional*): Of a scored token.
    """

    id: int
    text: str
    role: TokenRole
    values: TokenValues | None = None


@dataclass(frozen=True)
class RolloutView:
    """
    One answer.

    Args:
        name (`str`): Tells it from its siblings.
        tokens (`tuple[TokenView, ...]`): The answer.
        feedback (`str`, *optional*): What the environment, a judge or the user said about it.
        solution (`str`, *optional*): The demonstration that the teacher was shown, where it is known apart.
        teacher_prompt (`str`, *optional*): What the teacher read before the answer; `None` if it had nothing to read.
        reward (`float`, *optional*): The weighted sum.
        rewards (`dict[str, float | None]`): By reward function.
        advantage (`float`, *optional*): GRPO's.
    """

    name: str
    tokens: tuple[TokenView, ...]
    feedback: str | None = None
    solution: str | None = None
    teacher_prompt: str | None = None
    reward: float | None = None
    rewards: dict[str, float | None] = field(default_factory=dict)
    advantage: float | None = None


@dataclass(frozen=True)
class Heatmap:
    """
    Rollouts of one prompt, token by token. A notebook shows it as the page that [`Heatmap.html`] gives.

    Args:
        title (`str`): Of the page.
        prompt (`str`): What the student read, special tokens included.
        rollouts (`tuple[RolloutView, ...]`): Side by side on the page.
        settings (`dict[str, str]`): What the values depend on: divergence, temperature, step, ...
        notes (`tuple[str, ...]`): What a reader should know before trusting the page.
    """

    title: str
    prompt: str
    rollouts: tuple[RolloutView, ...]
    settings: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """ASCII JSON; a number that is not finite is a string (`"nan"`, `"inf"`, `"-inf"`)."""
        return json.dumps(_finite(asdict(self)), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Heatmap":
        """The inverse of [`Heatmap.to_json`], exactly."""
        data = json.loads(text)
        return cls(
            data["title"],
            data["prompt"],
            tuple(_rollout(row) for row in data["rollouts"]),
            data["settings"],
            tuple(data["notes"]),
        )

    def html(self) -> str:
        """One self-contained page; see [`~sdpo_trl.report.page.render`]."""
        from .page import render

        return render(self)

    def save(self, path: "str | Path") -> Path:
        """Write the page; folders are made as needed."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self.html(), encoding="utf-8")
        return target

    def _repr_html_(self) -> str:
        from .page import framed

        return framed(self.html(), self.title)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _values(data: dict[str, Any]) -> TokenValues:
    tops = {
        name: tuple(Candidate(c["id"], c["text"], float(c["probability"])) for c in data[name])
        for name in ("student_top", "teacher_top")
    }
    return TokenValues(**{name: float(value) for name, value in data.items() if name not in tops}, **tops)


def _rollout(data: dict[str, Any]) -> RolloutView:
    tokens = tuple(
        TokenView(t["id"], t["text"], t["role"], None if t["values"] is None else _values(t["values"]))
        for t in data["tokens"]
    )
    rewards = {name: _number(value) for name, value in data["rewards"].items()}
    numbers = {"reward": _number(data["reward"]), "advantage": _number(data["advantage"])}
    return RolloutView(**{**data, "tokens": tokens, "rewards": rewards, **numbers})
