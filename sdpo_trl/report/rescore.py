"""A heat map of any answer, scored now: what was typed in, or sampled for it.

Knows: `SDPOTrainer`, whose own path it runs once without training. Deliberately does not know: files, HTML.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftConfig, PeftModel
from transformers import AutoTokenizer
from trl.trainer.utils import create_model_from_path

from ..config import SDPOConfig
from ..heads import predicting
from ..reprompt import Hint, Prompt, well_formed
from ..teacher import evaluation_mode
from ..trainer import SDPOTrainer
from .record import Heatmap, RolloutView
from .values import TokenTexts, describe, token_values, token_views

Segments = Sequence[tuple[str, bool]]


def scoring_config(**options: Any) -> SDPOConfig:
    """
    A configuration to look and not to train: one answer per prompt, nothing written or reported, a live teacher.

    Args:
        options: Fields of [`SDPOConfig`] that should be those of a run: the divergence, the templates, `temperature`.
    """
    accelerated = torch.accelerator.is_available()
    return SDPOConfig(
        **{
            "output_dir": tempfile.gettempdir(),
            "per_device_train_batch_size": 1,
            "num_generations": 1,
            "use_cpu": not accelerated,
            "bf16": accelerated,
            "gradient_checkpointing": False,
            "report_to": "none",
            "teacher_model_kind": "live",
            "max_completion_length": 512,
            **options,
        }
    )


def _no_reward(completions: list[Any], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def _with_adapter(folder: str, args: SDPOConfig) -> PeftModel:
    """The base model that an adapter's folder names, with the adapter as it would train on."""
    name = PeftConfig.from_pretrained(folder).base_model_name_or_path
    base = create_model_from_path(name, trust_remote_code=args.trust_remote_code)
    return PeftModel.from_pretrained(base, folder, is_trainable=True)


class Rescorer:
    """
    Scores answers as a step of a fresh [`SDPOTrainer`] would: teacher's prompt, heads, divergence.

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`): The student; a folder may hold an adapter alone. A model
            object's forward is prepared as for training; its weights stay as they are.
        teacher_model (`str` or `PreTrainedModel`, *optional*): Another teacher than the student itself.
        processing_class (`PreTrainedTokenizerBase`, *optional*): By default what comes with the model.
        args ([`SDPOConfig`], *optional*): See [`scoring_config`].
        topk (`int`): Likeliest tokens of each model per token, at least 1.
    """

    def __init__(
        self,
        model: Any,
        *,
        teacher_model: Any = None,
        processing_class: Any = None,
        args: SDPOConfig | None = None,
        topk: int = 10,
    ) -> None:
        if topk < 1:
            raise ValueError(f"`topk` must be at least 1, got {topk}.")
        if args is None:  # an external teacher never moves, so its kind stays at the default
            kind = {} if teacher_model is None else {"teacher_model_kind": SDPOConfig.teacher_model_kind}
            args = scoring_config(**kind)
        if isinstance(model, str) and (Path(model) / "adapter_config.json").is_file():
            if processing_class is None and (Path(model) / "tokenizer_config.json").is_file():
                processing_class = AutoTokenizer.from_pretrained(model, padding_side="left")
            model = _with_adapter(model, args)
        self.trainer = SDPOTrainer(
            model,
            _no_reward,
            args,
            Dataset.from_dict({"prompt": ["-"]}),
            processing_class=processing_class,
            teacher_model=teacher_model,
        )
        self._topk = topk
        self._texts = TokenTexts(self.trainer._tokenizer)

    @property
    def settings(self) -> dict[str, str]:
        """What the values depend on, in words."""
        trainer = self.trainer
        teacher = "the student itself" if trainer._teacher_pass.reads_student else "an external model"
        return {**describe(trainer.args.divergence, trainer.temperature), "Teacher": teacher}

    def prompt_text(self, prompt: Prompt) -> str:
        """What the student reads, special tokens included."""
        return self._texts.text(self.trainer._tokenize_prompts([well_formed(prompt)])[0][0])

    @torch.no_grad()
    def sample(self, prompt: Prompt) -> list[int]:
        """The ids of one answer, sampled with the trainer's options."""
        trainer = self.trainer
        ids, _, _ = trainer._tokenize_prompts([prompt])
        with evaluation_mode(trainer.model):
            return list(trainer._generate_single_turn(ids, None, {}, 1)[0][0])

    def rollout(
        self,
        prompt: Prompt,
        hint: Hint | None,
        answer: "str | Segments | None" = None,
        *,
        teacher_prompt: str | None = None,
        **shown: Any,
    ) -> RolloutView:
        """
        Score one answer.

        Args:
            prompt (`str` or `list[dict]`): The student's prompt.
            hint ([`Hint`], *optional*): What the teacher is told; `None`: it has nothing to read, and nothing is
                scored.
            answer (`str` or `Sequence[tuple[str, bool]]`, *optional*): Its text, tokenised here; or its parts in
                order, each with whether a tool wrote it. Sampled if not given.
            teacher_prompt (`str`, *optional*): What the teacher read, special tokens included, instead of the prompt
                that `hint` gives.
            shown: Fields of [`RolloutView`]: `name`, `reward`, ...

        Raises:
            `ValueError`: the answer is empty, or the teacher's prompt has no room for the hint.
        """
        prompt, teacher_prompt = well_formed(prompt), well_formed(teacher_prompt)
        if hint is not None:
            hint = replace(hint, solution=well_formed(hint.solution), feedback=well_formed(hint.feedback))
        ids, observed = self._answer(prompt, answer)
        if not ids:
            raise ValueError("The answer is empty: there is no token to look at. Give another `answer`.")
        shown = {"name": "Answer", "feedback": hint and hint.feedback, "solution": hint and hint.solution, **shown}
        if hint is None and teacher_prompt is None:
            return RolloutView(tokens=token_views(ids, observed, {}, self._texts), **shown)
        inputs = self._inputs(prompt, hint, ids, observed, teacher_prompt)
        values = self._values(inputs)
        read = self._texts.text(inputs["teacher_prompt_ids"][0].tolist())
        return RolloutView(tokens=token_views(ids, observed, values, self._texts), teacher_prompt=read, **shown)

    def heatmap(
        self,
        prompt: Prompt,
        *,
        feedback: str | None = None,
        solution: str | None = None,
        answer: "str | Sequence[str] | None" = None,
    ) -> Heatmap:
        """
        Score what was typed in.

        Args:
            prompt (`str` or `list[dict]`): A text is a user's turn where the tokenizer has a chat template.
            feedback (`str`, *optional*): About the answer.
            solution (`str`, *optional*): A demonstration.
            answer (`str` or `Sequence[str]`, *optional*): One or more; one is sampled if none is given.

        Raises:
            `ValueError`: the teacher would be told nothing, or an answer is empty.
        """
        if not (feedback or solution):
            raise ValueError("The teacher would read what the student reads: give `feedback` or a `solution`.")
        if isinstance(prompt, str) and self.trainer._tokenizer.chat_template is not None:
            prompt = [{"role": "user", "content": prompt}]
        hint = Hint(solution or None, feedback or None)
        answers = [answer] if answer is None or isinstance(answer, str) else list(answer)
        names = ["Sampled answer" if text is None else f"Answer {i + 1}" for i, text in enumerate(answers)]
        rollouts = tuple(self.rollout(prompt, hint, text, name=n) for text, n in zip(answers, names, strict=True))
        return Heatmap("Token heat map", self.prompt_text(prompt), rollouts, self.settings)

    def _answer(self, prompt: Prompt, answer: "str | Segments | None") -> tuple[list[int], list[bool]]:
        if answer is None:
            ids = self.sample(prompt)
            return ids, [False] * len(ids)
        ids, observed = [], []
        for text, by_tool in [(answer, False)] if isinstance(answer, str) else answer:
            part = self.trainer._tokenizer(well_formed(text), add_special_tokens=False)["input_ids"]
            ids += part
            observed += [by_tool] * len(part)
        return ids, observed

    def _inputs(
        self, prompt: Prompt, hint: Hint | None, ids: list[int], observed: list[bool], teacher_prompt: str | None
    ) -> dict[str, torch.Tensor]:
        """The batch of one row that TRL and the teacher's prompt builder would make of it."""
        trainer = self.trainer
        device = trainer.accelerator.device

        def row(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor([list(values)], device=device)

        prompt_ids = row(trainer._tokenize_prompts([prompt])[0][0])
        inputs = {
            "prompt_ids": prompt_ids,
            "prompt_mask": torch.ones_like(prompt_ids),
            "completion_ids": row(ids),
            "completion_mask": torch.ones_like(row(ids)),
            "tool_mask": row([not by_tool for by_tool in observed]).long(),
            "feedback_available": torch.tensor([True], device=device),
        }
        if teacher_prompt is None:
            built = trainer._prompt_builder.build([prompt], [hint], inputs)
            return {**inputs, **{name: value.to(device) for name, value in built.tensors.items()}}
        read = row(trainer._tokenizer(teacher_prompt, add_special_tokens=False)["input_ids"])
        return {**inputs, "teacher_prompt_ids": read, "teacher_prompt_mask": torch.ones_like(read)}

    @torch.no_grad()
    def _values(self, inputs: dict[str, torch.Tensor]) -> dict[int, Any]:
        trainer = self.trainer
        active = trainer._active(inputs)  # (1, T)
        teacher = trainer._teacher_pass.head(inputs, active)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.ones_like(ids)
        with evaluation_mode(trainer.model), trainer.accelerator.autocast(), trainer._tap.capture() as heads:
            trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, active.size(1))
        student = predicting(heads[0], active)
        sampled = inputs["completion_ids"][active]
        values = token_values(student, teacher, sampled, trainer.args.divergence, self._texts, self._topk)
        return dict(zip(active[0].nonzero().squeeze(1).tolist(), values, strict=True))
