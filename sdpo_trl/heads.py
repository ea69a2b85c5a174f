"""From hidden states to values per token.

A head is the hidden states that predict some tokens together with the output matrix that turns them into logits.
Knows: projection, temperature, the logit rules of the architectures. Deliberately does not know: prompts, rollouts,
teachers' update rules.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from trl.trainer.utils import FusedCausalLMOutput

from .divergence import upcast
from .shards import gathered, rest, whole

_FLOAT16_BOOST = 256.0


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
        matmul_dtype (`torch.dtype`, *optional*): In which the projection runs; the weight's own by default.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None
    matmul_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.matmul_dtype is None:
            object.__setattr__(self, "matmul_dtype", self.weight.dtype)

    @property
    def vocab_size(self) -> int:
        return self.weight.size(0)

    def logits(self, vocab_size: int) -> torch.Tensor:
        """The first `vocab_size` logits, `(n, vocab_size)`, divided by the temperature, in float32 or better."""
        weight = self.weight[:vocab_size].to(self.matmul_dtype)
        with torch.autocast(self.hidden.device.type, enabled=False):
            logits = upcast(F.linear(self.hidden.to(self.matmul_dtype), weight))
        if self.bias is not None:
            logits = logits + self.bias[:vocab_size]
        logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits / self.temperature

    def detach(self) -> "TokenHead":
        """The same head without a graph. The tensors are shared, so a later change *in place* would show."""
        bias = None if self.bias is None else self.bias.detach()
        return replace(self, hidden=self.hidden.detach(), weight=self.weight.detach(), bias=bias)

    # The pieces of the fused loop, without a graph: `tokens` is a slice of the `n` tokens.

    def logits_into(self, tokens: slice, out: torch.Tensor, slope: torch.Tensor | None = None) -> torch.Tensor:
        """
        Write the logits of some tokens to `out`, `(c, V')`; with a soft cap, its derivative to `slope`, same shape.

        `V'` may be smaller than `V`: then only the first items are computed.
        """
        weight = self.weight[: out.size(1)].to(self.matmul_dtype)
        hidden = self.hidden[tokens].to(self.matmul_dtype)
        if out.dtype == self.matmul_dtype:
            torch.mm(hidden, weight.t(), out=out)
        else:
            out.copy_(torch.mm(hidden, weight.t()))
        if self.bias is not None:
            out.add_(self.bias[: out.size(1)])
        if self.softcap is not None:
            out.mul_(self.scale / self.softcap).tanh_()
            if slope is not None:
                torch.mul(out, out, out=slope).neg_().add_(1.0)
            return out.mul_(self.softcap / self.temperature)
        factor = self.scale / self.temperature
        return out if factor == 1.0 else out.mul_(factor)

    def pull_back(self, logit_grad: torch.Tensor, slope: torch.Tensor | None) -> torch.Tensor:
        """From the logits' gradient, `(c, V)`, to the hidden states', `(c, H)`; overwrites its argument."""
        if slope is not None:
            logit_grad.mul_(slope)
        # float16 ends at 6e-8, and a gradient scaler multiplies too late, after this product.
        boost = _FLOAT16_BOOST if self.matmul_dtype == torch.float16 else 1.0
        raised = logit_grad if boost == 1.0 else logit_grad * boost
        product = torch.mm(raised.to(self.matmul_dtype), self.weight.to(self.matmul_dtype))
        return product.to(logit_grad.dtype).mul_(self.scale / self.temperature / boost)

    def pick(self, ids: torch.Tensor, slope: torch.Tensor | None) -> torch.Tensor:
        """The hidden states' gradient of one logit per token, ids of shape `(c,)` -> `(c, H)`."""
        rows = upcast(self.weight[ids]) * (self.scale / self.temperature)
        return rows if slope is None else rows * slope.gather(-1, ids[:, None])

    def add_weight_grad(
        self, tokens: slice, logit_grad: torch.Tensor, factor: "torch.Tensor | float", weight_grad: torch.Tensor,
        bias_grad: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Add the gradient of the output matrix, given the logits' (after [`pull_back`]) and a factor per token."""
        scaled = self.hidden[tokens].to(weight_grad.dtype) * (factor * (self.scale / self.temperature))
        weight_grad.addmm_(logit_grad.t(), scaled)
        if bias_grad is not None:
            bias_grad.add_((logit_grad * (factor * (self.scale / self.temperature))).sum(0))


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
        return self.combine_(self.base.logits(vocab_size), self.live.logits(vocab_size))

    def combine_(self, base: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
        """Mix two sets of logits in place of the first; an item that is -inf on both sides stays so."""
        if self.mix == 0.0:
            return base
        if self.mix == 1.0:
            return base.copy_(live)
        return base.mul_(1 - self.mix).add_(live, alpha=self.mix)


@dataclass(frozen=True)
class TapScores:
    """
    What a consumer makes of a forward pass, in the places where TRL looks for it.

    Args:
        loss (`torch.Tensor`): Any scalar that belongs to the graph, see [`outputs_of`].
        log_probs (`torch.Tensor`): Shape `(B, L - 1)`, zero where nothing was asked.
        entropy (`torch.Tensor`): Shape `(B, L - 1)`.
    """

    loss: torch.Tensor
    log_probs: torch.Tensor
    entropy: torch.Tensor


Consumer = Callable[[TokenHead], TapScores]


@contextmanager
def outputs_of(model: nn.Module) -> Iterator[list[Any]]:
    """
    Within the context, collect what a model returns, as its wrappers return it.

    FSDP2 and ZeRO-3 prepare the backward pass when a gradient reaches these tensors, so a loss must be made of them,
    not of what was computed inside.
    """
    outputs: list[Any] = []
    hook = model.register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        yield outputs
    finally:
        hook.remove()


class HeadTap:
    """
    Hands the hidden states and the output head to a consumer, *inside* the model's forward pass.

    Wrappers (DDP, FSDP, DeepSpeed) then see an ordinary forward whose outputs carry the graph, sharded weights are
    gathered when the consumer runs, and whatever builds the model's inputs (TRL's images, tiles) stays in charge.
    `model.forward` is replaced once, as TRL's own `add_fused_lm_head` does; without a consumer it is the former one.

    Args:
        model (`transformers.PreTrainedModel`): The causal language model, not its PEFT wrapper, with TRL's fused head.
        temperature (`float`): The sampling temperature, `> 0`.
        position_ids_from_mask (`bool`): Number the positions of a left-padded row from its first real token, so that a
            row equals the same row alone also for models with absolute positions. Off for models that take none.
        cast_to_fp32 (`bool`): Project in float32, outside autocast (TRL's `cast_lm_head_to_fp32`).
    """

    def __init__(
        self, model, temperature: float, *, position_ids_from_mask: bool = True, cast_to_fp32: bool = False
    ) -> None:
        self._consumer: Consumer | None = None
        self.model = model
        self._temperature = temperature
        self._scale, self._softcap = logit_rules(model.config)
        self._cast_to_fp32 = cast_to_fp32
        self._weight_dtype: torch.dtype | None = None
        accepted = inspect.signature(type(model).forward).parameters
        self._number_positions = position_ids_from_mask and "position_ids" in accepted
        inner = model.forward
        tap = self

        @functools.wraps(type(model).forward)  # `generate` validates its arguments against the signature
        def forward(self, *args, **kwargs):
            if self is not tap.model:  # `copy.deepcopy` copies the weights, but not what `inner` is bound to
                raise RuntimeError(
                    "This model is a copy of one that was given to a trainer, and would run with the weights of the "
                    "original. Copy models before a trainer gets them, or load what `save_pretrained` wrote."
                )
            return tap._forward(inner, *args, **kwargs)

        model.forward = types.MethodType(forward, model)

    def head(self, hidden: torch.Tensor) -> TokenHead:
        """The model's output head, as it is now, over hidden states of shape `(..., H)`."""
        lm_head: nn.Module = self.model.get_output_embeddings()
        return self._head(hidden, lm_head.weight, lm_head.bias)

    def resting_head(self, hidden: torch.Tensor, wrapped: nn.Module) -> TokenHead:
        """
        The same outside of a forward, to be kept: what is sharded is gathered into a copy; a collective.

        Args:
            hidden (`torch.Tensor`): Shape `(..., H)`.
            wrapped (`torch.nn.Module`): The model with its wrappers.
        """
        rest(wrapped)
        lm_head: nn.Module = self.model.get_output_embeddings()
        # FSDP2's mixed precision computes in another precision than it keeps.
        dtype = self._weight_dtype or lm_head.weight.dtype
        return self._head(hidden, whole(lm_head.weight, dtype), whole(lm_head.bias, dtype))

    def _head(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> TokenHead:
        device = weight.device  # a model split by `device_map` may end on another device than its head
        dtype = weight.dtype
        if self._cast_to_fp32:
            dtype = torch.promote_types(dtype, torch.float32)
        elif torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        return TokenHead(hidden.to(device), weight, bias, self._temperature, self._scale, self._softcap, dtype)

    def _forward(self, inner, *args, **kwargs):
        mask = kwargs.get("attention_mask")
        if self._number_positions and kwargs.get("fused_lm_head") and mask is not None:
            given = kwargs["inputs_embeds"] if kwargs.get("input_ids") is None else kwargs["input_ids"]
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
            kwargs.setdefault("position_ids", positions[:, -given.size(1) :])  # the mask may also cover a cache
        if self._consumer is None:
            return inner(*args, **kwargs)
        if kwargs.get("output_router_logits"):
            # TRL's forward makes the router's loss; its own scores are replaced.
            seen: list[torch.Tensor] = []
            hook = self.model.base_model.register_forward_hook(lambda m, a, out: seen.append(out.last_hidden_state))
            try:
                output = inner(*args, **kwargs)
            finally:
                hook.remove()
            hidden = seen[-1]
        else:
            del kwargs["fused_lm_head"], kwargs["labels"]
            kwargs.setdefault("use_cache", False)
            hidden = self.model.base_model(*args, **kwargs).last_hidden_state
            output = FusedCausalLMOutput()
        with gathered(self.model.get_output_embeddings(), self.model):
            head = self.head(hidden)
            self._weight_dtype = head.weight.dtype
            scores = self._consumer(head)
        output["loss"], output["log_probs"], output["entropy"] = scores.loss, scores.log_probs, scores.entropy
        return output

    @contextmanager
    def consume(self, consumer: Consumer) -> Iterator[None]:
        """Within the context, hand each forward's head, with hidden states of shape `(B, L, H)`, to `consumer`."""
        previous, self._consumer = self._consumer, consumer
        try:
            yield
        finally:
            self._consumer = previous

    @contextmanager
    def capture(self) -> Iterator[list[TokenHead]]:
        """Within the context, collect the heads and project nothing."""
        heads: list[TokenHead] = []

        def keep(head: TokenHead) -> TapScores:
            heads.append(head)
            nothing = head.hidden.new_zeros(head.hidden.shape[0], head.hidden.shape[1] - 1)
            return TapScores(nothing.sum(), nothing, nothing)

        with self.consume(keep):
            yield heads
