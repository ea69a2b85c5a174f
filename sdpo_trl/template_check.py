"""Before the first step: does the chat template say to the teacher what the student reads, and the feedback too?

Knows: chat messages, and a function that renders them. Deliberately does not know: trainers, tokens, models.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from .reprompt import (
    Hint,
    Message,
    Placement,
    Prompt,
    Templates,
    message_text,
    replace_text,
    strip_thinking,
    teacher_prompt,
)

Render = Callable[[Sequence[Message], bool], str]

SOLUTION = "The answer that the check shows is 42"
FEEDBACK = "The check says that line 7 of the answer is wrong"
_WORDS = "a user's last words"
_SHOWN = 400
# What a template's own marks hold, `<|user|>` or `[INST]` (DeepSeek's bars are wide ones), and plain words do not.
_MARKS = re.compile("[<\\[|\N{FULLWIDTH VERTICAL LINE}]")
# Marks that people write, too: a lone tag, `[INST]` or `<user>`, of which it takes two to make a chat.
_LONE_TAG = re.compile(r"</?\w+>|\[/?\w+\]")
# What a template raises: by its own words, or where it trips over a conversation that it was not written for.
_REFUSALS = (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)


class TemplateCheckError(ValueError):
    """The chat template, or a prompt that was made with it, would show the teacher something else than it should."""


def _failure(check: str, what: str, remedy: str, student: str, teacher: str) -> TemplateCheckError:
    return TemplateCheckError(
        f"The chat template fails the check of {check}: {what}\n{remedy}\n"
        f"--- The student reads:\n{_end(student)}\n--- The teacher reads:\n{_end(teacher)}\n---"
    )


def _end(text: str) -> str:
    return text if len(text) <= _SHOWN else f"[...]{text[-_SHOWN:]}"


def check_templates(
    render: Render,
    prompt: Prompt,
    templates: Templates,
    placement: Placement = "last_user",
    *,
    switches: "dict[str, Render] | None" = None,
) -> None:
    """
    Write a teacher's prompt for one prompt, and compare it with the student's.

    - *header*: both end in the same generation header, so that they answer in the same mode;
    - *feedback*: the feedback, the demonstration and the question stand in the teacher's prompt, word by word, and so
      does each earlier turn that the student reads;
    - *switches*: an option of the template (`enable_thinking`) that changes what the student reads changes what the
      teacher reads;
    - *nesting*: no message holds a chat that has been rendered already.

    Args:
        render (`Callable`): `(messages, add_generation_prompt) -> str`, with all that the student's prompts are
            rendered with: template, options, tools.
        prompt (`str` or `list[dict]`): A student's prompt.
        templates ([`Templates`]): Of the reprompt.
        placement (`str`): Where the reprompt goes.
        switches (`dict[str, Callable]`, *optional*): For each option of the template, `render` without that option.

    Raises:
        [`TemplateCheckError`]: says which check failed, what to do, and shows both texts.
    """
    hint = Hint(SOLUTION, FEEDBACK)
    if isinstance(prompt, str):
        _check_plain(render, prompt, teacher_prompt(prompt, hint, templates, placement))
        return
    messages = teacher_prompt(prompt, hint, templates, placement)
    student = _rendered(render, prompt, "student")
    teacher = _rendered(render, messages, "teacher")
    _check_nesting(render, messages, student, teacher)
    _check_texts(prompt, student, teacher)
    _check_header(render, prompt, messages, student, teacher)
    for name, without in (switches or {}).items():
        if _differs(without, prompt, student) and not _differs(without, messages, teacher):
            raise _failure(
                "switches",
                f"`{name}` changes what the student reads, but not what the teacher reads.",
                f"Leave `{name}` out of `chat_template_kwargs`, or use a template that always heeds it.",
                student,
                teacher,
            )


def _rendered(render: Render, messages: Sequence[Message], whose: str) -> str:
    try:
        return render(messages, True)
    except _REFUSALS as error:
        shown = "\n".join(f"[{m.get('role')}] {_end(message_text(m.get('content')))}" for m in messages)
        remedy = {
            "student": "Change the prompts, or the tokenizer's `chat_template`.",
            "teacher": "If it forbids two user turns in a row, set `reprompt_placement='last_user'`.",
        }
        raise TemplateCheckError(
            f"The chat template refuses the {whose}'s prompt ({error}). {remedy[whose]}\n"
            f"--- The {whose} should read:\n{shown}\n---"
        ) from error


def _differs(render: Render, messages: Sequence[Message], text: str) -> bool:
    """Whether it renders something else; a template that needs an option says so when the option is gone."""
    try:
        return render(messages, True) != text
    except _REFUSALS:
        return True


def _check_texts(prompt: Sequence[Message], student: str, teacher: str) -> None:
    wanted = [("feedback", FEEDBACK), ("demonstration", SOLUTION)]
    for message in prompt:
        text = message_text(message.get("content"))
        if message["role"] == "assistant":
            # Templates drop the thinking of turns before a user's, and the teacher may read a user turn more.
            text = strip_thinking(text) or ""
        text = text.strip()
        # A template may leave out what it does not show to the student either.
        if text and text in student:
            wanted.append((f"{message['role']} turn", text))
    for what, text in wanted:
        if text not in teacher:
            raise _failure(
                "feedback",
                f"the teacher's prompt lacks the {what} {text[:100]!r}.",
                "Use a template that shows every turn's text as it is (set `chat_template` on the tokenizer), or the "
                "other `reprompt_placement`.",
                student,
                teacher,
            )


def _check_header(
    render: Render, prompt: Sequence[Message], messages: Sequence[Message], student: str, teacher: str
) -> None:
    if prompt[-1]["role"] == "user":
        # What follows a user's last words; a template may have no header of its own beyond it. In the teacher's kind
        # of content, since an image behind the words is no header.
        spoken = {**prompt[-1], "content": replace_text(messages[-1]["content"], _WORDS)}
        other = render([*prompt[:-1], spoken], True)
        header = other[other.rfind(_WORDS) + len(_WORDS) :] if _WORDS in other else ""
    else:  # the teacher's prompt goes on with a user's turn
        header = _after(render(prompt, False), student)
    if student.endswith(header) and not teacher.endswith(header):
        raise _failure(
            "header",
            f"the student's prompt ends in {header!r}, and the teacher's does not, so the two answer in different "
            "modes.",
            "Use a template whose generation header does not depend on the turns before it (`chat_template` of the "
            "tokenizer, or an option in `chat_template_kwargs`), or the other `reprompt_placement`.",
            student,
            teacher,
        )


def _after(shorter: str, longer: str) -> str:
    """What `longer` holds behind their common beginning."""
    same = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), None)
    return longer[min(len(shorter), len(longer)) if same is None else same :]


def chat_marks(render: Render) -> list[str]:
    """
    What begins a chat, what stands between an answer and the next user turn, and what follows the last user turn, as
    far as it cannot be mistaken for people's own words; empty where the template refuses such a chat.
    """
    one, two, three = "the first text", "the second text", "the third text"
    turns = [{"role": r, "content": c} for r, c in (("user", one), ("assistant", two), ("user", three))]
    try:
        text = render(turns, True)
        alone = render(turns[:1], False)
    except _REFUSALS:
        return []
    if not (one in alone and text.find(two) < text.find(three)) or two not in text:
        return []
    found = (
        alone[: alone.index(one)],
        text[text.index(two) + len(two) : text.index(three)],
        text[text.index(three) + len(three) :],
    )
    return [mark for mark in (part.strip() for part in found) if len(mark) >= 5 and _MARKS.search(mark)]


def _check_nesting(render: Render, messages: Sequence[Message], student: str, teacher: str) -> None:
    marks = chat_marks(render)
    for number, message in enumerate(messages):
        text = message_text(message.get("content"))
        found = [mark for mark in dict.fromkeys(marks) if mark in text]
        if len(found) > 1 or (found and not _LONE_TAG.fullmatch(found[0])):
            raise _failure(
                "nesting",
                f"message {number} ({message['role']}) holds a rendered chat: {found[0]!r} stands in its text.",
                "Give the messages themselves, not the text that a chat template made of them, and keep the "
                "template's marks out of `reprompt_template`, `solution_template` and `feedback_template`.",
                student,
                teacher,
            )


def _check_plain(render: Render, student: str, teacher: str) -> None:
    """A text that is a rendered chat must still end where the answer begins once the hint is in it."""
    for mark in chat_marks(render):
        if student.rstrip().endswith(mark) and not teacher.rstrip().endswith(mark):
            raise _failure(
                "nesting",
                f"the prompt is a rendered chat that ends in {mark!r}; the feedback would stand behind that, inside "
                "of the answer.",
                "Give the messages (`[{'role': 'user', 'content': ...}]`) instead of the text that a chat template "
                "made of them.",
                student,
                teacher,
            )


def unknown_switches(template: str, options: dict[str, Any]) -> list[str]:
    """The options that a template never reads, so that they do nothing for either side."""
    return [name for name in options if not re.search(rf"\b{re.escape(name)}\b", template)]
