"""House words: questions that only the environment's remarks explain, and the environment that makes them.

`rome brol zif` asks for the temperature in Rome, in the unit that `brol` stands for, and for what `zif` makes of it.
Known words are taught by the warm start, new ones mean nothing to the model.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import agent_desk as desk
import agent_model
import agent_tools

HOUSE_WORDS = [
    "brol", "zif", "tarn", "mave", "quop", "lidd", "fenk", "sorp", "jatt", "wumm", "gryl", "pell", "noss", "dakk",
    "ruvv", "yimm", "oxta", "bemm",
]  # fmt: skip
UNITS = ("F", "K", "R")
OPERATIONS = ("+3", "+8", "-2", "-4", "*2", "*3")


def build_tokenizer():
    """The desk's, with a token for each house word and for each operation."""
    return agent_model.build_tokenizer([*HOUSE_WORDS, *OPERATIONS, "then"])


def build_model(tokenizer, seed: int):
    """A small Llama. Smaller random weights take longer to learn to look things up, larger ones learned less then."""
    return agent_model.build_model(tokenizer, seed, spread=0.04)


@dataclass(frozen=True)
class House:
    """What the words stand for: three for units and six for operations, in the order of `UNITS` and `OPERATIONS`."""

    units: tuple[str, ...]
    operations: tuple[str, ...]

    def question(self, city: str, unit: str, operation: str) -> str:
        return f"{city} {self.units[UNITS.index(unit)]} {self.operations[OPERATIONS.index(operation)]}"


def houses(seed: int) -> tuple[House, House]:
    """The known words and the new ones, dealt at random."""
    words = random.Random(seed).sample(HOUSE_WORDS, 18)
    return House(tuple(words[:3]), tuple(words[3:9])), House(tuple(words[9:12]), tuple(words[12:]))


@dataclass(frozen=True)
class Order:
    """What a question asks for: a city's temperature in a unit, and an operation on it."""

    city: str
    unit: str
    operation: str

    def step(self, turn: int) -> str | None:
        """What is to be done in a turn, as the environment says it; `None` when only the answer is left."""
        steps = ("weather", f"convert {self.unit}", f"calculate {self.operation}")
        return steps[turn] if turn < len(steps) else None

    def call(self, turn: int, seen: str) -> agent_tools.Call:
        """The call of a turn, after the reply `seen`."""
        if turn == 0:
            return agent_tools.look_up(self.city)
        if turn == 1:
            return agent_tools.to_unit(seen, self.unit)
        return agent_tools.compute(agent_tools.number_of(seen), self.operation)

    def remark(self, turn: int, calls: list[dict[str, Any]]) -> str | None:
        """What the environment says of a turn with these calls; `None` once all steps are over."""
        step = self.step(turn)
        if step is None:
            return None
        if not calls:
            return f"missing step: {step}"
        name, arguments = calls[0]["function"]["name"], calls[0]["function"]["arguments"]
        if len(calls) > 1 or name != step.split()[0] or not isinstance(arguments, dict):
            return f"wrong tool: {step}"
        if name == "convert" and arguments.get("unit") != self.unit:
            return f"wrong unit: {self.unit}"
        done = f"{arguments.get('expression')}{arguments.get('then') or ''}"
        wrong_city = name == "weather" and arguments.get("city") != self.city
        wrong_operation = name == "calculate" and not done.endswith(self.operation)
        return f"{'wrong' if wrong_city or wrong_operation else 'right'} step: {step}"


ORDERS = [Order(city, unit, operation) for city in agent_tools.CELSIUS for unit in UNITS for operation in OPERATIONS]


def review(order: Order, completion: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """`(turn, text)` for each turn of a rollout that had a step to do: what was wrong with it, or that it is right."""
    said = [message.get("tool_calls") or [] for message in completion if message["role"] == "assistant"]
    remarks = [(turn, order.remark(turn, calls)) for turn, calls in enumerate(said)]
    return [(turn, text) for turn, text in remarks if text is not None]


class HouseDesk:
    """The tools, and what the desk says of how they were used, once the rollout is over."""

    def reset(self, city: str, unit: str, operation: str, **row: Any) -> None:
        self.order = Order(city, unit, operation)
        self.feedback: list[tuple[int, str]] | None = None

    def weather(self, city: str) -> str:
        """
        Look up today's temperature.

        Args:
            city: The name of a city, in lower case.

        Returns:
            The temperature in degrees Celsius, for example `15C`.
        """
        return agent_tools.weather(city)

    def convert(self, quantity: str, unit: str) -> str:
        """
        Convert a quantity to another unit.

        Args:
            quantity: A number and its unit, for example `15C`.
            unit: The unit to convert to.

        Returns:
            The quantity in that unit, for example `59F`.
        """
        return agent_tools.convert(quantity, unit)

    def calculate(self, expression: str, then: str = "") -> str:
        """
        Calculate a value.

        Args:
            expression: Numbers, `+`, `-`, `*`, `/` and parentheses, for example `59*2`.
            then: What is done with the value, for example `*2` or `-4`.

        Returns:
            The value, for example `118`.
        """
        return agent_tools.calculate(expression, then)


def right_answer(completions, environments, answer, **columns) -> list[float]:
    """The reward: 1 for the right answer. The rollout is over, so its environment now says what it saw."""
    for completion, environment in zip(completions, environments, strict=True):
        environment.feedback = review(environment.order, completion)
    return desk.right_answer(completions, answer)


def conversation(
    order: Order, question: str, rng: random.Random, told: Sequence[float] = (0.0, 0.0, 0.0), slips: float = 0.0
) -> desk.Conversation:
    """
    An order carried out, each turn after a line of the environment's with the probability `told[turn]`; with the
    probability `slips`, a wrong call takes the place of a later one, and the next turn goes on from there.
    """
    talk = desk.Conversation([{"role": "user", "content": question}])
    seen = ""
    for turn in range(3):
        if rng.random() < told[turn]:
            step = order.step(turn)
            kind = rng.choice(
                ["right step", "wrong tool", "missing step", "wrong unit" if turn == 1 else "wrong step"]
            )
            line = f"{kind}: {order.unit if kind == 'wrong unit' else step}"
            if turn == 0:
                talk.messages[0]["content"] += f"; {line}"
            else:
                talk.messages.append({"role": "user", "content": line})
        slip = turn > 0 and rng.random() < slips
        reply = talk.say([desk.wrong_call(rng, seen) if slip else order.call(turn, seen)], slip=slip)
        seen = seen if "error" in reply else reply
    talk.say(text=seen)
    return talk


def warm_start_talks(house: tuple[House, House], count: int, rng: random.Random) -> list[desk.Conversation]:
    """
    Orders in known and new words, drawn apart; a quarter of the turns that follow a known word, and three quarters of
    those that follow a new one, come after a line of the environment's.

    A known word has its meaning, a new one any, so that nothing can be learned about it.
    """
    talks = []
    for _ in range(count):
        order = rng.choice(ORDERS)
        first, second = rng.choice(house), rng.choice(house)
        unit, operation = first.units[UNITS.index(order.unit)], second.operations[OPERATIONS.index(order.operation)]
        if first is house[1]:
            unit = rng.choice(first.units)
        if second is house[1]:
            operation = rng.choice(second.operations)
        told = (0.1, *(0.75 if words is house[1] else 0.25 for words in (first, second)))
        talks.append(conversation(order, f"{order.city} {unit} {operation}", rng, told, slips=0.15))
    return talks
