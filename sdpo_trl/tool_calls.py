"""What stands between the student's text and its tools: reading calls, counting them, cutting what tools reply.

TRL turns an unknown tool, wrong arguments and a tool that raises into an observation; here, broken JSON becomes one
too. Knows: texts, messages, functions. Deliberately does not know: models, trainers.
"""

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .reprompt import Message, cut_middle

INVALID_CALL = "invalid_tool_call"


def invalid_tool_call(error: str = "") -> None:
    """Stands where a call could not be read, so that the student is told why."""
    raise ValueError(error or f"{INVALID_CALL} is not a tool.")


def opens_call(text: str, template: Any) -> bool:
    """Whether a text holds the beginning of a tool call, by the tokenizer's `response_template`."""
    field = (template or {}).get("fields", {}).get("tool_calls", {})
    literals = field.get("open") or []
    literals = [literals] if isinstance(literals, str) else literals
    pattern = field.get("open_pattern")
    return any(literal in text for literal in literals) or bool(pattern and re.search(pattern, text))


def nested_calls(calls: Any) -> list[dict[str, Any]]:
    """
    Tool calls in the one form that TRL's loop reads: `{"type": ..., "function": {"name", "arguments"}}`.

    Raises:
        `ValueError`: a call has no name.
    """
    nested = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("a call must be an object with a `name` and `arguments`")
        arguments = function.get("arguments")
        arguments = {} if arguments is None else arguments
        nested.append({"type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return nested


class ResponseReader:
    """
    Reads one sampled turn, as the tokenizer's `parse_response` does, but for two cases: a call that cannot be read
    becomes a call of [`invalid_tool_call`], and a turn that was cut at its limit calls nothing.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): With a `response_template`.
        end_ids (`Sequence[int]`): The tokens that end a turn.
        limit (`int`, *optional*): Tokens that a turn may have.
    """

    def __init__(self, tokenizer: Any, end_ids: Sequence[int], limit: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._parse = tokenizer.parse_response
        self._template = getattr(tokenizer, "response_template", None)  # older tokenizers have a schema instead
        self._end_ids = set(end_ids)
        self._limit = limit

    def __call__(self, ids: Any, *args: Any, **kwargs: Any) -> Message:
        ended = len(ids) > 0 and ids[-1] in self._end_ids
        if not ended and self._limit is not None and len(ids) >= self._limit:
            return {"role": "assistant", "content": self._tokenizer.decode(ids, skip_special_tokens=True)}
        try:
            parsed = self._parse(ids, *args, **kwargs)
            if parsed is not None and parsed.get("tool_calls"):
                parsed["tool_calls"] = nested_calls(parsed["tool_calls"])
            return parsed
        except (ValueError, TypeError) as error:  # what TRL takes for a text without calls
            text = self._tokenizer.decode(ids, skip_special_tokens=True)
            if not ended or not opens_call(self._tokenizer.decode(ids), self._template):
                raise
            reason = f"The tool call could not be read ({error}). Write one JSON object."
            call = {"name": INVALID_CALL, "arguments": {"error": reason}}
            return {"role": "assistant", "content": text, "tool_calls": nested_calls([call])}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within, the tokenizer parses through this reader; it is as before afterwards."""
        self._tokenizer.parse_response = self
        try:
            yield
        finally:
            del self._tokenizer.parse_response


class ToolBox(dict):
    """
    The tools of one rollout by name, which counts the calls and the successes of each.

    Args:
        tools (`dict[str, Callable]`): Sync functions, or coroutine functions.
        calls (`Counter`): Gets one per call.
        successes (`Counter`): Gets one per call that did not raise.
    """

    def __init__(self, tools: dict[str, Callable[..., Any]], calls: Counter, successes: Counter) -> None:
        super().__init__({name: _counted(name, tool, successes) for name, tool in tools.items()})
        self._calls = calls

    def __getitem__(self, name: str) -> Callable[..., Any]:
        self._calls[name] += 1
        return super().__getitem__(name)


def _counted(name: str, tool: Callable[..., Any], successes: Counter) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(tool):

        @functools.wraps(tool)
        async def call(**arguments: Any) -> Any:
            result = await tool(**arguments)
            successes[name] += 1
            return result

    else:

        @functools.wraps(tool)
        def call(**arguments: Any) -> Any:
            result = tool(**arguments)
            successes[name] += 1
            return result

    return call


def _is_block(part: Any) -> bool:
    return isinstance(part, dict) and "type" in part


def settle_observation(observation: Message, limit: int | None) -> None:
    """
    Bring what a tool replied into a form that a chat template takes, in place: text, at most `limit` characters of it,
    or a list of typed blocks (images), of which the texts are cut.

    Args:
        observation (`dict`): A message of role `tool`.
        limit (`int`, *optional*): Characters; the middle is left out, the mark `...` included in the length.
    """
    content = observation["content"]
    if isinstance(content, list) and not (content and all(_is_block(part) for part in content)):
        content = str(content)  # a plain list is no list of blocks
    if limit is not None and isinstance(content, str):
        content = cut_middle(content, limit)
    elif limit is not None:
        content = [
            {**part, "text": cut_middle(part["text"], limit)} if part["type"] == "text" else part for part in content
        ]
    observation["content"] = content
