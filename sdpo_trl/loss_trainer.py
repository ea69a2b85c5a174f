"""The loss half of the trainer: one student forward gives the policy term and the divergence from the teacher.

Knows: TRL's `_compute_loss`, heads, weights of tokens and rows. Deliberately does not know: how teachers are made, how
feedback is selected.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from .agent_metrics import turn_sums
from .batches import take_rows, trim_padding
from .divergence import DivergenceSpec, bounded_teacher
from .feedback_trainer import FeedbackTrainer
from .heads import HeadTap, MixedHead, TapScores, TokenHead, outputs_of, predicting
from .loss import Normalizer, magnitude_factor, policy_factor, position_weights, token_coefficients
from .metrics import token_sums
from .run_state import RunningMean
from .scores import ScoreRequest, TokenScores, score_tokens
from .temperature import score_at_temperature


class LossTrainer(FeedbackTrainer):
    """
    GRPO whose loss also holds the divergence from the teacher, weighed and bounded by the options.

    [`SDPOTrainer`] sets the collaborators up; its docstring says what each override adds.
    """

    _tap: HeadTap
    _gap_size: RunningMean
    _used_weight: float = 0.0

    def _compute_loss(self, model, inputs):
        if not self._distills:
            return super()._compute_loss(model, inputs)
        inputs = self._needed(inputs)
        active = self._active(inputs)  # (B, T)
        teacher = self._teacher_head(inputs, active)
        policy = self._policy_inputs(inputs)
        spec = self._divergence_now()
        scored: list[TokenScores] = []

        def score(head: TokenHead) -> TapScores:
            scores, result = self._score_student(head, teacher, inputs, active, spec)
            scored.append(scores)
            # TRL reads both after the forward pass.
            if self._scales_advantages:
                policy["advantages"] = self._scaled_advantages(policy["advantages"], scores, active)
            if "in_policy_term" in policy and "old_per_token_logps" in policy:
                # A row without an advantage must not bring infinity to a product with zero.
                own = result.log_probs[:, -active.size(1) :].detach()
                near = policy["old_per_token_logps"].clamp(min=own - 20.0, max=own + 20.0)
                kept = policy["in_policy_term"][:, None]
                policy["old_per_token_logps"] = torch.where(kept, policy["old_per_token_logps"], near)
            return result

        with self._around_student(model, inputs), self._tap.consume(score), outputs_of(model) as outputs:
            policy_loss = super()._compute_loss(model, policy)
        sums = self._sums.add_tokens(self._mode, token_sums(scored[0], spec))
        if self._acts:
            self._agent_metrics.add_tokens(self._mode, turn_sums(scored[0].divergence, inputs["turn_index"][active]))
        if self.model.training:
            self._gap_size.add(sums["gap_size"], sums["count"])
            self._used_weight = self._weight()
        if self._scales_advantages:
            return policy_loss
        return policy_loss + self._weight() * self._gain(scored[0], spec) * outputs[0]["loss"]

    def _teacher_head(self, inputs: dict[str, Any], active: torch.Tensor) -> "TokenHead | MixedHead":
        """The teacher's head over the active tokens."""
        return self._teacher_pass.head(inputs, active)

    def _around_student(self, model: torch.nn.Module, inputs: dict[str, Any]) -> AbstractContextManager[None]:
        """What surrounds the student's forward over one micro-batch, after the teacher's: here nothing."""
        return nullcontext()

    @property
    def _scales_advantages(self) -> bool:
        return self.args.distillation_signal == "advantage_magnitude"

    def _weight(self) -> float:
        """`distillation_weight` at this optimizer step."""
        return self.args.weight_plan.at(self.state.global_step, self.state.max_steps)

    def _divergence_now(self) -> DivergenceSpec:
        """What is computed per token, with the bound that the running mean gives."""
        spec, multiple, mean = (
            self.args.divergence,
            self.args.distillation_log_ratio_clip_running,
            self._gap_size.value,
        )
        if multiple is None or not mean:
            return spec
        fixed = float("inf") if spec.log_ratio_clip is None else spec.log_ratio_clip
        return replace(spec, log_ratio_clip=min(fixed, multiple * mean))

    def _gain(self, scores: TokenScores, spec: DivergenceSpec) -> float:
        """What brings the mean size of the gap at the sampled tokens up to its target, bounded; 1 without one."""
        args = self.args
        if args.distillation_gain_target is None:
            return 1.0
        own = scores.log_prob.detach()
        sizes = (bounded_teacher(own, scores.teacher_log_prob, spec) - own).abs().double()
        sums = torch.stack([sizes.sum(), sizes.new_tensor(sizes.numel())])
        total, count = self.accelerator.reduce(sums, reduction="sum").tolist()
        mean = total / max(count, 1.0)
        gain = min(max(args.distillation_gain_target / mean, 1.0), args.distillation_gain_max) if mean > 0 else 1.0
        self._metrics[self._mode]["sdpo/gain"].append(gain)
        return gain

    def _scaled_advantages(self, advantages: torch.Tensor, scores: TokenScores, active: torch.Tensor) -> torch.Tensor:
        """`(B,)` -> `(B, T)`: the teacher's word on each active token, the reward's sign."""
        gap = scores.teacher_log_prob - scores.log_prob.detach()
        gap = torch.zeros(active.shape, dtype=gap.dtype, device=gap.device).masked_scatter(active, gap)
        advantages = advantages[:, None]
        factor = magnitude_factor(advantages, gap, self._weight(), self.args.advantage_magnitude_clip)
        return advantages * torch.where(active, factor, 1.0).to(advantages.dtype)

    def _score_student(
        self,
        head: TokenHead,
        teacher: "TokenHead | MixedHead",
        inputs: dict[str, Any],
        active: torch.Tensor,
        spec: DivergenceSpec,
    ) -> tuple[TokenScores, TapScores]:
        """Everything the loss needs from the student's one forward: the distilled tokens, then the others."""
        others = inputs["completion_mask"].bool() & ~active  # TRL also asks for what tools wrote
        old, args = inputs.get("old_per_token_logps"), self.args
        in_loop = args.token_weighting in ("teacher_entropy", "gap_gate") and self._token_weight(inputs) is None
        request = ScoreRequest(
            inputs["completion_ids"][active],
            spec,
            None if self._scales_advantages else self._coefficients(inputs, active)[active],
            None if old is None else old[active],
            args.distillation_is_clip,
            args.distillation_is_clip_low,
            args.token_weighting if in_loop else None,
            args.token_weighting_beta,
            policy_gradient=self._has_policy_term,
            entropy_gradient=self._entropy_bonus_enabled,
        )
        if args.distillation_temperature is None:
            distilled = own = score_tokens(predicting(head, active), teacher, request, args.distillation_impl)
        else:
            distilled, own = score_at_temperature(
                predicting(head, active), teacher, request, args.distillation_temperature, args.distillation_impl
            )
        policy = replace(request, token_ids=inputs["completion_ids"][others], coefficients=None, old_log_probs=None)
        rest = score_tokens(predicting(head, others), None, policy, self.args.distillation_impl)
        padding = head.hidden.size(1) - 1 - active.size(1)
        for watcher in self._watchers if self.model.training else []:
            watcher.tokens_scored(inputs, active, head.detach(), teacher, spec)

        def place(name: str) -> torch.Tensor:  # (B, L - 1)
            values = rest.log_prob.new_zeros(active.shape)
            values = values.masked_scatter(active, getattr(own, name))
            return F.pad(values.masked_scatter(others, getattr(rest, name)), (padding, 0))

        loss = distilled.loss if own is distilled else distilled.loss + own.loss
        return distilled, TapScores(loss, place("log_prob"), place("entropy"))

    def _coefficients(self, inputs: dict[str, Any], active: torch.Tensor) -> torch.Tensor:
        """What each token's divergence counts in the loss, `(B, T)`, as far as it is known before it is scored."""
        coefficients = token_coefficients(active, self.loss_type, self._normalizer(inputs))
        if "prompt_weight" in inputs:
            coefficients = coefficients * inputs["prompt_weight"][:, None]
        if self.args.token_weighting == "position":
            coefficients = coefficients * position_weights(active, self.args.token_weighting_beta)
        weight = self._token_weight(inputs)
        if weight is not None:
            coefficients = coefficients * weight
        if "importance_sampling_ratio" in inputs:  # TRL's correction for its sampler: (B, T) or (B, 1)
            coefficients = coefficients * inputs["importance_sampling_ratio"]
        return coefficients

    def _token_weight(self, inputs: dict[str, Any]) -> torch.Tensor | None:
        """The weights by the teacher's entropy that came with the rows, if they are still this teacher's."""
        made_now = "token_weight" in inputs and int(inputs["teacher_version"]) == self._teacher.version
        return inputs["token_weight"] if made_now else None

    @property
    def _has_policy_term(self) -> bool:
        return self.args.has_policy_term or self.beta != 0.0

    def _needed(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Without a policy term, the rows that are distilled (and others where another process has more of them)."""
        if self._is_vlm:
            return inputs  # images are not aligned with rows
        if not (self._has_policy_term or self._entropy_bonus_enabled or self.aux_loss_enabled):
            active = self._active(inputs).any(dim=1)  # (B,)
            # TRL gathers values per row, so all processes run as many rows as the one that has most to learn.
            count = int(self.accelerator.gather(active.sum().clamp(min=1).reshape(1)).max())
            rows = active.int().argsort(descending=True, stable=True)[:count]
            inputs = take_rows(inputs, rows)
        return inputs if self.pad_to_multiple_of else trim_padding(inputs)

    def _policy_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """TRL's inputs with its advantages at their share: every `loss_type` is linear in them for one sign."""
        share = 1.0 if self._scales_advantages else 1.0 - self._weight()
        scaled = {**inputs, "advantages": inputs["advantages"] * share}
        if "in_policy_term" in inputs:
            names = ("policy_tokens", "policy_rows", "all_tokens", "all_rows")
            counts = torch.stack([inputs[name] for name in names])
            factor = policy_factor(inputs["in_policy_term"], self._loss_mask(inputs), self.loss_type, counts)
            scaled["advantages"] = scaled["advantages"] * factor
        corrects_anchor = self.beta != 0.0 and self.args.use_bias_correction_kl
        if share == 0.0 and not corrects_anchor:
            # Zero times the ratio of a very stale token would be zero times infinity.
            scaled.pop("old_per_token_logps", None)
        return scaled

    def _normalizer(self, inputs: dict[str, Any]) -> Normalizer:
        share = 1.0 / self.accelerator.num_processes
        accumulation = 1
        if self.model.training:  # in eval, the batch is neither split across steps nor accumulated
            accumulation = self.current_gradient_accumulation_steps
            share *= accumulation / self.args.steps_per_generation
        return Normalizer(
            inputs["active_tokens"], inputs["active_rows"], share, accumulation, self.max_completion_length
        )
