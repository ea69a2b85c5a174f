"""From hints to the token ids of the teacher's prompts, through the student's own chat template.

Knows: the trainer's tokenizer and its `_tokenize_prompts`, the budget. Deliberately does not know: selection, losses.
"""

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from jinja2.exceptions import TemplateError
from trl.data_utils import is_conversational, prepare_multimodal_messages
from trl.trainer.utils import pad

from .batches import position_limit
from .reprompt import Hint, Message, Prompt, shorten, teacher_prompt
from .rows import declared_tools, prompt_row
from .template_check import Render, check_templates, unknown_switches

logger = logging.getLogger(__name__)

_PER_TOKEN = ("token_type_ids", "mm_token_type_ids")
_COLUMNS = ("prompt", "messages", "conversations", "tools")


class NoRoomError(ValueError):
    """No part of the feedback of a `row` fits beside its prompt and answer."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row


@dataclass(frozen=True)
class TeacherPrompts:
    """
    Args:
        tensors (`dict[str, torch.Tensor]`): `teacher_prompt_ids` and `teacher_prompt_mask`, int64 of shape `(B, Q)`,
            padded left; for vision models also the per-token types of the prompt.
        prompts (`list`): What the teachers are asked, as text or messages; the student's own where there is no hint.
        texts (`list[str]`): What the teacher reads, special tokens included.
        shortened (`set[int]`): Rows whose hint was cut to fit the budget.
        room (`list[int]`): Tokens that hints between the turns of each may have.
    """

    tensors: dict[str, torch.Tensor]
    prompts: list[Prompt]
    texts: list[str]
    shortened: set[int]
    room: list[int]


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
        self._positions = positions
        self._checked = False

    def _budgets(self, output: dict[str, Any]) -> list[int]:
        """
        Tokens that each teacher may read beside the answer, hints between its turns included, `B` of them.

        Args:
            output (`dict`): TRL's batch. Where answers may be as long as the model's positions reach, what is left of
                these is known by the answer.
        """
        answers = output["completion_mask"].sum(dim=1).tolist()
        if not self._positions:
            return [self._budget] * len(answers)
        return [min(self._budget, self._positions - answer) for answer in answers]

    def is_filled(self, row: int, output: dict[str, Any]) -> bool:
        """Whether a row's answer leaves less of the positions than any hint may have: no option gives it room."""
        return self._budgets(output)[row] < self._budget

    def build(self, prompts: list[Prompt], hints: list[Hint | None], output: dict[str, Any]) -> TeacherPrompts:
        """
        Write the teacher's prompt of each row; a row without a hint gets one token, or its own prompt with images.

        Args:
            prompts (`list`): The student's prompts, `B` of them.
            hints (`list[Hint | None]`): What the teachers are told.
            output (`dict`): TRL's batch.

        Raises:
            `NoRoomError`: a prompt leaves no room for a hint within `max_reprompt_len` (the row is named).
            `ValueError`: the chat template refuses the reprompt.
        """
        images = "pixel_values" in output
        changed = [i for i, hint in enumerate(hints) if hint is not None and hint.changes_prompt]
        if changed and not self._checked:
            self.check(prompts[changed[0]], self._tools_of(changed[0]))
        wanted = list(range(len(prompts))) if images else changed
        ids: list[list[int]] = [[self._tokenizer.pad_token_id]] * len(prompts)
        for i, hint in enumerate(hints):
            if hint is not None and not hint.changes_prompt:  # to the token, whoever made them
                ids[i] = output["prompt_ids"][i][output["prompt_mask"][i].bool()].tolist()
        types: dict[str, list[Any]] = {}
        shortened: set[int] = set()
        written = [self._write(prompt, hint) for prompt, hint in zip(prompts, hints, strict=True)]
        budgets = self._budgets(output)
        if wanted:
            tokenized, fields = self._tokenize([written[i] for i in wanted], wanted)
            for i, row in zip(wanted, tokenized, strict=True):
                ids[i] = list(row)
            types = {key: list(fields[key]) for key in _PER_TOKEN if images and key in fields}
            for i in changed:
                if len(ids[i]) > budgets[i]:
                    written[i], ids[i], fitted = self._fit(i, prompts[i], hints[i], budgets[i])
                    for key, rows in types.items():
                        rows[wanted.index(i)] = fitted[key][0]
                    shortened.add(i)
        tensors = {
            "teacher_prompt_ids": self._pad(ids, self._tokenizer.pad_token_id),
            "teacher_prompt_mask": self._pad([[1] * len(row) for row in ids], 0),
        }
        for key, rows in types.items():
            tensors[f"teacher_{key}"] = self._pad([torch.as_tensor(row).tolist() for row in rows], 0)
        self._check_room(hints, ids, output)
        texts = self._tokenizer.batch_decode(ids) if self._trainer.log_completions else [""] * len(ids)
        room = [budget - len(row) for budget, row in zip(budgets, ids, strict=True)]
        return TeacherPrompts(tensors, written, texts, shortened, room)

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

    def _fit(self, row: int, prompt: Prompt, hint: Hint, budget: int) -> tuple[Prompt, list[int], dict[str, Any]]:
        def fits(candidate: Hint) -> bool:
            return len(self._tokenize([self._write(prompt, candidate)], [row])[0][0]) <= budget

        kept = shorten(hint, fits)
        if kept is None:
            raise NoRoomError(
                row,
                f"The teacher's prompt of row {row} leaves no room for its feedback within `max_reprompt_len="
                f"{budget}` (or what the model's positions leave beside the answer). Raise `max_reprompt_len`, "
                "or shorten the prompts or the templates: the question is never cut.",
            )
        written = self._write(prompt, kept)
        ids, fields = self._tokenize([written], [row])
        return written, list(ids[0]), fields

    # The template

    def check_dataset(self, dataset: Any) -> None:
        """
        [`check`] the first row, where it can be read without side effects; else the first batch is checked.

        Args:
            dataset (`datasets.Dataset` or `list`): The training set.
        """
        if isinstance(dataset, Dataset) and len(dataset) and dataset.format["type"] != "custom":
            known = [name for name in _COLUMNS if name in dataset.column_names]
            row = dataset.select_columns(known)[0] if known else {}
        elif isinstance(dataset, list) and dataset and isinstance(dataset[0], dict):
            row = {name: dataset[0][name] for name in _COLUMNS if name in dataset[0]}
        else:
            return
        try:
            row = prompt_row(row)
            declared = declared_tools(row.get("tools"))
        except ValueError:
            return  # said with the row's number when its batch is read
        if "prompt" in row:  # an environment may bring its own
            self.check(row["prompt"], declared)

    def check(self, prompt: Prompt, declared: "list[Any] | None" = None) -> None:
        """
        Check the chat template on one prompt, see [`~sdpo_trl.template_check.check_templates`].

        Args:
            prompt (`str` or `list[dict]`): A student's.
            declared (`list`, *optional*): The tools of its row, schemas and names.

        Raises:
            [`TemplateCheckError`]: the teacher would not read what it should.
        """
        trainer = self._trainer
        template = trainer.chat_template or trainer.processing_class.chat_template
        if not isinstance(template, str):  # none, or one of several by name, which a tokenizer chooses by itself
            return
        options = trainer.chat_template_kwargs
        if unread := unknown_switches(template, self._switches(options)):
            logger.warning(f"The chat template reads no {', '.join(unread)}, so `chat_template_kwargs` does nothing.")
        check_templates(
            self._renderer(options, declared),
            prompt,
            self._templates,
            self._placement,
            switches={
                name: self._renderer({key: value for key, value in options.items() if key != name}, declared)
                for name in self._switches(options)
            },
        )
        self._checked = is_conversational({"prompt": prompt})

    def _switches(self, options: dict[str, Any]) -> list[str]:
        """Those that the template reads, not `apply_chat_template` itself."""
        own = inspect.signature(self._trainer.processing_class.apply_chat_template).parameters
        return [name for name in options if name not in own]

    def _renderer(self, options: dict[str, Any], declared: "list[Any] | None") -> Render:
        trainer = self._trainer
        tools = next(iter(trainer._env_tools.values())) if trainer.environment_factories is not None else trainer.tools
        if declared is not None:
            by_name = {tool.__name__: tool for tool in tools}
            tools = [by_name.get(tool) if isinstance(tool, str) else tool for tool in declared]

        def render(messages: Sequence[Message], header: bool) -> str:
            if trainer._is_vlm:
                messages = prepare_multimodal_messages([_with_places(message) for message in messages])
            return trainer.processing_class.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=header, chat_template=trainer.chat_template,
                tools=[tool for tool in tools if tool is not None] or None, **options,
            )  # fmt: skip

        return render

    def _tools_of(self, row: int) -> "list[Any] | None":
        return None if self._trainer._batch_tools is None else self._trainer._batch_tools[row]


def _with_places(message: Message) -> Message:
    """A message whose images may still be to come: TRL puts them in with each batch."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [{"image": None, **b} if b.get("type") == "image" else b for b in content]}
