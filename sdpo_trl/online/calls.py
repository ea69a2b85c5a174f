"""Tool calls: how this tokenizer's model writes them, and running them.

Knows: chat templates, functions. Deliberately does not know: models, approval, confinement (which are the tools' and
the application's own).
"""

import asyncio
import inspect
import json
import logging
import re
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jinja2.exceptions import TemplateError
from transformers.utils import get_json_schema
from trl.chat_template_utils import add_response_schema, parse_response, supports_tool_calling

from ..reprompt import message_text, well_formed
from ..tool_calls import INVALID_CALL, ResponseReader, as_error, nested_calls
from .records import Call, Message, Observation

logger = logging.getLogger(__name__)

_TAGS = ("<tool_call>", "</tool_call>")
_INTRODUCTION = (
    "You can call tools. To call one, write exactly\n"
    '<tool_call>\n{"name": "tool", "arguments": {"argument": "value"}}\n</tool_call>\n'
    "and nothing after it; the reply follows. The tools, as JSON schemas:\n"
)


class ToolSet:
    """
    The functions that a model may call.

    Args:
        tools (`Iterable[Callable]`): Functions or bound methods, also async ones, with type hints and a Google-style
            docstring, as TRL and `transformers.utils.get_json_schema` want them.

    Raises:
        `TypeError`, `ValueError`: something that cannot be called or described, or two tools of one name.
    """

    def __init__(self, tools: Iterable[Callable[..., Any]]) -> None:
        self.functions: dict[str, Callable[..., Any]] = {}
        for tool in tools:
            if not callable(tool):
                raise TypeError(f"A tool is a function, got {type(tool).__name__}.")
            if tool.__name__ in self.functions:
                raise ValueError(f"Two tools are called {tool.__name__!r}. Rename one.")
            self.functions[tool.__name__] = tool
        self.schemas = [get_json_schema(tool) for tool in self.functions.values()]

    def fault(self, calls: Sequence[Call]) -> str | None:
        """What is wrong with calls before anything runs, or `None`."""
        unknown = next((call.name for call in calls if call.name not in self.functions), None)
        if unknown is None:
            return None
        return f"There is no tool {unknown!r}. The tools: {', '.join(self.functions) or 'none'}."

    def run(self, call: Call) -> Observation:
        """Run one call; what the tool raises is what the model reads, after `Error: `."""
        fault = self.fault([call])
        if fault is not None:
            return Observation(call, f"Error: {fault}", ok=False)
        try:
            with as_error():
                result = self.functions[call.name](**call.arguments)
                if inspect.iscoroutine(result):
                    result = _awaited(result)
        except Exception as error:  # whatever a tool raises is its reply
            return Observation(call, f"Error: {well_formed(_words(error)) or type(error).__name__}", ok=False)
        try:
            return Observation(call, well_formed(result if isinstance(result, str) else _as_text(result)), ok=True)
        except Exception as error:
            what = f"what the tool gave has no text: {_words(error) or type(error).__name__}"
            return Observation(call, f"Error: {well_formed(what)}", ok=False)


def _awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """An async tool's result, also where a loop runs already, as in a notebook: then in a thread with its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def _as_text(result: Any) -> str:
    """JSON, or Python's own way to write what JSON has no form for."""
    try:
        return json.dumps(result, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return str(result)


def _words(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # a faulty `__str__`
        return ""


def calls_of(answer: "str | Call | Sequence[Call]") -> list[Call]:
    """
    The calls of an answer that was given; none of a text.

    Raises:
        `TypeError`: it is neither a text nor calls, or arguments are no JSON object.
    """
    if isinstance(answer, str):
        return []
    calls = [answer] if isinstance(answer, Call) else list(answer) if isinstance(answer, Sequence) else [answer]
    for call in calls:
        if not isinstance(call, Call):
            raise TypeError(f"That is none: an answer is text, a `Call` or a list of them, got {type(call).__name__}.")
        try:
            json.dumps(call.arguments)
            fault = None if isinstance(call.arguments, dict) else f"object: {call.arguments!r}"
        except (TypeError, ValueError, RecursionError) as error:
            fault = f"values: {error}"
        if fault is not None:
            raise TypeError(f"The arguments of `{call.name}` are no JSON {fault}.")
    return calls


class Dialect:
    """
    How calls are written by the chat template itself (Qwen3, Llama 3, ...).

    Args:
        tokenizer (`PreTrainedTokenizerBase`): With a chat template.
        tools ([`ToolSet`]): May be empty.
        end_ids (`Sequence[int]`): The tokens that end an answer, the usual one first.
        options (`dict`): Of the chat template.
    """

    def __init__(self, tokenizer: Any, tools: ToolSet, end_ids: Sequence[int], options: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._end_ids = list(end_ids)
        self._options = options
        self._reader = ResponseReader(tokenizer, end_ids)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """What the chat template is told of the tools."""
        return self._tools.schemas

    def view(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation as the chat template takes it."""
        return list(messages)

    def read(self, ids: list[int], prompt_ids: list[int]) -> tuple[str, Message, tuple[Call, ...], str | None]:
        """
        An answer's text, its turn, its calls, and what is wrong with them.

        Args:
            ids (`list[int]`): End token included.
            prompt_ids (`list[int]`): Before them.
        """
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        if getattr(self._tokenizer, "response_template", None) is None:
            message: Message = {"role": "assistant", "content": text}
        else:
            with self._reader.reading():
                message = parse_response(self._tokenizer, ids, prefix=prompt_ids, tools=self.schemas or None)
        return text, *self._settled(text, message)

    def _settled(self, text: str, message: Message) -> tuple[Message, tuple[Call, ...], str | None]:
        functions = [call["function"] for call in message.get("tool_calls") or []]
        calls = tuple(Call(function["name"], function["arguments"]) for function in functions)
        unread = next((call for call in calls if call.name == INVALID_CALL), None)
        if unread is not None:
            return {"role": "assistant", "content": text}, (), unread.arguments["error"]
        wrong = next((call for call in calls if not isinstance(call.arguments, dict)), None)
        if wrong is not None:
            error = f"The arguments of {wrong.name!r} must be one JSON object, got {wrong.arguments!r}."
            return {"role": "assistant", "content": text}, (), error
        return message, calls, self._tools.fault(calls)

    def message(self, answer: "str | Call | Sequence[Call]") -> Message:
        """The assistant's turn that says this."""
        calls = calls_of(answer)
        if not calls:
            return {"role": "assistant", "content": well_formed(answer) if isinstance(answer, str) else ""}
        return {"role": "assistant", "content": "", "tool_calls": [well_formed(call.function) for call in calls]}

    def write(self, messages: Sequence[Message], message: Message) -> list[int]:
        """
        The ids with which the model itself would say this turn, the end token included.

        Raises:
            `ValueError`: the chat template writes earlier turns differently once this one is there.
        """
        render = self._renderer()
        prompt = render(self.view(messages), add_generation_prompt=True)
        whole = render(self.view([*messages, message]), add_generation_prompt=False)
        if whole.startswith(prompt):
            rest = whole[len(prompt) :]
        else:
            base = render(self.view(messages), add_generation_prompt=False)
            if not whole.startswith(base):
                raise ValueError(
                    "The chat template writes earlier turns differently once the answer is there, so what the model "
                    "would have to say cannot be told from it. Give the answer as text."
                )
            rest = _behind(prompt[len(base) :], whole[len(base) :])
        return self._ended(self._tokenizer(rest, add_special_tokens=False)["input_ids"])

    def _ended(self, ids: list[int]) -> list[int]:
        """Up to and with the first end token, or with the usual one instead of the template's own marker."""
        place = next((i for i, token in enumerate(ids) if token in self._end_ids), None)
        if place is not None:
            return list(ids[: place + 1])
        special = set(self._tokenizer.all_special_ids)
        while ids and (ids[-1] in special or not self._tokenizer.decode([ids[-1]]).strip()):
            ids = ids[:-1]
        return [*ids, self._end_ids[0]]

    def text(self, messages: Sequence[Message], message: Message) -> str:
        """The turn as the model would write it, special tokens left out."""
        return self._tokenizer.decode(self.write(messages, message), skip_special_tokens=True)

    def _renderer(self) -> Callable[..., str]:
        def render(messages: list[Message], **options: Any) -> str:
            return self._tokenizer.apply_chat_template(
                messages, tools=self.schemas or None, tokenize=False, **options, **self._options
            )

        return render


def _behind(header: str, turn: str) -> str:
    """
    A turn without the header under which it is generated, which may say more (a thinking block that is empty). Tags
    that begin alike (`<think>`, `<tool_call>`) are not the same.
    """
    same = next((i for i, (a, b) in enumerate(zip(turn, header, strict=False)) if a != b), len(header))
    opened = turn.rfind("<", 0, same)
    return turn[opened:] if opened >= 0 and ">" not in turn[opened:same] else turn[same:]


class TextDialect(Dialect):
    """
    For chat templates that know nothing of tools: they are described in the system turn, a call is a JSON object
    between tags in the answer's text, and a tool's reply is a user turn.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        try:
            self._renderer()([{"role": "system", "content": "-"}, {"role": "user", "content": "-"}])
            self._has_system = True
        except TemplateError:
            self._has_system = False

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Nothing: the template would not show it."""
        return []

    def view(self, messages: Sequence[Message]) -> list[Message]:
        """See [`Dialect.view`]."""
        turns: list[Message] = []  # copies: some are changed below
        for turn in messages:
            if turn["role"] == "tool":
                told = f"[{turn.get('name', 'tool')} replied]\n{message_text(turn['content'])}"
                if turns and turns[-1].get("observed"):
                    turns[-1]["content"] += f"\n\n{told}"
                else:
                    turns.append({"role": "user", "content": told, "observed": True})
            elif turn.get("tool_calls"):
                turns.append({"role": "assistant", "content": self._text_of(turn)})
            else:
                turns.append(dict(turn))
        described = _INTRODUCTION + "\n".join(map(json.dumps, self._tools.schemas))
        if self._has_system:
            if turns[0]["role"] != "system":
                turns.insert(0, {"role": "system", "content": described})
            else:
                turns[0]["content"] = f"{message_text(turns[0]['content'])}\n\n{described}"
        else:  # what the system says stands before what the person says first
            systems = [message_text(turn["content"]) for turn in turns if turn["role"] == "system"]
            turns = [turn for turn in turns if turn["role"] != "system"]
            if not turns or turns[0]["role"] != "user":
                turns.insert(0, {"role": "user", "content": ""})
            turns[0]["content"] = "\n\n".join([*systems, described, message_text(turns[0]["content"])]).rstrip()
        return [{key: value for key, value in turn.items() if key != "observed"} for turn in turns]

    @staticmethod
    def _text_of(turn: Message) -> str:
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in turn["tool_calls"]]
        parts = [message_text(turn.get("content")), *(f"{_TAGS[0]}\n{call}\n{_TAGS[1]}" for call in calls)]
        return "\n".join(part for part in parts if part)

    def read(self, ids: list[int], prompt_ids: list[int]) -> tuple[str, Message, tuple[Call, ...], str | None]:
        """See [`Dialect.read`]."""
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        plain: Message = {"role": "assistant", "content": text}
        before, opened, _ = text.partition(_TAGS[0])
        if not opened:
            return text, plain, (), None
        try:
            bodies = re.findall(f"{_TAGS[0]}(.*?){_TAGS[1]}", text, flags=re.DOTALL)
            if not bodies or text.count(_TAGS[0]) != len(bodies):
                raise ValueError(f"there is a {_TAGS[0]} without its {_TAGS[1]}")
            calls = nested_calls([json.loads(body) for body in bodies])
        except (ValueError, RecursionError) as error:
            return text, plain, (), f"The tool call could not be read ({error}). Write one JSON object."
        return text, *self._settled(text, {"role": "assistant", "content": before.strip(), "tool_calls": calls})


def dialect_of(tokenizer: Any, tools: ToolSet, end_ids: Sequence[int], options: dict[str, Any]) -> Dialect:
    """
    The chat template's own way to call tools where it has one that can be read back, else calls in plain text.

    Raises:
        `ValueError`: the tokenizer has no chat template.
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            "A session is a conversation, and this tokenizer has no chat template. Take an instruction-tuned model, "
            "or set `tokenizer.chat_template`."
        )
    if not tools.functions:
        return Dialect(tokenizer, tools, end_ids, options)
    if supports_tool_calling(tokenizer):
        if getattr(tokenizer, "response_template", None) is not None:
            return Dialect(tokenizer, tools, end_ids, options)
        try:
            return Dialect(add_response_schema(tokenizer), tools, end_ids, options)
        except ValueError:  # a template that TRL does not know
            logger.info("Nothing can read back the tool calls of this chat template, so they are plain text.")
    return TextDialect(tokenizer, tools, end_ids, options)
