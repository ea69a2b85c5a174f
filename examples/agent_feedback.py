"""An agent that teaches itself: its environment says what was wrong with a turn, and there is no other teacher.

    python examples/agent_feedback.py --seed 0

Offline, two CPU cores, minutes. At this desk (`agent_desk.py`) people use house words: `rome brol zif` asks for the
temperature in Rome, in the unit that `brol` stands for, and for what `zif` makes of it. The warm start teaches a small
Llama the tools, the meaning of nine *known* words, and to do what it is told in the middle of a conversation; the nine
*new* words mean nothing to it. Then it acts, and its environment looks at every turn: `wrong unit: K`,
`wrong tool: convert K`, `missing step: calculate *2`. SDPO re-reads each such turn with that line in front of it
(`(turn, text)` feedback) and distils what the same model would then have done. A third of the questions are in known
words, so that what these mean is not forgotten. GRPO gets the same questions, number of rollouts and rewards, and does
not see the lines. Writes `results.json` to `--output_dir` and prints a table.
"""

import copy
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything of Hugging Face is imported; nothing is fetched
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import agent_desk as desk
import torch
from datasets import Dataset
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer, TrlParser

from sdpo_trl import SDPOConfig, SDPOTrainer

DEFAULTS = {
    **desk.DEFAULTS,
    "per_device_eval_batch_size": 72,  # a divisor of the questions, or the mean over batches is not their mean
    "output_dir": "runs/agent_feedback",
    "teacher_model_kind": "base",
    "distillation_alpha": 0.0,
    "distillation_span": "hinted_turn",
    "use_successful_as_teacher": False,
    "reprompt_template": "{prompt}{solution}{feedback}",
    "feedback_template": "; {feedback_raw}",
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 64,
    "max_steps": 60,
    "num_generations": 1,  # feedback needs no group, and more different questions teach more
    "lr_scheduler_type": "linear",
    "warmup_steps": 5,
}
HOUSE_WORDS = [
    "brol", "zif", "tarn", "mave", "quop", "lidd", "fenk", "sorp", "jatt", "wumm", "gryl", "pell", "noss", "dakk",
    "ruvv", "yimm", "oxta", "bemm",
]  # fmt: skip
UNITS = ("F", "K", "R")
OPERATIONS = ("+3", "+8", "-2", "-4", "*2", "*3")


def build_tokenizer():
    """The desk's, with a token for each house word and for each operation."""
    return desk.build_tokenizer([*HOUSE_WORDS, *OPERATIONS, "then"])


def build_model(tokenizer, seed: int):
    """A small Llama; with smaller random weights it takes longer to learn to look things up."""
    return desk.build_model(tokenizer, seed, 96, spread=0.1)


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

    def call(self, turn: int, seen: str) -> desk.Call:
        """The call of a turn, after the reply `seen`."""
        if turn == 0:
            return desk.look_up(self.city)
        if turn == 1:
            return desk.to_unit(seen, self.unit)
        return desk.compute(desk.number_of(seen), self.operation)

    def wrong(self, turn: int, calls: list[dict[str, Any]]) -> str | None:
        """What the environment says of a turn with these calls; `None` if nothing is wrong with it."""
        step = self.step(turn)
        if step is None:
            return None
        if not calls:
            return f"missing step: {step}"
        name, arguments = calls[0]["function"]["name"], calls[0]["function"]["arguments"]
        if len(calls) > 1 or name != step.split()[0] or not isinstance(arguments, dict):
            return f"wrong tool: {step}"
        if name == "weather" and arguments.get("city") != self.city:
            return f"wrong step: {step}"
        if name == "convert" and arguments.get("unit") != self.unit:
            return f"wrong unit: {self.unit}"
        done = f"{arguments.get('expression')}{arguments.get('then') or ''}"
        if name == "calculate" and not done.endswith(self.operation):
            return f"wrong step: {step}"
        return None


ORDERS = [Order(city, unit, operation) for city in desk.CELSIUS for unit in UNITS for operation in OPERATIONS]


def review(order: Order, completion: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """`(turn, text)` for each turn of a rollout with something wrong in it."""
    said = [message.get("tool_calls") or [] for message in completion if message["role"] == "assistant"]
    remarks = [(turn, order.wrong(turn, calls)) for turn, calls in enumerate(said)]
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
        return desk.weather(city)

    def convert(self, quantity: str, unit: str) -> str:
        """
        Convert a quantity to another unit.

        Args:
            quantity: A number and its unit, for example `15C`.
            unit: The unit to convert to.

        Returns:
            The quantity in that unit, for example `59F`.
        """
        return desk.convert(quantity, unit)

    def calculate(self, expression: str, then: str = "") -> str:
        """
        Calculate a value.

        Args:
            expression: Numbers, `+`, `-`, `*`, `/` and parentheses, for example `59*2`.
            then: What is done with the value, for example `*2` or `-4`.

        Returns:
            The value, for example `118`.
        """
        return desk.calculate(expression, then)


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
            kind = rng.choice(["wrong tool", "missing step", "wrong unit" if turn == 1 else "wrong step"])
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


@dataclass
class FeedbackArguments:
    held_out: int = field(default=72, metadata={"help": "Questions that are only asked at the end."})
    validation: int = field(default=72, metadata={"help": "Further questions, which choose between learning rates."})
    known_share: float = field(
        default=0.5, metadata={"help": "Questions in known words among those trained on, per question in new words."}
    )
    warm_steps: int = field(default=400, metadata={"help": "Optimizer steps of the warm start."})
    samples: int = field(default=2, metadata={"help": "Answers to each held-out question."})
    grpo_learning_rates: list[float] = field(
        default_factory=lambda: [1e-3, 5e-4], metadata={"help": "GRPO is run with each; the better one counts."}
    )

    def __post_init__(self) -> None:
        if not 0 <= self.known_share <= 1:
            raise ValueError(f"`known_share` must be in [0, 1], got {self.known_share}.")


def rows_of(orders: list[Order], words: House) -> Dataset:
    """The questions, each with the columns that the environment and the reward read."""
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": words.question(order.city, order.unit, order.operation)}],
                "city": order.city,
                "unit": order.unit,
                "operation": order.operation,
                "answer": desk.chain(order.city, order.unit, order.operation).answer,
            }
            for order in orders
        ]
    )


def make(trainer_class, model, tokenizer, args, rows: Dataset):
    trainer = trainer_class(
        model, right_answer, args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer,
        environment_factory=HouseDesk,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)  # the table says it
    return trainer


def grpo_config(args: SDPOConfig, learning_rate: float) -> GRPOConfig:
    """The same run for GRPO, which needs groups: eight answers to a question, as many in all."""
    shared = {f.name: getattr(args, f.name) for f in fields(GRPOConfig) if f.init}
    changed = {
        "learning_rate": learning_rate,
        "num_generations": max(args.num_generations, 8),
        "generation_batch_size": None,
    }
    return GRPOConfig(**shared | changed)


def ask(model, tokenizer, args: SDPOConfig, rows: Dataset) -> dict[str, float]:
    """Let a model answer, through the trainer's own loop, at the sampling temperature of the training."""
    metrics = make(SDPOTrainer, model, tokenizer, copy.copy(args), rows).evaluate()
    return desk.summary(metrics)


def run(trainer_class, model, tokenizer, args, rows: Dataset) -> tuple[Any, dict[str, float]]:
    trainer = make(trainer_class, copy.deepcopy(model), tokenizer, args, rows)
    with desk.Phase() as phase:
        trainer.train()
    return trainer.model, {"seconds": phase.seconds, "peak_mib": phase.peak_mib}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    start = time.perf_counter()
    torch.set_num_threads(1)  # so small a model gains little from more, and loses much where cores are shared
    parser = TrlParser((FeedbackArguments, SDPOConfig))
    parser.set_defaults(**DEFAULTS)
    options, args = parser.parse_args_and_config(argv)
    rng = random.Random(args.seed)
    known, new = house = houses(args.seed)
    orders = rng.sample(ORDERS, len(ORDERS))
    held_out, orders = orders[: options.held_out], orders[options.held_out :]
    validation, trained_on = orders[: options.validation], orders[options.validation :]
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, args.seed)
    talks = warm_start_talks(house, min(4000, 32 * options.warm_steps), rng)
    desk.warm_start(model, tokenizer, talks, args.seed, steps=options.warm_steps)
    warm = round(time.perf_counter() - start, 1)

    def measured(trained: Any, costs: dict[str, Any]) -> dict[str, Any]:
        told = [conversation(o, new.question(o.city, o.unit, o.operation), rng, (1.0,) * 3) for o in held_out]
        report = ask(trained, tokenizer, args, rows_of(held_out * options.samples, new))
        report["known"] = ask(trained, tokenizer, args, rows_of(held_out, known))["accuracy"]
        report["told"] = round(desk.success_rate(trained, tokenizer, told), 4)
        return {**report, **costs}

    table = {"before": measured(copy.deepcopy(model), {})}
    practised = rng.sample(trained_on, round(options.known_share * len(trained_on)))
    rows = Dataset.from_list([*rows_of(trained_on, new), *rows_of(practised, known)])
    trained, costs = run(SDPOTrainer, model, tokenizer, args, rows)
    trained.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    table["SDPO, own feedback"] = measured(trained, costs)
    grpo = {}
    for rate in options.grpo_learning_rates:
        trained, costs = run(GRPOTrainer, model, tokenizer, grpo_config(args, rate), rows)
        chosen_by = ask(trained, tokenizer, args, rows_of(validation * options.samples, new))["accuracy"]
        grpo[str(rate)] = measured(trained, {"validation": chosen_by, **costs})
    best = max(grpo, key=lambda rate: grpo[rate]["validation"])
    table["GRPO"] = grpo[best]
    results = {"seed": args.seed, "warm_start_seconds": warm, "rollouts": args.max_steps * args.generation_batch_size,
               "table": table, "grpo": grpo, "seconds": round(time.perf_counter() - start, 1)}  # fmt: skip
    Path(args.output_dir, "results.json").write_text(json.dumps(results, indent=1))
    print(desk.markdown(table))
    print(f"{len(held_out)} held-out questions, seed {args.seed}, {results['rollouts']} rollouts; "
          f"{results['seconds']:.0f} s in all, {warm:.0f} of them for the warm start. "
          f"Results: {args.output_dir}/results.json")  # fmt: skip
    return results


if __name__ == "__main__":
    main()
