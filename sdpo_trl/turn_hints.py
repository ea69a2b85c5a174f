"""Hints between the turns of a rollout: what the teacher reads where a turn begins, and the student never did.

The student's own token ids are kept; the tokens of a user turn are put in front of the generation header that the
hinted turn follows. Knows: token ids, the student's chat template. Deliberately does not know: selection, losses.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jinja2.exceptions import TemplateError
from trl.trainer.utils import pad

from .reprompt import Hint, Message, cut_middle, fill
from .teacher_prompts import NoRoomError
from .turns import turn_starts


def insert(ids: Sequence[int], hints: dict[int, list[int]]) -> tuple[list[int], list[int]]:
    """
    Put tokens in front of others.

    Args:
        ids (`Sequence[int]`): `T` tokens.
        hints (`dict[int, list[int]]`): By position in `[0, T)`, what to put in front of the token there.

    Returns:
        `tuple`: the `T'` tokens, and where each of the `T` stands among them.
    """
    read: list[int] = []
    positions: list[int] = []
    for position, token in enumerate(ids):
        read += hints.get(position, [])
        positions.append(len(read))
        read.append(token)
    return read, positions


class TurnHintWriter:
    """
    Args:
        trainer ([`SDPOTrainer`]): Supplies the tokenizer, the chat template and its options.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._template = trainer.args.turn_feedback_template

    def build(
        self, hints: Sequence[Hint | None], output: dict[str, Any], room: Sequence[int]
    ) -> tuple[dict[str, torch.Tensor], set[int]]:
        """
        The completions as the teachers read them.

        Args:
            hints (`Sequence[Hint | None]`): What the teachers are told, `B` of them.
            output (`dict`): TRL's batch.
            room (`Sequence[int]`): Tokens that all hints of a row together may have, see `TeacherPrompts`.

        Returns:
            `tuple`: nothing if no hint is for a later turn; else `teacher_completion_ids` and
            `teacher_completion_mask`, int64 of shape `(B, T')`, padded right, and `teacher_positions`, int64 of shape
            `(B, T)`: where each of the student's tokens stands in them. And the rows whose hints were cut.

        Raises:
            `ValueError`: there is no room for a hint, a turn does not begin with the template's generation header, or
                the template refuses a user turn there (the row is named).
        """
        if not any(hint is not None and hint.turns for hint in hints):
            return {}, set()
        if "pixel_values" in output:
            raise NotImplementedError("Feedback per turn does not work with images yet. Give one text per rollout.")
        width = output["completion_ids"].size(1)
        mask = output["completion_mask"].bool()
        sampled = mask & output["tool_mask"].bool() if "tool_mask" in output else mask
        read: list[torch.Tensor] = []
        places: list[torch.Tensor] = []
        cut: set[int] = set()
        for row, hint in enumerate(hints):
            ids = output["completion_ids"][row][mask[row]].tolist()
            inserted: dict[int, list[int]] = {}
            if hint is not None and hint.turns and ids:  # a rollout that was masked out has no tokens to teach
                inserted, shortened = self._written(row, hint, ids, sampled[row].tolist(), room[row])
                cut |= {row} if shortened else set()
            tokens, positions = insert(ids, inserted)
            read.append(torch.tensor(tokens, dtype=torch.int64))
            places.append(torch.tensor([*positions, *[0] * (width - len(positions))], dtype=torch.int64))
        multiple = self._trainer.pad_to_multiple_of
        padding = self._trainer._tokenizer.pad_token_id
        return {
            "teacher_completion_ids": pad(read, padding, padding_side="right", pad_to_multiple_of=multiple),
            "teacher_completion_mask": pad(
                [torch.ones_like(tokens) for tokens in read], 0, padding_side="right", pad_to_multiple_of=multiple
            ),
            "teacher_positions": torch.stack(places),
        }, cut

    def _written(
        self, row: int, hint: Hint, ids: list[int], sampled: list[bool], room: int
    ) -> tuple[dict[int, list[int]], bool]:
        """The hints of one row by the position that they stand in front of, and whether one was cut."""
        starts = turn_starts(sampled[: len(ids)])
        share = room // len(hint.turns)
        written: dict[int, list[int]] = {}
        shortened = False
        for turn, text in hint.turns:
            if not 0 <= turn < len(starts):
                raise ValueError(
                    f"A hint of row {row} is for turn {turn}, and that rollout has turns 0 to {len(starts) - 1}. "
                    "Return hints for turns that were sampled from `choose_hints`."
                )
            header = self._header(row)
            place = starts[turn] - len(header)
            if place < 0 or any(sampled[place : starts[turn]]) or ids[place : starts[turn]] != header:
                raise ValueError(
                    f"Turn {turn} of row {row} does not begin with the chat template's generation header, so its hint "
                    "has no place. Give that rollout one text for the whole."
                )
            tokens = self._user_turn(text, row)
            if len(tokens) > share:
                tokens, shortened = self._fitted(text, share, row), True
            written[place] = tokens
        return written, shortened

    def _fitted(self, text: str, room: int, row: int) -> list[int]:
        """The longest part of a text whose turn has at most `room` tokens."""
        low, high = 0, len(text)  # `low` characters are known to fit (0: unknown), `high` is known not to
        while high - low > 1:
            middle = (low + high) // 2
            fits = len(self._user_turn(cut_middle(text, middle), row)) <= room
            low, high = (middle, high) if fits else (low, middle)
        if low == 0:
            raise NoRoomError(
                row,
                f"The teacher's prompt of row {row} leaves no room for its feedback per turn within "
                f"`max_reprompt_len` (or the model's positions): {room} tokens are left for each hint. Raise "
                "`max_reprompt_len`, or shorten the prompts: nothing but hints is cut.",
            )
        return self._user_turn(cut_middle(text, low), row)

    def _is_chat(self, row: int) -> bool:
        return not isinstance(self._trainer._rollouts.prompts[row], str)

    def _header(self, row: int) -> list[int]:
        """The tokens that the student's turn follows; none with plain text."""
        if not self._is_chat(row):
            return []
        question = [{"role": "user", "content": "q"}]
        return self._render(question, True)[len(self._render(question, False)) :]

    def _user_turn(self, text: str, row: int) -> list[int]:
        """The tokens of one user turn with a hint, as the template writes it after another turn."""
        told = fill(self._template, feedback_raw=text)
        if not self._is_chat(row):
            return self._trainer._tokenizer(told, add_special_tokens=False)["input_ids"]
        call = {"type": "function", "function": {"name": "f", "arguments": {}}}
        question = {"role": "user", "content": "q"}
        acted = [
            question,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "f", "content": "r"},
        ]
        problem = "it loses the text, or rewrites the past"
        # After a tool's reply, as in a rollout; a template that rewrites earlier turns shows it after a question.
        for before in (acted, [question]):
            try:
                start = self._render(before, False)
                # Some templates take typed blocks alone, and silently write nothing of a string.
                whole, other = (
                    self._render([*before, {**question, "content": content}], False) for content in (told, told + "?")
                )
            except TemplateError as error:
                problem = str(error)
                continue
            if whole[: len(start)] == start and whole != other:
                return whole[len(start) :]
        raise ValueError(
            f"The chat template has no place for a user turn within a rollout ({problem}), so feedback cannot be told "
            "where a turn begins. Give one text per rollout."
        )

    def _render(self, messages: list[Message], header: bool) -> list[int]:
        trainer = self._trainer
        return trainer._tokenizer.apply_chat_template(
            messages, add_generation_prompt=header, chat_template=trainer.chat_template, tokenize=True,
            return_dict=False, **trainer.chat_template_kwargs,
        )  # fmt: skip
