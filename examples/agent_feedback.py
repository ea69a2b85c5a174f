"""An agent that teaches itself: its environment says what was wrong with a turn, and there is no other teacher.

    python examples/agent_feedback.py --seed 0

Offline, two CPU cores, minutes. At this desk people use house words (`agent_house.py`): `rome brol zif` asks for the
temperature in Rome, in the unit that `brol` stands for, and for what `zif` makes of it. The warm start teaches a small
Llama the tools, the meaning of nine *known* words, and to do what it is told in the middle of a conversation; the nine
*new* words mean nothing to it. Then it acts, and its environment looks at every turn: `wrong unit: K`,
`wrong tool: convert K`, `missing step: calculate *2`, `right step: weather`. SDPO re-reads each turn with its line in
front of it (`(turn, text)` feedback) and distils what the same model would then have done; the lines on right turns
hold these where they are. A third of the questions are in known words, so that what these mean is not forgotten. GRPO
gets the same questions, number of rollouts and rewards, and does not see the lines.

Held out are combinations of a city, a unit and an operation, in new words. The same ones in known words (`known
words`), which the warm start may have shown, tell what is forgotten; `when told` is the probability of all the right
turns, each after a line that says what to do. Writes `results.json` to `--output_dir` and prints a table.

The options of SDPOConfig work, for GRPO too where it has them (`--learning_rate` is SDPO's); `--beta` and
`--resume_from_checkpoint` are refused. Each training writes to a folder of its own in `--output_dir`.
"""

import copy
import json
import os
import random
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything of Hugging Face is imported; nothing is fetched
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import agent_desk as desk
import agent_model
import agent_run
import torch
from agent_house import (
    ORDERS,
    House,
    HouseDesk,
    Order,
    build_model,
    build_tokenizer,
    conversation,
    houses,
    right_answer,
    warm_start_talks,
)
from datasets import Dataset
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer, TrlParser

from sdpo_trl import SDPOConfig, SDPOTrainer

DEFAULTS = {
    **desk.DEFAULTS,
    "per_device_eval_batch_size": 72,
    "output_dir": "runs/agent_feedback",
    "teacher_model_kind": "base",
    "distillation_alpha": 0.0,
    "distillation_span": "hinted_turn",
    "use_successful_as_teacher": False,
    "reprompt_template": "{prompt}{solution}{feedback}",
    "feedback_template": "; {feedback_raw}",
    "learning_rate": 5e-4,
    "per_device_train_batch_size": 64,
    "max_steps": 100,
    "num_generations": 1,  # feedback needs no group, and more different questions teach more
    "lr_scheduler_type": "linear",
    "warmup_steps": 5,
}


@dataclass
class FeedbackArguments:
    held_out: int = field(default=72, metadata={"help": "Questions that are only asked at the end."})
    validation: int = field(default=72, metadata={"help": "Further questions, which choose between learning rates."})
    known_share: float = field(
        default=0.5, metadata={"help": "Questions in known words among those trained on, per question in new words."}
    )
    warm_steps: int = field(default=500, metadata={"help": "Optimizer steps of the warm start."})
    samples: int = field(default=2, metadata={"help": "Answers to each held-out question."})
    grpo_learning_rates: list[float] = field(
        default_factory=lambda: [1e-3, 5e-4], metadata={"help": "GRPO is run with each; the better one counts."}
    )

    def __post_init__(self) -> None:
        agent_run.check_counts(self, "held_out", "validation", "warm_steps", "samples")
        agent_run.check_rates("grpo_learning_rates", self.grpo_learning_rates)
        if self.held_out + self.validation >= len(ORDERS):
            raise ValueError(
                f"There are {len(ORDERS)} questions: `--held_out` ({self.held_out}) and `--validation` "
                f"({self.validation}) leave none to train on."
            )
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


def make(trainer_class, model, tokenizer, args, rows: Dataset, reward=right_answer):
    trainer = trainer_class(
        model, reward, args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer,
        environment_factory=HouseDesk,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)  # the table says it
    return trainer


def grpo_config(args: SDPOConfig, learning_rate: float, steps: int) -> GRPOConfig:
    """The same run for GRPO, which needs groups: at least eight answers to a question, as many in all."""
    group = max(args.num_generations, 8)
    if args.generation_batch_size % group:
        raise ValueError(
            f"GRPO answers each question {group} times, and {args.generation_batch_size} rollouts at once are no "
            f"multiple of that. Give a `--per_device_train_batch_size` that is a multiple of {group}."
        )
    if args.beta:
        raise ValueError(
            "`--beta` must be 0 here: GRPOTrainer loads its reference from the model's folder or name, and the model "
            "of this example has neither."
        )
    shared = {f.name: getattr(args, f.name) for f in fields(GRPOConfig) if f.init}
    changed = {
        "learning_rate": learning_rate,
        "max_steps": steps,
        "num_generations": group,
        "generation_batch_size": None,
    }
    return GRPOConfig(**shared | changed)


def ask(model, tokenizer, args: SDPOConfig, rows: Dataset) -> dict[str, float | None]:
    """Let a model answer, through the trainer's own loop, at the sampling temperature of the training."""
    rewards: list[float] = []
    reward = agent_run.kept(right_answer, rewards)
    trainer = make(SDPOTrainer, model, tokenizer, agent_run.asking(args), rows, reward)
    return desk.summary(trainer.evaluate(), rewards)


def run(trainer_class, model, tokenizer, args, rows: Dataset) -> tuple[Any, dict[str, float]]:
    trainer = make(trainer_class, copy.deepcopy(model), tokenizer, args, rows)
    with desk.Phase() as phase:
        trainer.train()
    costs = {"steps": trainer.state.global_step, "rollouts": agent_run.rollouts(trainer)}
    return trainer.model, {**costs, "seconds": phase.seconds, "peak_mib": phase.peak_mib}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    start = time.perf_counter()
    torch.set_num_threads(1)  # so small a model gains little from more, and loses much where cores are shared
    parser = TrlParser((FeedbackArguments, SDPOConfig))
    parser.set_defaults(**DEFAULTS)
    options, args = parser.parse_args_and_config(argv)
    agent_run.prepare(args)
    for rate in options.grpo_learning_rates:
        grpo_config(args, rate, args.max_steps)  # what GRPO cannot do is said now
    rng = random.Random(args.seed)
    known, new = house = houses(args.seed)
    orders = rng.sample(ORDERS, len(ORDERS))
    held_out, orders = orders[: options.held_out], orders[options.held_out :]
    validation, trained_on = orders[: options.validation], orders[options.validation :]
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, args.seed)
    talks = warm_start_talks(house, min(4000, 32 * options.warm_steps), rng)
    agent_model.warm_start(model, tokenizer, talks, args.seed, steps=options.warm_steps)
    warm = round(time.perf_counter() - start, 1)

    told = [conversation(o, new.question(o.city, o.unit, o.operation), rng, (1.0,) * 3) for o in held_out]

    def measured(trained: Any, costs: dict[str, Any]) -> dict[str, Any]:
        report = ask(trained, tokenizer, args, rows_of(held_out * options.samples, new))
        report["known"] = ask(trained, tokenizer, args, rows_of(held_out, known))["accuracy"]
        report["told"] = round(agent_model.success_rate(trained, tokenizer, told), 4)
        return {**report, **costs}

    table = {"before": measured(copy.deepcopy(model), {})}
    practised = rng.sample(trained_on, round(options.known_share * len(trained_on)))
    rows = Dataset.from_list([*rows_of(trained_on, new), *rows_of(practised, known)])
    trained, costs = run(SDPOTrainer, model, tokenizer, agent_run.in_folder(args, "sdpo"), rows)
    trained.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    table["SDPO, own feedback"] = measured(trained, costs)
    grpo, steps = {}, costs["steps"]
    for rate in options.grpo_learning_rates:
        own = grpo_config(agent_run.in_folder(args, f"grpo_{rate}"), rate, steps)
        trained, costs = run(GRPOTrainer, model, tokenizer, own, rows)
        chosen_by = ask(trained, tokenizer, args, rows_of(validation * options.samples, new))["accuracy"]
        grpo[str(rate)] = measured(trained, {"validation": chosen_by, **costs})
    best = max(grpo, key=lambda rate: grpo[rate]["validation"])
    table["GRPO"] = grpo[best]
    results = {"seed": args.seed, "warm_start_seconds": warm, "rollouts": table["GRPO"]["rollouts"],
               "table": table, "grpo": grpo, "seconds": round(time.perf_counter() - start, 1)}  # fmt: skip
    Path(args.output_dir, agent_run.RESULTS).write_text(json.dumps(results, indent=1))
    print(desk.markdown(table))
    print(f"{len(held_out)} held-out questions, seed {args.seed}, {results['rollouts']} rollouts; "
          f"{results['seconds']:.0f} s in all, {warm:.0f} of them for the warm start. "
          f"Results: {args.output_dir}/results.json")  # fmt: skip
    return results


if __name__ == "__main__":
    main()
