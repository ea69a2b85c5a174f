"""How much of the model's positions a conversation uses, and what could go when it is too much.

Knows: turns, token counts. Deliberately does not know: models. Standard library only.
"""

import json
from collections.abc import Callable, Sequence

from ..reprompt import message_text
from .records import ContextTooLong, Message
from .state import unit_of


def _text(turn: Message) -> str:
    calls = [json.dumps(call["function"]) for call in turn.get("tool_calls") or []]
    return "\n".join([message_text(turn.get("content")), *calls])


def droppable(messages: Sequence[Message], count: Callable[[str], int]) -> dict[int, int]:
    """
    The first turn of each part that may go, with its tokens: all but the system turn and the last user turn.

    Args:
        messages (`Sequence[dict]`): The conversation.
        count (`Callable`): Tokens of a text.
    """
    last_user = max((i for i, turn in enumerate(messages) if turn["role"] == "user"), default=-1)
    sizes: dict[int, int] = {}
    turn = 0
    while turn < len(messages):
        first, last = unit_of(messages, turn)
        if messages[first]["role"] != "system" and first != last_user:
            sizes[first] = sum(count(_text(messages[i])) for i in range(first, last))
        turn = last
    return sizes


def check_room(
    messages: Sequence[Message], tokens: int, limit: int | None, reserved: int, count: Callable[[str], int]
) -> None:
    """
    Refuse a conversation that leaves too little room, and say which turn to drop: the oldest one that suffices, or
    the largest.

    Args:
        messages (`Sequence[dict]`): The conversation.
        tokens (`int`): Of its prompt, tools and generation header included.
        limit (`int`, *optional*): The model's positions.
        reserved (`int`): Tokens that are kept for the answer.
        count (`Callable`): Tokens of a text.

    Raises:
        [`ContextTooLong`]: names the turn.
    """
    if limit is None or tokens + reserved <= limit:
        return
    room = limit - reserved
    said = (
        f"The conversation has {tokens} tokens. The model reads {limit}, and {reserved} are kept for its answer "
        f"(`max_completion_length`), so {max(room, 0)} are left."
    )
    sizes = droppable(messages, count)
    if not sizes:
        raise ContextTooLong(
            f"{said} No turn can go: shorten the system turn, the tools' descriptions, or `max_completion_length`.",
            None, tokens, room,
        )  # fmt: skip
    enough = [turn for turn, size in sizes.items() if size >= tokens - room]
    turn = enough[0] if enough else max(sizes, key=lambda first: sizes[first])
    first, last = unit_of(messages, turn)
    name = f"turn {turn}" if last - first == 1 else f"turns {first} to {last - 1}"
    start = " ".join(_text(messages[first]).split())[:60]
    more = "" if enough else " (and more after that)"
    raise ContextTooLong(
        f"{said} Drop {name}{more}, {messages[first]['role']}, {sizes[turn]} tokens, {start!r}...: "
        f"`session.drop({turn})`.",
        turn, tokens, room,
    )  # fmt: skip
