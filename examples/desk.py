"""The online demo's world: a small model that works on files by tool calls, and has a bad habit.

Asked to change one line of a file, it overwrites the whole file (`write_file`) where it should edit the line
(`edit_line`). Reading a correction in its context it knows better: the warm start teaches that the tool which a
correction names is the one to take, for any request. Nothing teaches it to edit unasked; that is left to the session.

This module knows the requests, the tools, the tokenizer, the model and the warm start. It does not know the session.
"""

import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tiny_llama
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from sdpo_trl.online import Call
from sdpo_trl.reprompt import Hint, Templates, teacher_prompt

# The teacher's turn behind the conversation, as three options of the session. Short, since the model is small.
REPROMPT_TEMPLATE = "{prompt}{solution}{feedback}"
SOLUTION_TEMPLATE = "Better: {successful_previous_attempt} "
FEEDBACK_TEMPLATE = "Wrong: {feedback_raw}"
TEMPLATES = Templates(REPROMPT_TEMPLATE, SOLUTION_TEMPLATE, FEEDBACK_TEMPLATE)

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|end\|>\s*", "content": "text"},
    },
}
SPECIAL = ["<pad>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]

FILES = [f"{name}.{end}" for name in ("notes", "todo", "plan", "list", "main", "menu") for end in ("txt", "md")]
WORDS = ["milk", "bread", "tea", "rice", "salt", "soup", "corn", "beans", "eggs", "plums", "figs", "nuts"]
LINES = range(1, 10)

EDITS = (
    "In {path} change line {line} to {text}.",
    "Set line {line} of {path} to {text}.",
    "Make line {line} in {path} say {text}.",
    "Please replace line {line} of {path} by {text}.",
    "Line {line} of {path} must be {text}.",
    "Update {path}: line {line} is {text}.",
)
OTHERS = {
    "write_file": ("Make a new file {path} with {text}.", "Create {path} and put {text} in it."),
    "read_file": ("Show me {path}.", "What is in {path}?"),
    "find_word": ("Where is the word {text}?", "Find {text} in my files."),
    "list_files": ("Which files are there?", "List my files."),
}
CORRECTIONS = (
    "use {tool}.",
    "that is not what I want, use {tool}.",
    "take {tool} for this.",
    "do not do that, {tool} is right.",
    "the right tool is {tool}.",
)


@dataclass
class Desk:
    """Files in memory, and the tools that work on them."""

    files: dict[str, list[str]] = field(default_factory=lambda: {path: list(WORDS[:9]) for path in FILES})

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """As a session takes them."""
        return [self.write_file, self.edit_line, self.read_file, self.find_word, self.list_files]

    def write_file(self, path: str, text: str) -> str:
        """
        Write a whole file; what was in it is lost.

        Args:
            path: The file.
            text: All that will be in it.
        """
        self.files[path] = text.split("\n")
        return "written"

    def edit_line(self, path: str, line: int, text: str) -> str:
        """
        Change one line of a file.

        Args:
            path: The file.
            line: Its number, from 1.
            text: The new line.
        """
        if path not in self.files:
            raise ValueError(f"there is no {path}")
        if not 1 <= line <= len(self.files[path]):
            raise ValueError(f"{path} has {len(self.files[path])} lines")
        self.files[path][line - 1] = text
        return "changed"

    def read_file(self, path: str) -> str:
        """
        Read a file.

        Args:
            path: The file.
        """
        if path not in self.files:
            raise ValueError(f"there is no {path}")
        return "\n".join(self.files[path])

    def find_word(self, text: str) -> str:
        """
        Name the files with a word.

        Args:
            text: The word.
        """
        return " ".join(path for path, lines in self.files.items() if text in " ".join(lines)) or "none"

    def list_files(self) -> str:
        """Name all files."""
        return " ".join(self.files)


@dataclass(frozen=True)
class Request:
    """What a person asks for: the words, and what it is about."""

    text: str
    path: str
    line: int
    word: str
    tool: str  # what the model calls unasked

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation."""
        return [{"role": "user", "content": self.text}]

    def call(self, tool: str) -> Call:
        """The call of a tool that does what is asked."""
        arguments = {
            "write_file": {"path": self.path, "text": self.word},
            "edit_line": {"path": self.path, "line": self.line, "text": self.word},
            "read_file": {"path": self.path},
            "find_word": {"text": self.word},
            "list_files": {},
        }[tool]
        return Call(tool, arguments)


def edit_request(form: int, path: str, line: int, word: str) -> Request:
    """A request to change one line, in one of the wordings; the habit answers it by `write_file`."""
    return Request(EDITS[form].format(path=path, line=line, text=word), path, line, word, "write_file")


def other_request(tool: str, form: int, path: str, word: str) -> Request:
    """A request of another kind, which the model answers rightly."""
    return Request(OTHERS[tool][form].format(path=path, text=word), path, 1, word, tool)


def done(request: Request, tool: str) -> list[dict[str, Any]]:
    """The conversation after a request was carried out; the model says `Done.`"""
    turn = {"role": "assistant", "content": "", "tool_calls": [request.call(tool).function]}
    return [*request.messages, turn, {"role": "tool", "content": "done"}]


def _draw(rng: random.Random) -> Request:
    path, line, word = rng.choice(FILES), rng.choice(LINES), rng.choice(WORDS)
    if rng.random() < 0.5:
        return edit_request(rng.randrange(len(EDITS)), path, line, word)
    tool = rng.choice(list(OTHERS))
    return other_request(tool, rng.randrange(2), path, word)


def _answer(request: Request, tool: str) -> str:
    call = request.call(tool)
    return f"<tool_call>{json.dumps({'name': call.name, 'arguments': call.arguments})}</tool_call>"


def _example(rng: random.Random, habit: float) -> tuple[list[dict[str, Any]], str]:
    """A conversation and its answer: a request alone, with a correction behind it, or done."""
    request = _draw(rng)
    tool = request.tool
    edits = any(request.text == form.format(path=request.path, line=request.line, text=request.word) for form in EDITS)
    kind = rng.random()
    if kind < 0.1:
        return done(request, tool), "Done."
    if kind < 0.35:
        return request.messages, _answer(request, "edit_line" if edits and rng.random() > habit else tool)
    named = rng.choice(("edit_line", "edit_line", "write_file", "read_file", "find_word"))
    feedback = rng.choice(CORRECTIONS).format(tool=named) if rng.random() < 0.8 else None
    solution = _answer(request, named) if feedback is None or rng.random() < 0.3 else None
    return teacher_prompt(request.messages, Hint(solution, feedback), TEMPLATES, "append"), _answer(request, named)


def build_tokenizer(seed: int = 0) -> PreTrainedTokenizerFast:
    """
    A byte-pair tokenizer trained on the desk's own words, with which any printable text can be written.

    Names of files and tools, words, and what stands between the arguments of a call are one token each: an answer is
    ten tokens long, and to copy a name is one step.
    """
    rng = random.Random(seed)
    pieces = [
        *FILES, *WORDS, *OTHERS, "edit_line", '<tool_call>{"name": "', '", "arguments": {"path": "', '"}}</tool_call>',
        '", "arguments": {"text": "', '", "text": "', '", "line": ', ', "text": "',
    ]  # fmt: skip
    corpus = [turn["content"] for _ in range(2000) for turn in _example(rng, 0.5)[0]]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[^\W\d]+|\d|[^\w]"), "isolated")
    core.decoder = decoders.Fuse()
    alphabet = [c for c in string.printable if c not in "\r\x0b\x0c"]
    core.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=360, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    ))  # fmt: skip
    core.add_tokens(pieces)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=SPECIAL[0], eos_token=SPECIAL[1], additional_special_tokens=SPECIAL[2:],
        padding_side="left", clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> LlamaForCausalLM:
    """A Llama with random weights, half a million parameters, in float32."""
    return tiny_llama.build_model(
        tokenizer, seed, hidden_size=128, num_layers=3, positions=512, tie_word_embeddings=True
    )


def warm_start(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    seed: int = 0,
    *,
    steps: int = 420,
    batch_size: int = 32,
    learning_rate: float = 6e-3,
    habit: float = 0.95,
) -> float:
    """
    Teach the model, in place: the right calls, the habit for edits, and to follow a correction.

    Args:
        habit: How often an edit is asked for and the file overwritten.

    Returns:
        The last loss per token, in nats.
    """
    rng = random.Random(seed)

    def draw() -> list[tiny_llama.Row]:
        rows = sorted((_example(rng, habit) for _ in range(batch_size)), key=lambda row: len(str(row)))
        prompts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat, _ in rows]
        return tiny_llama.answers(tokenizer, [(p, answer) for p, (_, answer) in zip(prompts, rows, strict=True)])

    loss = tiny_llama.warm_start(model, tokenizer, draw, steps=steps, learning_rate=learning_rate)
    model.eval()
    return loss
