"""What stands between the student's text and its tools: reading calls, counting them, cutting what tools reply.

TRL turns an unknown tool, wrong arguments and a tool that raises into an observation; here, broken JSON becomes one
too. Knows: texts, messages, functions. Deliberately does not know: models, trainers.
"""

import copy
import functools
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .reprompt import Message, cut_middle, message_text, well_formed

INVALID_CALL = "invalid_tool_call"
_DEEPEST = 64  # levels that a call's arguments may have: what follows it can then be written again


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


def call_marker(template: Any) -> str | None:
    """
    The tag that begins every tool call (`<tool_call>`), by the tokenizer's `response_template`.

    Templates whose calls hold more than JSON ask for more behind it (`<tool_call>\\s*<function=...`): what lacks that
    is a text to the parser. `None` where calls have no tag of their own, and a text could begin alike.
    """
    field = (template or {}).get("fields", {}).get("tool_calls", {})
    found = re.match(r"<[^<>\\()\[\]{}*+?.^$]+>", field.get("open_pattern") or "")
    return found and found.group()


def nested_calls(calls: Any) -> list[dict[str, Any]]:
    """
    Tool calls in the one form that TRL's loop reads: `{"type": ..., "function": {"name", "arguments"}}`.

    Raises:
        `ValueError`: a call has no name, or its arguments are nested too deeply.
    """
    nested = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("a call must be an object with a `name` and `arguments`")
        arguments = function.get("arguments")
        arguments = {} if arguments is None else arguments
        if _is_deeper(arguments, _DEEPEST):
            raise ValueError(f"the arguments of a call must not be nested more than {_DEEPEST} levels deep")
        named = {"name": function["name"], "arguments": arguments}
        nested.append({"type": "function", "function": well_formed(named)})
    return nested


def _is_deeper(value: Any, levels: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(part, levels - 1) for part in parts)


def as_table_entry(entry: Any) -> Any:
    """
    A prompt or completion in a form that a table can hold beside any other: a call's arguments as the JSON text of an
    object, and replies as text. As they are, one answer that calls a tool with a number where another one gives a
    text, or with nothing at all, would be more than a column's type can say.

    Args:
        entry (`str` or `list[dict]`): Messages are copied, other things left as they are.
    """
    if not isinstance(entry, list):
        return entry
    shown = []
    for message in entry:
        message = dict(message)
        if message.get("tool_calls"):
            message["tool_calls"] = [_table_call(call) for call in message["tool_calls"]]
        content = message.get("content")
        if message.get("role") == "tool" and isinstance(content, list) and all(map(_is_block, content)):
            message["content"] = "".join(
                part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in content
            )
        shown.append(message)
    return shown


def _table_call(call: Any) -> Any:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    arguments = function["arguments"]
    if not isinstance(arguments, str) or not arguments.lstrip().startswith("{"):
        whole = arguments if isinstance(arguments, dict) else {"arguments": arguments}
        arguments = well_formed(json.dumps(whole, ensure_ascii=False, default=str))
    written = {**function, "arguments": arguments}
    return {**call, "function": written} if function is not call else written


def _unread(reason: str, advice: str) -> list[dict[str, Any]]:
    error = f"The tool call could not be read ({reason}). {advice}"
    return nested_calls([{"name": INVALID_CALL, "arguments": {"error": error}}])


class ResponseReader:
    """
    Reads one sampled turn, as the tokenizer's `parse_response` does, but for two cases: a call that cannot be read
    becomes a call of [`invalid_tool_call`], and a turn that was cut at its limit calls nothing.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): With a `response_template`.
        end_ids (`Sequence[int]`): The tokens that end a turn.

    Attributes:
        limit (`int`, *optional*): A turn of as many tokens that has no end was cut.
    """

    limit: int | None = None

    def __init__(self, tokenizer: Any, end_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._parse = tokenizer.parse_response
        self._template = getattr(tokenizer, "response_template", None)  # older tokenizers have a schema instead
        self._end_ids = set(end_ids)

    def __call__(self, ids: Any, *args: Any, **kwargs: Any) -> Message:
        ended = len(ids) > 0 and ids[-1] in self._end_ids
        if not ended and self.limit is not None and len(ids) >= self.limit:
            return {"role": "assistant", "content": self._tokenizer.decode(ids, skip_special_tokens=True)}
        try:
            parsed = self._parse(ids, *args, **kwargs)
            if parsed is not None and parsed.get("tool_calls"):
                parsed["tool_calls"] = nested_calls(parsed["tool_calls"])
            marker = call_marker(self._template)
            if ended and marker and parsed is not None and marker in message_text(parsed.get("content")):
                reason = f"what follows {marker} is not in the form of a call"
                parsed["tool_calls"] = [*(parsed.get("tool_calls") or []), *_unread(reason, "Write it as described.")]
            return parsed
        except (ValueError, TypeError, RecursionError) as error:
            text = self._tokenizer.decode(ids, skip_special_tokens=True)
            if not ended or not opens_call(self._tokenizer.decode(ids), self._template):
                raise ValueError(str(error)) from error  # which TRL takes for a text without calls
            return {"role": "assistant", "content": text, "tool_calls": _unread(str(error), "Write one JSON object.")}

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
        sees (`bool`, *optional*): Whether the model reads images.
    """

    def __init__(
        self, tools: dict[str, Callable[..., Any]], calls: Counter, successes: Counter, sees: bool = True
    ) -> None:
        super().__init__({name: _counted(name, tool, successes, sees) for name, tool in tools.items()})
        self._calls = calls

    def __getitem__(self, name: str) -> Callable[..., Any]:
        self._calls[name] += 1
        return super().__getitem__(name)


def _counted(name: str, tool: Callable[..., Any], successes: Counter, sees: bool) -> Callable[..., Any]:
    # A tool may change what it is given; the call that the student made stays in the messages as it is.
    if inspect.iscoroutinefunction(tool):

        @functools.wraps(tool)
        async def call(**arguments: Any) -> Any:
            with as_error():
                result = _reply(await tool(**copy.deepcopy(arguments)), sees)
            successes[name] += 1
            return result

    else:

        @functools.wraps(tool)
        def call(**arguments: Any) -> Any:
            with as_error():
                result = _reply(tool(**copy.deepcopy(arguments)), sees)
            successes[name] += 1
            return result

    return call


@contextmanager
def as_error() -> Iterator[None]:
    """
    Within, whatever a tool raises fails as other faults do, with a text: an attempt to end the process (such as that
    of a parser of arguments), a cancelled task, a panic of compiled code. Only the user's own interrupt gets through.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except SystemExit as error:
        raise RuntimeError(f"the tool ended with status {error.code}") from error
    except BaseException as error:
        try:
            text = str(error)
        except Exception:
            text = ""
        if isinstance(error, Exception) and text.strip():
            raise
        raise RuntimeError(": ".join([type(error).__name__, *([text] if text.strip() else [])])) from error


def _reply(result: Any, sees: bool) -> Any:
    """What a tool gave, as TRL takes it: typed blocks (images) as they are, anything else as text."""
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError("the tool gave a coroutine: declare it with `async def`")
    if not (isinstance(result, list) and result and all(_is_block(part) for part in result)):
        return str(result)
    if not sees and any(part["type"] == "image" for part in result):
        raise ValueError("the tool gave an image, and this model reads text alone")
    return result


def _is_block(part: Any) -> bool:
    """Whether it is a chat template's, `{"type": "text", "text": ...}`, and not the tool's own kind of object."""
    kind = part.get("type") if isinstance(part, dict) else None
    return isinstance(kind, str) and kind in part and (kind != "text" or isinstance(part["text"], str))


def settle_observation(observation: Message, limit: int | None) -> None:
    """
    Bring what a tool replied into a form that a chat template takes, in place: text, at most `limit` characters of it,
    or a list of typed blocks of which some are no text (images), and the texts are cut.

    Args:
        observation (`dict`): A message of role `tool`.
        limit (`int`, *optional*): Characters; the middle is left out, the mark `...` included in the length.
    """
    content = observation["content"]
    if isinstance(content, list) and all(part["type"] == "text" for part in content):
        content = message_text(content)
    content = well_formed(content)
    if limit is not None and isinstance(content, str):
        content = cut_middle(content, limit)
    elif limit is not None:
        content = [
            {**part, "text": cut_middle(part["text"], limit)} if part["type"] == "text" else part for part in content
        ]
    observation["content"] = content
