"""From hints to the token ids of the teacher's prompts, through the student's own chat template.

Knows: the trainer's tokenizer and its `_tokenize_prompts`, the budget. Deliberately does not know: selection, losses.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from jinja2.exceptions import TemplateError
from trl.data_utils import is_conversational
from trl.trainer.utils import pad

from .batches import position_limit
from .reprompt import Hint, Prompt, shorten, teacher_prompt

logger = logging.getLogger(__name__)

_PER_TOKEN = ("token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True)
class TeacherPrompts:
    """
    Args:
        tensors (`dict[str, torch.Tensor]`): `teacher_prompt_ids` and `teacher_prompt_mask`, int64 of shape `(B, Q)`,
            padded left; for vision models also the per-token types of the prompt.
        prompts (`list`): What the teachers are asked, as text or messages; the student's own where there is no hint.
        texts (`list[str]`): What the teacher reads, special tokens included.
        shortened (`set[int]`): Rows whose hint was cut to fit the budget.
        lengths (`list[int]`): Tokens of each prompt.
    """

    tensors: dict[str, torch.Tensor]
    prompts: list[Prompt]
    texts: list[str]
    shortened: set[int]
    lengths: list[int]


class TeacherPromptBuilder:
    """
    Args:
        trainer ([`SDPOTrainer`]): Supplies the tokenizer, the chat template and its options, tools and environments.
        teacher_positions (`int`, *optional*): Tokens that an external teacher can read, answer included.
    """

    def __init__(self, trainer: Any, teacher_positions: int | None = None) -> None:
        self._trainer = trainer
        self._teacher_positions = teacher_positions
        self._tokenizer = trainer._tokenizer
        self._templates = trainer.args.templates
        self._placement = trainer.args.reprompt_placement
        self._budget = trainer.args.max_reprompt_len
        positions = position_limit(trainer.model.config) or 0
        if teacher_positions is not None:
            positions = min(positions or teacher_positions, teacher_positions)
        if positions > trainer.max_completion_length:  # the teacher reads the answer behind its prompt
            self._budget = min(self._budget, positions - trainer.max_completion_length)
        self._header_checked = False

    @property
    def budget(self) -> int:
        """Tokens that the teacher may read before the answer, hints between its turns included."""
        return self._budget

    def build(self, prompts: list[Prompt], hints: list[Hint | None], output: dict[str, Any]) -> TeacherPrompts:
        """
        Write the teacher's prompt of each row; a row without a hint gets one token, or its own prompt with images.

        Args:
            prompts (`list`): The student's prompts, `B` of them.
            hints (`list[Hint | None]`): What the teachers are told.
            output (`dict`): TRL's batch.

        Raises:
            `ValueError`: a prompt leaves no room for a hint within `max_reprompt_len` (the row is named), or the chat
                template refuses the reprompt.
        """
        images = "pixel_values" in output
        changed = [i for i, hint in enumerate(hints) if hint is not None and hint.changes_prompt]
        wanted = list(range(len(prompts))) if images else changed
        ids: list[list[int]] = [[self._tokenizer.pad_token_id]] * len(prompts)
        for i, hint in enumerate(hints):
            if hint is not None and not hint.changes_prompt:  # to the token, whoever made them
                ids[i] = output["prompt_ids"][i][output["prompt_mask"][i].bool()].tolist()
        types: dict[str, list[Any]] = {}
        shortened: set[int] = set()
        written = [self._write(prompt, hint) for prompt, hint in zip(prompts, hints, strict=True)]
        if wanted:
            tokenized, fields = self._tokenize([written[i] for i in wanted], wanted)
            for i, row in zip(wanted, tokenized, strict=True):
                ids[i] = list(row)
            types = {key: list(fields[key]) for key in _PER_TOKEN if images and key in fields}
            for i in changed:
                if len(ids[i]) > self._budget:
                    written[i], ids[i], fitted = self._fit(i, prompts[i], hints[i])
                    for key, rows in types.items():
                        rows[wanted.index(i)] = fitted[key][0]
                    shortened.add(i)
            self._check_header(prompts, changed, ids)
        tensors = {
            "teacher_prompt_ids": self._pad(ids, self._tokenizer.pad_token_id),
            "teacher_prompt_mask": self._pad([[1] * len(row) for row in ids], 0),
        }
        for key, rows in types.items():
            tensors[f"teacher_{key}"] = self._pad([torch.as_tensor(row).tolist() for row in rows], 0)
        self._check_room(hints, ids, output)
        texts = self._tokenizer.batch_decode(ids) if self._trainer.log_completions else [""] * len(ids)
        return TeacherPrompts(tensors, written, texts, shortened, [len(row) for row in ids])

    def thinking_opened(self, prompt_ids: torch.Tensor) -> list[bool]:
        """Whether each prompt, ids of shape `(B, P)` padded left, ends by opening a thinking block."""
        tails = self._tokenizer.batch_decode(prompt_ids[:, -16:])
        # Words behind the tag are the user's, who speaks of it.
        return [tail.rstrip().endswith("<think>") for tail in tails]

    def _write(self, prompt: Prompt, hint: Hint | None) -> Prompt:
        if hint is None or not hint.changes_prompt:
            return prompt
        return teacher_prompt(prompt, hint, self._templates, self._placement)

    def _pad(self, rows: list[list[int]], value: int) -> torch.Tensor:
        tensors = [torch.tensor(row) for row in rows]
        return pad(tensors, value, padding_side="left", pad_to_multiple_of=self._trainer.pad_to_multiple_of)

    def _tokenize(self, prompts: list[Prompt], rows: list[int]) -> tuple[list[list[int]], dict[str, Any]]:
        """TRL's own tokenisation of the student's prompts, for the given rows of the batch."""
        try:
            with self._trainer._only_rows(rows):
                ids, _, fields = self._trainer._tokenize_prompts(prompts)
        except TemplateError as error:
            raise ValueError(
                f"The chat template refuses the teacher's prompt ({error}). If it forbids two user turns in a row, "
                "set `reprompt_placement='last_user'`."
            ) from error
        return ids, fields

    def _check_room(self, hints: list[Hint | None], ids: list[list[int]], output: dict[str, Any]) -> None:
        """Refuse what an external teacher cannot read; the student's own limits have been kept already."""
        if self._teacher_positions is None:
            return
        answers = output["completion_mask"].sum(dim=1).tolist()
        for row, (hint, prompt, answer) in enumerate(zip(hints, ids, answers, strict=True)):
            if hint is not None and len(prompt) + answer > self._teacher_positions:
                raise ValueError(
                    f"Row {row} has a prompt of {len(prompt)} and an answer of {answer} tokens, more than the "
                    f"teacher's {self._teacher_positions} positions. Shorten them (`max_completion_length`), or take "
                    "a teacher that reads more: nothing is cut from them."
                )

    def _fit(self, row: int, prompt: Prompt, hint: Hint) -> tuple[Prompt, list[int], dict[str, Any]]:
        def fits(candidate: Hint) -> bool:
            return len(self._tokenize([self._write(prompt, candidate)], [row])[0][0]) <= self._budget

        kept = shorten(hint, fits)
        if kept is None:
            raise ValueError(
                f"The teacher's prompt of row {row} leaves no room for its feedback within `max_reprompt_len="
                f"{self._budget}` (or what the model's positions leave beside the answer). Raise `max_reprompt_len`, "
                "or shorten the prompts or the templates: the question is never cut."
            )
        written = self._write(prompt, kept)
        ids, fields = self._tokenize([written], [row])
        return written, list(ids[0]), fields

    def _check_header(self, prompts: list[Prompt], changed: list[int], ids: list[list[int]]) -> None:
        """Warn, once, if teacher and student do not end in the same generation header."""
        row = next(iter(changed), None)
        if self._header_checked or row is None or not is_conversational({"prompt": prompts[row]}):
            return
        self._header_checked = True
        trainer = self._trainer
        options = {"tokenize": False, "chat_template": trainer.chat_template, **trainer.chat_template_kwargs}
        render = trainer.processing_class.apply_chat_template
        with_header = render(prompts[row], add_generation_prompt=True, **options)
        without = render(prompts[row], add_generation_prompt=False, **options)
        header = with_header[len(without) :] if with_header.startswith(without) else ""
        ends = self._tokenizer.decode(ids[row])
        if header.strip() and not ends.endswith(header):
            logger.warning(
                "The teacher's prompt does not end in the student's generation header, so the two answer in different "
                f"modes. Student: {header!r}. Teacher: {ends[-len(header) - 20 :]!r}."
            )
