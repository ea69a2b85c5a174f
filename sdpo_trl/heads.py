"""From hidden states to values per token.

A head is the hidden states that predict some tokens together with the output matrix that turns them into logits.
Knows: projection, temperature, the logit rules of the architectures. Deliberately does not know: prompts, rollouts,
teachers' update rules. One function, [`token_values`], turns a student's and a teacher's head into everything the
trainer needs.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import nn

from .divergence import DivergenceSpec, entropy, safe_log_softmax, token_divergence, upcast


def logit_rules(config) -> tuple[float, float | None]:
    """
    How an architecture treats its logits: `softcap * tanh(scale * x / softcap)`.

    Args:
        config (`transformers.PretrainedConfig`): The model's (text) configuration.

    Returns:
        `tuple[float, float | None]`: the scale (1.0 where there is none) and the soft cap.
    """
    values = config.get_text_config().to_dict()
    softcap = values.get("final_logit_softcapping")
    # Cohere; Muse Glimmer; Falcon-H1. The first one that is set counts.
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if values.get(name) is not None:
            return values[name], softcap
    scaling = values.get("logits_scaling")
    if scaling is None:
        return 1.0, softcap
    # Granite and MiniCPM3 divide by it, HyperCLOVA X multiplies.
    return (scaling if values["model_type"] == "hyperclovax" else 1 / scaling), softcap


@dataclass(frozen=True)
class TokenHead:
    """
    Hidden states and the output matrix that reads them.

    Args:
        hidden (`torch.Tensor`): Shape `(n, H)`, the states that predict the `n` scored tokens.
        weight (`torch.Tensor`): Shape `(V, H)`.
        bias (`torch.Tensor`, *optional*): Shape `(V,)`.
        temperature (`float`): The sampling temperature, `> 0`; logits are divided by it.
        scale (`float`): See [`logit_rules`].
        softcap (`float`, *optional*): See [`logit_rules`].
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None

    @property
    def vocab_size(self) -> int:
        return self.weight.size(0)

    def logits(self, vocab_size: int) -> torch.Tensor:
        """The first `vocab_size` logits, `(n, vocab_size)`, divided by the temperature, in float32 or better."""
        weight = self.weight[:vocab_size]
        bias = None if self.bias is None else self.bias[:vocab_size]
        logits = upcast(F.linear(self.hidden.to(weight.dtype), weight, bias)) * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits / self.temperature

    def detach(self) -> "TokenHead":
        """The same head without a graph. The tensors are shared, so a later change *in place* would show."""
        bias = None if self.bias is None else self.bias.detach()
        return replace(self, hidden=self.hidden.detach(), weight=self.weight.detach(), bias=bias)


def predicting(head: TokenHead, active: torch.Tensor) -> TokenHead:
    """
    The states that predict the active tokens.

    Args:
        head ([`TokenHead`]): With hidden states of shape `(B, L, H)`, `L > T`.
        active (`torch.Tensor`): bool of shape `(B, T)`, the last `T` of the `L` positions.

    Returns:
        [`TokenHead`]: with hidden states of shape `(n, H)`, `n` the number of active tokens.
    """
    return replace(head, hidden=head.hidden[:, -active.size(1) - 1 : -1][active])


@dataclass(frozen=True)
class MixedHead:
    """
    A trust-region teacher: logits `(1 - mix) * base + mix * live` (paper, section 3.3).

    Args:
        base ([`TokenHead`]): The initial model, reading the feedback.
        live ([`TokenHead`]): The current model, reading the same.
        mix (`float`): In `[0, 1]`.
    """

    base: TokenHead
    live: TokenHead
    mix: float

    @property
    def vocab_size(self) -> int:
        return min(self.base.vocab_size, self.live.vocab_size)

    def logits(self, vocab_size: int) -> torch.Tensor:
        """See [`TokenHead.logits`]."""
        return torch.lerp(self.base.logits(vocab_size), self.live.logits(vocab_size), self.mix)


@dataclass(frozen=True)
class TokenValues:
    """
    Values of the `n` scored tokens, each of shape `(n,)`; only `divergence` carries a gradient.

    Args:
        divergence (`torch.Tensor`): The loss per token, see [`token_divergence`].
        student_log_prob (`torch.Tensor`): `log p_S` of the sampled token.
        teacher_log_prob (`torch.Tensor`): `log p_T` of the sampled token.
        student_entropy (`torch.Tensor`): In nats.
        teacher_entropy (`torch.Tensor`): In nats.
    """

    divergence: torch.Tensor
    student_log_prob: torch.Tensor
    teacher_log_prob: torch.Tensor
    student_entropy: torch.Tensor
    teacher_entropy: torch.Tensor

    def spread(self, mask: torch.Tensor) -> "TokenValues":
        """Put the values back where `mask`, a bool tensor `(B, T)` with `n` true entries, says; zero elsewhere."""

        def place(x: torch.Tensor) -> torch.Tensor:
            return x.new_zeros(mask.shape).masked_scatter(mask, x)

        return TokenValues(**{field.name: place(getattr(self, field.name)) for field in fields(self)})


def token_values(
    student: TokenHead, teacher: "TokenHead | MixedHead", token_ids: torch.Tensor, spec: DivergenceSpec
) -> TokenValues:
    """
    Everything the trainer needs about `n` scored tokens, from the two heads: the plain, full-logits truth.

    Vocabularies that are padded to different sizes are compared over the items that both have.

    Args:
        student ([`TokenHead`]): Receives the gradient.
        teacher ([`TokenHead`] or [`MixedHead`]): Receives none.
        token_ids (`torch.Tensor`): int64 of shape `(n,)`, the sampled tokens.
        spec ([`DivergenceSpec`]): What is computed.

    Returns:
        [`TokenValues`]: with `n = 0`, empty tensors whose sum is still attached to the graph.
    """
    vocab_size = min(student.vocab_size, teacher.vocab_size)
    student_log_probs = safe_log_softmax(student.logits(vocab_size))  # (n, V)
    with torch.no_grad():
        teacher_log_probs = safe_log_softmax(teacher.logits(vocab_size)).to(student_log_probs.device)  # (n, V)
        student_now = student_log_probs.detach()
        picked = token_ids[:, None]
        statistics = {
            "student_log_prob": student_now.gather(-1, picked).squeeze(-1),
            "teacher_log_prob": teacher_log_probs.gather(-1, picked).squeeze(-1),
            "student_entropy": entropy(student_now),
            "teacher_entropy": entropy(teacher_log_probs),
        }
    per_token = token_divergence(student_log_probs, teacher_log_probs, token_ids, spec)
    return TokenValues(divergence=per_token, **statistics)


class HeadTap:
    """
    Shows the hidden states and the output head to a consumer, *inside* the model's forward pass.

    Wrappers (DDP, FSDP, DeepSpeed) then see an ordinary forward, sharded weights are gathered when the consumer runs,
    and whatever builds the model's inputs (TRL's images, tiles, routers) stays in charge. `model.forward` is replaced
    once, as TRL's own `add_fused_lm_head` does; without a consumer it is the former one.

    Args:
        model (`transformers.PreTrainedModel`): The causal language model, not its PEFT wrapper.
        temperature (`float`): The sampling temperature, `> 0`.
        position_ids_from_mask (`bool`): Number the positions of a left-padded row from its first real token, so that a
            row equals the same row alone also for models with absolute positions. Off for models that take none.
    """

    def __init__(self, model, temperature: float, position_ids_from_mask: bool) -> None:
        self._consumer: Callable[[TokenHead], None] | None = None
        self._temperature = temperature
        self._scale, self._softcap = logit_rules(model.config)
        accepted = inspect.signature(type(model).forward).parameters
        self._number_positions = position_ids_from_mask and "position_ids" in accepted
        inner = model.forward
        tap = self

        @functools.wraps(type(model).forward)  # `generate` validates its arguments against the signature
        def forward(self, *args, **kwargs):
            return tap._forward(self, inner, *args, **kwargs)

        model.forward = types.MethodType(forward, model)

    def _forward(self, model, inner, *args, **kwargs):
        mask = kwargs.get("attention_mask")
        if self._number_positions and kwargs.get("fused_lm_head") and mask is not None:
            kwargs.setdefault("position_ids", (mask.long().cumsum(-1) - 1).clamp(min=0))
        if self._consumer is None:
            return inner(*args, **kwargs)
        seen: list[torch.Tensor] = []
        hook = model.base_model.register_forward_hook(lambda module, args, out: seen.append(out.last_hidden_state))
        try:
            output = inner(*args, **kwargs)
        finally:
            hook.remove()
        lm_head: nn.Module = model.get_output_embeddings()
        hidden = seen[-1].to(lm_head.weight.device)  # a model split by `device_map` may end on another device
        self._consumer(TokenHead(hidden, lm_head.weight, lm_head.bias, self._temperature, self._scale, self._softcap))
        return output

    @contextmanager
    def consume(self, consumer: Callable[[TokenHead], None]) -> Iterator[None]:
        """Within the context, hand each forward's head, with hidden states of shape `(B, L, H)`, to `consumer`."""
        previous, self._consumer = self._consumer, consumer
        try:
            yield
        finally:
            self._consumer = previous
