"""The agents' desk: three local tools, questions that need one to three calls, and models that learn to call them.

`weather` reads a table, `convert` knows scales and units, `calculate` runs a parsed expression. A question such as
`rome in F times 2` needs `weather`, then `convert`, then `calculate`, and its answer is what the last one replied; the
others need one call or two, in one turn or in several. Everything is deterministic. A tool that gets nonsense raises,
and the student reads why.

This module knows the tools, the questions, the tokenizer, the models and the warm start. It does not know the trainer.
"""

import ast
import operator
import random
import re
import string
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

SYSTEM = (
    "Use the tools for every value; never guess one. A question names a city (its temperature is asked for), perhaps "
    "a unit to convert it to, and perhaps something to calculate with the number; or it is a sum. Answer with what "
    "the last tool replied and nothing else."
)
MAX_COMPLETION_LENGTH = 110  # the longest right answer has 60 tokens, replies included
MAX_TOOL_CALLING_ITERATIONS = 5
POSITIONS = 512
CLEAR_REFS = Path("/proc/self/clear_refs")

# Options of both examples' trainers.
DEFAULTS = {
    "per_device_train_batch_size": 32, "per_device_eval_batch_size": 128, "num_generations_eval": 1,
    "max_completion_length": MAX_COMPLETION_LENGTH, "max_tool_calling_iterations": MAX_TOOL_CALLING_ITERATIONS,
    "gradient_checkpointing": False, "use_cpu": True, "bf16": False, "save_strategy": "no", "report_to": "none",
    "logging_steps": 1, "disable_tqdm": True,
}  # fmt: skip

CELSIUS = {
    "rome": 25, "oslo": 5, "cairo": 35, "lima": 20, "delhi": 40, "paris": 15, "quito": 10, "tunis": 30, "bern": 10,
    "accra": 35, "minsk": 5, "dakar": 30, "seoul": 15, "hanoi": 25, "sofia": 20, "doha": 40, "riga": 5, "kyoto": 15,
    "perth": 20, "malmo": 10,
}  # fmt: skip
# Each unit as `(dimension, factor, offset)` of the dimension's first: a value is `base * factor + offset`.
UNITS = {
    "C": ("temperature", Fraction(1), 0), "F": ("temperature", Fraction(9, 5), 32),
    "K": ("temperature", Fraction(1), 273), "R": ("temperature", Fraction(4, 5), 0),
    "h": ("time", Fraction(1), 0), "min": ("time", Fraction(60), 0), "s": ("time", Fraction(3600), 0),
}  # fmt: skip
SCALES = ("F", "K", "R")
OPERATIONS = {"+": "plus", "-": "minus", "*": "times"}
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def _number(value: Fraction) -> str:
    """As people write it: whole, or rounded to two decimals."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.2f}"


def weather(city: str) -> str:
    """
    Look up today's temperature.

    Args:
        city: The name of a city, in lower case.

    Returns:
        The temperature in degrees Celsius, for example `15C`.
    """
    if city not in CELSIUS:
        raise ValueError(f"no city {city}")
    return f"{CELSIUS[city]}C"


def convert(quantity: str, unit: str) -> str:
    """
    Convert a quantity to another unit.

    Args:
        quantity: A number and its unit, for example `15C` or `3h`.
        unit: The unit to convert to: C, F, K or R for temperatures; h, min or s for times.

    Returns:
        The quantity in that unit, for example `59F`.
    """
    match = re.fullmatch(r"(-?\d{1,9}(?:\.\d{1,9})?) ?([A-Za-z]+)", str(quantity))
    if match is None or match[2] not in UNITS:
        raise ValueError(f"no quantity {quantity}")
    dimension, factor, offset = UNITS[match[2]]
    if unit not in UNITS or UNITS[unit][0] != dimension:
        raise ValueError(f"no unit {unit}")
    base = (Fraction(match[1]) - offset) / factor
    return _number(base * UNITS[unit][1] + UNITS[unit][2]) + unit


def calculate(expression: str, then: str = "") -> str:
    """
    Calculate a value.

    Args:
        expression: Numbers, `+`, `-`, `*`, `/` and parentheses, for example `59*2`.
        then: What is done with the value, for example `*2` or `-4`.

    Returns:
        The value, for example `118`.
    """
    expression = f"({expression}){then}" if then else expression
    if len(expression) > 60:
        raise ValueError("too long")
    try:
        return _number(_value(ast.parse(expression, mode="eval").body))
    except (SyntaxError, ZeroDivisionError, RecursionError) as error:
        raise ValueError(f"no expression {expression}") from error


def _value(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return Fraction(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError(f"no number {ast.unparse(node)}")


TOOLS: list[Callable[..., str]] = [weather, convert, calculate]
BY_NAME = {tool.__name__: tool for tool in TOOLS}


@dataclass(frozen=True)
class Call:
    """A tool's name and its arguments."""

    name: str
    arguments: tuple[tuple[str, str], ...]

    def run(self) -> str:
        """What the student reads: the reply, or the error as TRL shows it."""
        try:
            return BY_NAME[self.name](**dict(self.arguments))
        except ValueError as error:
            return str({"error": str(error)})

    @property
    def message(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name, "arguments": dict(self.arguments)}}


def look_up(city: str) -> Call:
    return Call("weather", (("city", city),))


def to_unit(quantity: str, unit: str) -> Call:
    return Call("convert", (("quantity", quantity), ("unit", unit)))


def compute(expression: str, then: str = "") -> Call:
    return Call("calculate", (("expression", expression), *([("then", then)] if then else [])))


def number_of(quantity: str) -> str:
    """The digits of a quantity: `59` of `59F`."""
    return quantity.rstrip(string.ascii_letters)


@dataclass(frozen=True)
class Task:
    """A question and the calls that answer it, one tuple per turn; the answer is what the last call replied."""

    question: str
    kind: str
    turns: tuple[tuple[Call, ...], ...]
    answer: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "answer", self.turns[-1][-1].run())


def chain(city: str, unit: str, operation: str = "", question: str | None = None) -> Task:
    """A city's temperature in a unit, and, with an `operation` such as `*2`, what it makes of the number."""
    found = look_up(city)
    converted = to_unit(found.run(), unit)
    words = [city, "in", unit]
    turns = [(found,), (converted,)]
    if operation:
        words += [OPERATIONS[operation[0]], operation[1:]]
        turns.append((compute(number_of(converted.run()) + operation),))
    return Task(question or " ".join(words), "three steps" if operation else "two steps", tuple(turns))


def _both(one: str, other: str) -> Task:
    calls = look_up(one), look_up(other)
    total = compute("+".join(number_of(call.run()) for call in calls))
    return Task(f"{one} plus {other}", "two calls at once", (calls, (total,)))


def all_tasks() -> list[Task]:
    """Every question of the five kinds, 1,700 or so."""
    cities = list(CELSIUS)
    tasks = [Task(city, "one step", ((look_up(city),),)) for city in cities]
    tasks += [chain(city, unit) for city in cities for unit in SCALES]
    operations = [*(f"+{n}" for n in range(1, 10)), *(f"-{n}" for n in range(1, 5)), "*2", "*3"]
    tasks += [chain(city, unit, operation) for city in cities for unit in SCALES for operation in operations]
    tasks += [_both(one, other) for one in cities for other in cities if one != other]
    for a in range(11, 20):
        for b in range(2, 10):
            tasks.append(Task(f"{a} times {b}", "one step", ((compute(f"{a}*{b}"),),)))
    tasks += [
        Task(f"{n}h in {unit}", "one step", ((to_unit(f"{n}h", unit),),))
        for n in range(1, 10)
        for unit in ("min", "s")
    ]
    return tasks


KINDS = ("one step", "two steps", "three steps", "two calls at once")


def split(tasks: Sequence[Task], held_out: int, rng: random.Random) -> tuple[list[Task], list[Task]]:
    """`(rest, held out)`: as many of each kind, `held_out` in all."""
    chosen: list[Task] = []
    for kind in KINDS:
        chosen += rng.sample([task for task in tasks if task.kind == kind], held_out // len(KINDS))
    questions = {task.question for task in chosen}
    return [task for task in tasks if task.question not in questions], chosen


def is_right(completion: Sequence[dict[str, Any]], answer: str) -> bool:
    """Whether a rollout ends in the answer; a unit may be left out or stand behind a space, the number not."""
    last = completion[-1] if completion else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return False
    text = (last.get("content") or "").strip().replace(" ", "")
    return text in (answer, number_of(answer))


def right_answer(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    """The reward: 1 if the rollout ends in the answer."""
    return [float(is_right(*row)) for row in zip(completions, answer, strict=True)]


# Conversations


@dataclass
class Conversation:
    """Messages, and which of the assistant's turns are slips, which nothing is learned from."""

    messages: list[dict[str, Any]]
    slips: set[int] = field(default_factory=set)
    turns: int = 0

    def say(self, calls: Sequence[Call] = (), text: str = "", slip: bool = False) -> str:
        """One turn of the assistant and the replies to it; returns the last reply."""
        calls_said = {"tool_calls": [call.message for call in calls]} if calls else {}
        self.messages.append({"role": "assistant", "content": text, **calls_said})
        self.slips |= {self.turns} if slip else set()
        self.turns += 1
        replies = [call.run() for call in calls]
        self.messages += [
            {"role": "tool", "name": call.name, "content": reply} for call, reply in zip(calls, replies, strict=True)
        ]
        return replies[-1] if replies else text


def wrong_call(rng: random.Random, seen: str) -> Call:
    """A call that somebody might make by mistake, on the quantity `seen` last."""
    quantity = seen if re.fullmatch(r"\d+[A-Za-z]+", seen) else f"{rng.randint(1, 40)}C"
    return rng.choice(
        [
            look_up(rng.choice(list(CELSIUS))),
            look_up(rng.choice(list(UNITS))),
            to_unit(quantity, rng.choice([*UNITS, *CELSIUS])),
            to_unit(number_of(quantity), rng.choice(list(UNITS))),
            compute(f"{number_of(quantity)}{rng.choice(list(OPERATIONS))}{rng.randint(1, 9)}"),
            compute(quantity),
        ]
    )


def solved(task: Task, rng: random.Random, slip_rate: float = 0.0) -> Conversation:
    """A question answered; with a `slip_rate`, wrong calls on the way, each of which is got over."""
    conversation = Conversation([{"role": "user", "content": task.question}])
    seen = ""
    for calls in task.turns:
        while rng.random() < slip_rate:
            conversation.say([wrong_call(rng, seen)], slip=True)
        seen = conversation.say(calls)
    conversation.say(text=task.answer)
    return conversation


def careless(task: Task, rng: random.Random) -> Conversation:
    """A question answered by somebody who leaves out the later steps, or takes any unit, about as often as not."""
    conversation = Conversation([{"role": "user", "content": task.question}])
    seen = ""
    for turn, calls in enumerate(task.turns):
        if turn and rng.random() < 0.5:
            break
        if turn and calls[0].name == "convert" and rng.random() < 0.5:
            calls = (to_unit(seen, rng.choice(SCALES)),)
        elif calls[0].name == "calculate" and task.kind == "three steps":
            calls = (compute(number_of(seen) + re.search(r"[-+*]\d$", dict(calls[0].arguments)["expression"])[0]),)
        seen = conversation.say(calls)
    conversation.say(text=seen)
    return conversation


# Tokenizer and models

PAD, EOS = "<pad>", "<eos>"
ROLES = ["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
# What a call is made of besides its words, a token each, so that a call is short.
CALL_PARTS = ['<tool_call>{"name": "', '", "arguments": {"', '": "', '", "', '"}}</tool_call>', "{'error': '", "'}"]
WORDS = [
    *BY_NAME, "city", "quantity", "unit", "expression", *CELSIUS, *UNITS, *OPERATIONS.values(), "in", "no", "wrong",
    "tool", "missing", "step",
]  # fmt: skip
CHAT_TEMPLATE = (
    "{% if tools %}<|system|>{% for t in tools %}{{ t['function']['name'] }}{{ ' ' if not loop.last }}{% endfor %}"
    "{% endif %}{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}{% for c in m['tool_calls'] or [] %}<tool_call>{\"name\": \"{{ c['function']['name'] }}\", "
    "\"arguments\": {{ c['function']['arguments'] | tojson }}}</tool_call>{% endfor %}<eos>{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": EOS, "content": "text"},
    },
}  # fmt: skip


def build_tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A token per known word, part of a call, digit and other character; pads on the left."""
    whole = [*CALL_PARTS, *WORDS, *words]
    characters = [c for c in string.printable if c not in "\r\x0b\x0c"]
    vocabulary = {t: i for i, t in enumerate(dict.fromkeys([PAD, EOS, "<unk>", *ROLES, *whole, *characters]))}
    longest_first = sorted(whole, key=len, reverse=True)
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    pattern = "|".join([*(re.escape(token) for token in longest_first), r"[\s\S]"])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, unk_token="<unk>", additional_special_tokens=ROLES,
        padding_side="left", model_max_length=POSITIONS, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def build_model(
    tokenizer: PreTrainedTokenizerBase, seed: int, hidden_size: int, num_layers: int = 2, spread: float = 0.02
) -> LlamaForCausalLM:
    """A Llama with random weights of the standard deviation `spread`, in float32."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden_size, intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=POSITIONS,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa", initializer_range=spread,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def encode(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Conversation], chat_template: str | None = None
) -> list[tuple[list[int], list[int]]]:
    """Token ids and labels of each conversation; labels are -100 outside the assistant's turns, and in slips."""
    rows = []
    for conversation in conversations:
        encoded = tokenizer.apply_chat_template(
            conversation.messages,
            tools=TOOLS,
            return_dict=True,
            return_assistant_tokens_mask=True,
            chat_template=chat_template,
        )
        turn, before, labels = -1, 0, []
        for token, own in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True):
            turn += own and not before
            before = own
            labels.append(token if own and turn not in conversation.slips else -100)
        rows.append((encoded["input_ids"], labels))
    return rows


def learned(labels: Sequence[int]) -> int:
    """How many tokens of a row are learned."""
    return sum(label != -100 for label in labels)


def pad_right(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[tuple[list[int], list[int]]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, both `(rows, longest)`; causal attention never looks at padding on the right."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _ in rows])
    return ids, torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows])


def warm_start(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    seed: int,
    *,
    steps: int,
    batch_size: int = 32,
    learning_rate: float = 3e-3,
) -> None:
    """Teach the model, in place, to go on as the assistant does in these conversations."""
    rows = encode(tokenizer, conversations)
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=steps, pct_start=0.1, cycle_momentum=False
    )
    model.train()
    progress = tqdm(range(steps), desc="warm start", disable=None)
    for _ in progress:
        batch = sorted(rng.sample(rows, batch_size), key=lambda row: len(row[0]))
        total = sum(learned(labels) for _, labels in batch)
        loss_sum = 0.0
        for part in (batch[: batch_size // 2], batch[batch_size // 2 :]):  # short and long rows apart: less padding
            ids, labels = pad_right(tokenizer, part)
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / total
            loss.backward()
            loss_sum += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        progress.set_postfix(loss=f"{loss_sum:.3f}", refresh=False)


@torch.no_grad()
def success_rate(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, talks: Sequence[Conversation]) -> float:
    """The mean probability, exactly, that the model says all that the assistant says in these conversations."""
    ids, labels = pad_right(tokenizer, encode(tokenizer, talks))
    logits = model(input_ids=ids.to(model.device), use_cache=False).logits[:, :-1].float().cpu()
    losses = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")  # (rows, longest - 1)
    return losses.sum(1).neg().exp().mean().item()


# Measuring


def summary(metrics: dict[str, float]) -> dict[str, float]:
    """What `SDPOTrainer.evaluate()` says about rollouts with tools, as the examples' tables show it."""
    calls, failures = metrics["eval_sdpo/tool_calls"], metrics["eval_sdpo/tool_failures"]
    return {
        "accuracy": round(metrics["eval_reward"], 4),
        "good_calls": round((calls - failures) / calls, 4) if calls else 0.0,
        "truncated": round(metrics["eval_sdpo/truncated_share"], 4),
        "turns": round(metrics["eval_sdpo/turns"], 2),
        "tokens": round(metrics["eval_sdpo/assistant_tokens"], 2),
    }


class Phase:
    """The seconds of a part of the program, and its peak of resident memory in MiB where Linux counts it anew."""

    seconds = 0.0
    peak_mib: int | None = None

    def __enter__(self) -> "Phase":
        self._start = time.perf_counter()
        if CLEAR_REFS.exists():
            CLEAR_REFS.write_text("5")
        return self

    def __exit__(self, *exc: object) -> None:
        self.seconds = round(time.perf_counter() - self._start, 1)
        if CLEAR_REFS.exists():
            self.peak_mib = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) // 1024


COLUMNS = {
    "accuracy": "final answers right", "good_calls": "tool calls that succeeded", "truncated": "truncated",
    "known": "known words", "told": "when told", "tokens_trained": "tokens trained", "seconds": "s", "peak_mib": "MiB",
}  # fmt: skip


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) and value <= 1 else f"{value:,.0f}"


def markdown(table: dict[str, dict[str, Any]]) -> str:
    """One row per model; a column where any model has a value for it."""
    names = [name for name in COLUMNS if any(row.get(name) is not None for row in table.values())]
    lines = ["| | " + " | ".join(COLUMNS[name] for name in names) + " |", "| --- " * (len(names) + 1) + "|"]
    for title, row in table.items():
        cells = [_cell(row.get(name)) for name in names]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
