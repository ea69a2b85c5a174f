"""Rows of a dataset as people have them, turned into what TRL asks for: a `prompt`, and the tools it declares.

Knows: dictionaries. Deliberately does not know: tokenizers, tensors, trainers. Standard library only; every function
leaves its arguments untouched.
"""

import json
from collections.abc import Sequence
from typing import Any

from .reprompt import Message

Schema = dict[str, Any]

_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "ai": "assistant",
    "model": "assistant", "observation": "tool", "function_response": "tool", "tool_response": "tool",
    "tool_result": "tool", "function": "tool",
}  # fmt: skip
_CALL_ROLES = ("function_call", "tool_call")
_PLAIN_ROLES = ("system", "developer", "user", "assistant", "tool")


def without_missing(value: Any) -> Any:
    """The same structure without the `None`s that Arrow writes for keys that other rows have."""
    if isinstance(value, dict):
        return {key: without_missing(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [without_missing(item) for item in value]
    return value


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not valid JSON ({error}): {text[:200]!r}.") from error


def _call(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object, which is how chat templates want them."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"A tool call in a row must be an object with a `name` and `arguments`, got {call!r:.200}.")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _json(arguments, "The arguments of a tool call in a row") if arguments.strip() else {}
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def message(turn: Message) -> Message:
    """
    One turn as a chat message: `role` and `content`, from either spelling (`from` and `value` in ShareGPT's).

    Raises:
        `ValueError`: the turn has no role, or one after `from` that nobody is known by, or holds a tool call that
            cannot be read.
    """
    if not isinstance(turn, dict):
        raise ValueError(
            f"A turn must be an object with `role` and `content`, or `from` and `value`; got {turn!r:.200}."
        )
    turn = without_missing(turn)
    role = turn.pop("role", None)
    plain = isinstance(role, str)
    role = role or turn.pop("from", None)
    if not isinstance(role, str):
        raise ValueError(f"A turn needs `role` and `content`, or `from` and `value`; got the keys {sorted(turn)}.")
    if role.lower() in (*_ROLES, *_CALL_ROLES, *_PLAIN_ROLES):
        role = role.lower()
    elif not plain:  # an answer under a name of its own would be shown to the student; templates have more `role`s
        raise ValueError(
            f"A turn is from {role!r}, and that could be anybody. Known are: "
            f"{', '.join((*_PLAIN_ROLES, *_ROLES, *_CALL_ROLES))}."
        )
    content = turn.pop("content", None)
    content = turn.pop("value", "") if content is None else content
    if role in _CALL_ROLES:
        calls = _json(content, f"A turn of role {role!r}") if isinstance(content, str) else content
        calls = calls if isinstance(calls, list) else [calls]
        return {"role": "assistant", "content": "", "tool_calls": [_call(call) for call in calls]}
    turn = {"role": _ROLES.get(role, role), "content": content, **turn}
    calls = turn.get("tool_calls", [])
    calls = _json(calls, "The `tool_calls` of a turn") if isinstance(calls, str) and calls.strip() else calls or []
    if "tool_calls" in turn:
        turn["tool_calls"] = [_call(call) for call in (calls if isinstance(calls, list) else [calls])]
    return turn


def _schema(tool: Any) -> "Schema | str":
    if isinstance(tool, str) and tool.lstrip().startswith("{"):
        tool = _json(tool, "A tool's schema")
    if isinstance(tool, str):
        return tool
    if not isinstance(tool, dict):
        raise ValueError(f"A tool is declared by its JSON schema, or by its name; got {type(tool).__name__}.")
    tool = without_missing(tool)
    tool = tool if "function" in tool else {"type": "function", "function": tool}
    if not isinstance(tool["function"], dict) or not isinstance(tool["function"].get("name"), str):
        raise ValueError(f"A tool's schema has no `name`: {tool}.")
    return tool


def declared_tools(tools: Any) -> "list[Schema | str] | None":
    """
    The tools of one row, from the value of its `tools` column or field.

    Args:
        tools (`Any`): A list of JSON schemas, nested under `function` or flat, as objects or as text, or of names of
            functions that the trainer has; or that whole list as one JSON text; or `None`.

    Returns:
        `list` or `None`: schemas under `function`, and names; `None` where the row says nothing about tools. An empty
        list means that it may call none.

    Raises:
        `ValueError`: it is none of these.
    """
    if isinstance(tools, str):
        tools = _json(tools, "The `tools` of a row") if tools.strip() else []
    if tools is None:  # as JSON's `null`, too
        return None
    if isinstance(tools, dict):
        tools = [tools]
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise ValueError(f"The `tools` of a row must be a list of JSON schemas, got {type(tools).__name__}.")
    return [_schema(tool) for tool in tools]


def tool_name(tool: "Schema | str") -> str:
    """The name under which a declared tool is called."""
    return tool if isinstance(tool, str) else tool["function"]["name"]


def prompt_row(row: dict[str, Any]) -> dict[str, Any]:
    """
    A row with a `prompt`, and with `tools` where it declares any; a row that has both as TRL wants them is returned
    as it is.

    `messages`, or else `conversations`, become the prompt, without the assistant's turns at the end: the student
    writes its own. Schemas in the system message's `tools` field move to the row's `tools`, which count if it has
    both.

    Raises:
        `ValueError`: nothing is left to answer, or a turn or a tool cannot be read.
    """
    turns = row.get("prompt")
    source = None
    if turns is None:
        source = next((name for name in ("messages", "conversations") if row.get(name)), None)
        if source is None:
            return row
        turns = _json(row[source], f"The `{source}` of a row") if isinstance(row[source], str) else row[source]
        if not isinstance(turns, (list, tuple)):
            raise ValueError(f"The `{source}` of a row must be a list of turns, got a {type(turns).__name__}.")
        turns = [message(turn) for turn in turns]
        while turns and turns[-1]["role"] == "assistant":
            turns.pop()
        if not turns:
            raise ValueError(f"The `{source}` of a row hold nothing that could be answered: {row[source]!r}.")
    tools = row.get("tools")
    # Only a list of messages whose first is a system turn can hold schemas.
    first = turns[0] if isinstance(turns, list) and turns else {}
    if not isinstance(first, dict):
        raise ValueError(f"A prompt is a text or a list of messages, got a list that begins with {first!r:.200}.")
    if first.get("role") in ("system", "developer") and "tools" in first:
        tools = first["tools"] if tools is None else tools
        turns = [{key: value for key, value in first.items() if key != "tools"}, *turns[1:]]
    elif source is None:
        return row
    return {**row, "prompt": turns} | ({} if tools is None else {"tools": tools})
