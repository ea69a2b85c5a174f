"""The teacher's prompt: templates, demonstrations, shortening to a budget.

Knows: strings and chat messages. Deliberately does not know: tokenizers, tensors, trainers. Standard library only;
every function is pure and leaves its arguments untouched.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Message = dict[str, Any]
Prompt = str | list[Message]
Placement = Literal["last_user", "append"]

DEFAULT_REPROMPT = "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n"
DEFAULT_SOLUTION = "\nCorrect solution:\n\n{successful_previous_attempt}\n\n"
DEFAULT_FEEDBACK = "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n"

_CUT = "\n...\n"


@dataclass(frozen=True)
class Templates:
    """
    The three slots of the paper's Table 2.

    Args:
        reprompt (`str`): Holds `{prompt}`, `{solution}` and `{feedback}`.
        solution (`str`): Holds `{successful_previous_attempt}`.
        feedback (`str`): Holds `{feedback_raw}`.

    Raises:
        `ValueError`: a template lacks one of its slots.
    """

    reprompt: str = DEFAULT_REPROMPT
    solution: str = DEFAULT_SOLUTION
    feedback: str = DEFAULT_FEEDBACK

    def __post_init__(self) -> None:
        for name, text, slots in (
            ("reprompt_template", self.reprompt, ("{prompt}", "{solution}", "{feedback}")),
            ("solution_template", self.solution, ("{successful_previous_attempt}",)),
            ("feedback_template", self.feedback, ("{feedback_raw}",)),
        ):
            missing = [slot for slot in slots if slot not in text]
            if missing:
                raise ValueError(f"`{name}` lacks the slot {', '.join(missing)}: {text!r}. Add it where it belongs.")


@dataclass(frozen=True)
class Hint:
    """
    What the teacher is told beside the question; `None` where there is nothing.

    Args:
        solution (`str`, *optional*): A successful answer to the same question.
        feedback (`str`, *optional*): Text from the environment, a judge or the user about this very answer.
        turns (`tuple[tuple[int, str], ...]`): Texts that are told where a later turn begins, by its number.
        hinted (`tuple[int, ...]`, *optional*): The turns that the texts are about; `None`: the whole answer.
    """

    solution: str | None = None
    feedback: str | None = None
    turns: tuple[tuple[int, str], ...] = ()
    hinted: tuple[int, ...] | None = None

    @property
    def changes_prompt(self) -> bool:
        """Whether the teacher's prompt says anything that the student's does not."""
        return self.solution is not None or self.feedback is not None

    @property
    def is_empty(self) -> bool:
        """Whether it holds no text at all."""
        texts = (self.solution, self.feedback, *(text for _, text in self.turns))
        return not any(text and text.strip() for text in texts)


def hint_of(solution: str | None, feedback: str | None, turns: Sequence[tuple[int, str]]) -> Hint:
    """A hint from a demonstration, a text about the answer, and texts per turn; the first turn's go to the prompt."""
    first = [text for turn, text in turns if turn == 0]
    whole = solution is not None or feedback is not None or not turns
    texts = first if feedback is None else [feedback, *first]
    return Hint(
        solution,
        "\n\n".join(texts) if texts else None,
        tuple((turn, text) for turn, text in turns if turn > 0),
        None if whole else tuple(turn for turn, _ in turns),
    )


def fill(template: str, **slots: str) -> str:
    """Substitute each `{name}` once and literally: braces, backslashes and LaTeX in the values pass unchanged."""
    pattern = "|".join(re.escape("{" + name + "}") for name in slots)
    return re.sub(pattern, lambda match: slots[match.group()[1:-1]], template)


def reprompt_text(question: str, hint: Hint, templates: Templates) -> str:
    """The text of the reprompt: the question and the hint in the three templates."""
    solution = feedback = ""
    if hint.solution is not None:
        solution = fill(templates.solution, successful_previous_attempt=hint.solution)
    if hint.feedback is not None:
        feedback = fill(templates.feedback, feedback_raw=hint.feedback)
    return fill(templates.reprompt, prompt=question, solution=solution, feedback=feedback)


def well_formed(value: Any) -> Any:
    """
    A text, or the texts in a structure, with halves of surrogate pairs written out (`\\ud800`).

    Python's strings can hold them: a program's output read with `surrogateescape`, `"\\ud800"` in JSON that a model
    wrote. No tokenizer and no file takes them.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {well_formed(key): well_formed(item) for key, item in value.items()}
    return [well_formed(item) for item in value] if isinstance(value, list) else value


def _is_text(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "text"


def message_text(content: Any) -> str:
    """The text of a message's content, which is a string, a list of typed blocks, or `None`."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(block["text"] for block in content if _is_text(block))


def replace_text(content: Any, text: str) -> Any:
    """`content` with `text` where its first text block was; blocks that are not text (images) stay in place."""
    if content is None or isinstance(content, str):
        return text
    blocks: list[Any] = []
    placed = False
    for block in content:
        if not _is_text(block):
            blocks.append(block)
        elif not placed:
            blocks.append({**block, "text": text})
            placed = True
    return blocks if placed else [*blocks, {"type": "text", "text": text}]


def teacher_prompt(prompt: Prompt, hint: Hint, templates: Templates, placement: Placement = "last_user") -> Prompt:
    """
    The prompt under which the teacher re-reads an answer (paper, Table 2).

    - `"last_user"`: the last user turn becomes the reprompt; system turns, earlier turns and images stay.
    - `"append"`: the whole conversation stays and one user turn with the reprompt follows. The question already stands
      in the conversation, so `{prompt}` is empty there, and the student's prompt (its generation header aside) is a
      prefix of the teacher's. A conversation that ends in a tool or assistant turn always uses it.

    With a plain-text prompt there are no turns: `"last_user"` fills the template with the prompt, `"append"` writes
    the reprompt behind it.

    Args:
        prompt (`str` or `list[dict]`): The student's prompt: text, or chat messages.
        hint ([`Hint`]): Demonstration and feedback.
        templates ([`Templates`]): The three templates.
        placement (`str`, *optional*, defaults to `"last_user"`): See above.

    Returns:
        `str` or `list[dict]`: the same kind as `prompt`, which is left untouched.
    """
    if isinstance(prompt, str):
        if placement == "append":
            return prompt + reprompt_text("", hint, templates)
        return reprompt_text(prompt, hint, templates)
    if not prompt:
        raise ValueError("A chat prompt needs at least one message, got an empty list.")
    last = prompt[-1]
    if placement == "append" or last["role"] != "user":
        return [*prompt, {"role": "user", "content": reprompt_text("", hint, templates)}]
    text = reprompt_text(message_text(last["content"]), hint, templates)
    return [*prompt[:-1], {**last, "content": replace_text(last["content"], text)}]


def strip_thinking(text: str, *, opened: bool = False, tags: tuple[str, str] = ("<think>", "</think>")) -> str | None:
    """
    A demonstration without its thinking.

    Whole blocks go. A block that the chat template opened has only its closing tag in the text: everything up to it
    goes too. A block that never closed leaves no answer to show: `None`.

    Args:
        text (`str`): The answer as it was sampled.
        opened (`bool`, *optional*, defaults to `False`): Whether the generation header already opened a block.
        tags (`tuple[str, str]`, *optional*): The opening and the closing tag.

    Returns:
        `str` or `None`: the rest, stripped of surrounding white space; `None` if nothing is left.
    """
    opening, closing = tags
    if opened:
        text = opening + text
    kept, place = [], 0
    # Piece by piece: a pattern would look for the end anew at each of many openings that never close.
    while (start := text.find(opening, place)) >= 0 and (end := text.find(closing, start + len(opening))) >= 0:
        kept.append(text[place:start])
        place = end + len(closing)
    text = "".join([*kept, text[place:]])
    if closing in text:
        text = text.rpartition(closing)[2]
    if opening in text:
        return None
    return text.strip() or None


def completion_text(completion: Prompt) -> str:
    """
    The text of an answer as a demonstration shows it: what the model wrote, its tool calls as JSON, what tools
    replied.

    Args:
        completion (`str` or `list[dict]`): Text, or the messages that were sampled (and, with tools, observed).

    Returns:
        `str`: one line or paragraph per part, in order.
    """
    if isinstance(completion, str):
        return completion
    parts = []
    for message in completion:
        text = message_text(message.get("content"))
        if message["role"] == "tool":
            text = f"[{message.get('name', 'tool')} replied] {text}"
        if text:
            parts.append(text)
        for call in message.get("tool_calls") or []:
            parts.append(json.dumps(call.get("function", call), ensure_ascii=False))
    return "\n".join(parts)


def cut_middle(text: str, characters: int) -> str:
    """`text` cut in its middle to `characters`, mark included: what failed stands first, the error often last."""
    if characters >= len(text):
        return text
    body = characters - len(_CUT)
    if body < 3:
        return text[:characters]
    tail = body // 3
    return text[: body - tail] + _CUT + text[len(text) - tail :]


def shorten(hint: Hint, fits: Callable[[Hint], bool]) -> Hint | None:
    """
    The longest version of `hint` that `fits`: the feedback is cut first, then the demonstration.

    Only those two texts are ever cut, never the system turn, the question, the closing instruction or the generation
    header. Costs about `log2(len(text))` calls of `fits`.

    Args:
        hint ([`Hint`]): What does not fit whole.
        fits (`Callable`): Whether the prompt with a given hint is within the budget.

    Returns:
        [`Hint`] or `None`: `None` if not even one character of a hint fits.
    """

    def longest(text: str, build: Callable[[str], Hint]) -> Hint | None:
        low, high = 0, len(text)  # `low` characters are known to fit (0: unknown), `high` is known not to
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(build(cut_middle(text, middle))) else (low, middle)
        return build(cut_middle(text, low)) if low else None

    if hint.feedback is not None:
        kept = longest(hint.feedback, lambda text: replace(hint, feedback=text))
        if kept is not None:
            return kept
    if hint.solution is None:
        return None
    alone = replace(hint, feedback=None)
    if fits(alone):
        return alone
    return longest(hint.solution, lambda text: replace(alone, solution=text))
