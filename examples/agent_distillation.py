"""On-policy distillation of an agent: a stronger model scores the very tokens that the student wrote with its tools.

    python examples/agent_distillation.py --seed 0

Offline, two CPU cores, minutes. A small Llama learns to answer questions with three tools (`agent_zones.py`): the
student. It knows no city's zone, guesses, and gives up after most errors. The teacher is the same model after it has
learned all zones and not to give up; it hardly ever makes the student's mistakes. The student acts for itself, and
each of its tokens, in every turn, is distilled towards what the teacher would have written there
(`teacher_context="none"`, no reward). The same student is also trained, for as many tokens, on trajectories that the
teacher wrote beforehand for the same questions, each another sample (TRL's `SFTTrainer`). Both are trained with each
of the same learning rates, and the one that does best on validation questions counts. All are asked the same held-out
questions. They are about cities that no question of these trainings names, so that their zones cannot be learned there
(the teacher knows them; the student has seen these cities with any zone). Writes `results.json` and the student to
`--output_dir`, the tiny teacher to `teacher` in it, and prints a table.

Real models, whose chat template has to know tools, and which are not taught anything first (with `HF_HUB_OFFLINE=0`):
`--model Qwen/Qwen3-0.6B --teacher_model Qwen/Qwen3-4B --use_cpu false --bf16 true
--learning_rates 1e-5 --max_completion_length 1024`. Other options of SDPOConfig work too, for both ways of training
where they are about training as such; those that would have no effect here are refused. Each training writes to a
folder of its own in `--output_dir`.
"""

import copy
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything of Hugging Face is imported; nothing is fetched
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import agent_desk as desk
import agent_model
import agent_run
import agent_tools
import agent_zones
import torch
from datasets import Dataset
from tiny_llama import Row
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer, TrlParser

from sdpo_trl import SDPOConfig
from sdpo_trl.arguments import check_arguments

DEFAULTS = {**desk.DEFAULTS, "output_dir": "runs/agent_distillation", "teacher_context": "none",
            "distillation_alpha": 0.0, "max_steps": 40, "num_generations": 1,
            "max_completion_length": agent_zones.MAX_COMPLETION_LENGTH}  # fmt: skip
TRAINED_ON, VALIDATION, HELD_OUT = 24, 8, 16  # cities
Build = Callable[[], PreTrainedModel]  # a model as it is before any training; a trainer keeps what it is given


@dataclass
class DistillationArguments:
    model: str | None = field(default=None, metadata={"help": "The student: a folder or a name. None: a tiny Llama."})
    teacher_model: str | None = field(default=None, metadata={"help": "The teacher, where `--model` is given."})
    prompts: int = field(default=96, metadata={"help": "Questions that are trained on."})
    held_out: int = field(default=64, metadata={"help": "Questions about further cities, asked at the end."})
    validation: int = field(default=32, metadata={"help": "About further cities still: these choose the rates."})
    student_steps: int = field(default=1000, metadata={"help": "Warm start of the tiny student."})
    teacher_steps: int = field(default=400, metadata={"help": "What the tiny teacher learns further."})
    samples: int = field(default=8, metadata={"help": "Answers to each held-out and validation question."})
    learning_rates: list[float] = field(
        default_factory=lambda: [5e-4, 1e-3, 2e-3],
        metadata={"help": "Both ways of training run with each, in place of `learning_rate`."},
    )

    def __post_init__(self) -> None:
        agent_run.check_counts(self, "teacher_steps", "student_steps", "samples")
        agent_run.check_rates("learning_rates", self.learning_rates)
        if (self.model is None) != (self.teacher_model is None):
            raise ValueError("`--model` and `--teacher_model` go together: a real student needs a real teacher.")


def check(options: DistillationArguments, args: SDPOConfig) -> None:
    """
    Raises:
        `ValueError`: If there is an option that cannot be used here.
    """
    if args.learning_rate != SDPOConfig.learning_rate:
        raise ValueError("`--learning_rate` has no effect here: give `--learning_rates`, with one rate or several.")
    for name in ("model_init_kwargs", "teacher_model_init_kwargs"):
        if getattr(args, name):
            raise ValueError(f"`--{name}` has no effect here: the example loads both models itself.")
    check_arguments(options.model or "student", args, None, None, options.teacher_model or "teacher")
    if args.teacher_context != "none":
        raise ValueError(
            f"This example has `teacher_context='none'`, not {args.teacher_context!r}: no feedback is there."
        )
    if args.eval_strategy != "no" or args.eval_on_start:
        raise ValueError(
            "`--eval_strategy` and `--eval_on_start` cannot be used here: the trainings have no evaluation set, and "
            "the models are asked after them."
        )
    for name in ("model", "teacher_model"):
        given = getattr(options, name)
        if given is not None and Path(given).resolve() == Path(args.output_dir).resolve():
            raise ValueError(
                f"`--{name} {given}` is the `--output_dir` too, where the student would replace it: give another one."
            )


def build_models(
    options: DistillationArguments, unseen: list[desk.Task], args: SDPOConfig
) -> tuple[Any, Build, Build]:
    """`(tokenizer, student, teacher)`: loaded, or built and warm-started on questions other than the `unseen`."""

    def load(name: str) -> Build:
        return lambda: AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)

    if options.model is not None:
        return AutoTokenizer.from_pretrained(options.model), load(options.model), load(options.teacher_model)
    seed = args.seed
    tokenizer, rng = agent_model.build_tokenizer(agent_zones.WORDS), random.Random(seed)
    names = {task.question for task in unseen}
    tasks = [task for task in agent_zones.questions(list(agent_tools.ZONE_OF)) if task.question not in names]
    by_kind = [[task for task in tasks if task.kind == kind] for kind in agent_zones.KINDS]

    def taught(model: Any, told: Callable[[desk.Task], desk.Conversation], steps: int, rate: float) -> None:
        talks = [told(rng.choice(rng.choice(by_kind))) for _ in range(min(6000, 32 * steps))]
        agent_model.warm_start(
            model, tokenizer, talks, seed, steps=steps, learning_rate=rate, tools=agent_tools.ZONE_TOOLS
        )

    student = agent_model.build_model(tokenizer, seed, spread=0.04)
    taught(student, lambda task: agent_zones.gives_up(task, rng), options.student_steps, 3e-3)
    teacher = copy.deepcopy(student)
    taught(teacher, lambda task: agent_zones.solved(task, rng, slip_rate=0.15), options.teacher_steps, 1e-3)
    folder = str(Path(args.output_dir, "teacher"))  # with its tokenizer, so that the trainer can compare the token ids
    teacher.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    teacher = load(folder)()
    return tokenizer, lambda: copy.deepcopy(student), lambda: copy.deepcopy(teacher)


def rows_of(tasks: list[desk.Task], system: bool) -> Dataset:
    told = [{"role": "system", "content": agent_zones.SYSTEM}] if system else []
    return Dataset.from_list(
        [{"prompt": [*told, {"role": "user", "content": task.question}], "answer": task.answer} for task in tasks]
    )


def act(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, args: SDPOConfig, rows: Dataset
) -> tuple[dict[str, Any], list[Row]]:
    """Let a model answer, in the trainer's own loop: `(what the table shows, the rollouts)`."""
    rewards: list[float] = []
    evaluation = agent_run.asking(args)
    evaluation.teacher_context, evaluation.teacher_model_kind = "feedback", "live"  # nothing is distilled here
    evaluator = agent_run.RecordingTrainer(
        model,
        agent_run.kept(desk.right_answer, rewards),
        evaluation,
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tokenizer,
        tools=agent_tools.ZONE_TOOLS,
    )
    evaluator.remove_callback(PrinterCallback)
    return desk.summary(evaluator.evaluate(), rewards), evaluator.read


def distil(
    student: Build,
    teacher: Build,
    tokenizer: PreTrainedTokenizerBase,
    args: SDPOConfig,
    rows: Dataset,
    rate: float,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """On-policy."""
    args = agent_run.in_folder(args, f"on_policy_{rate}")
    args.learning_rate = rate
    with desk.Phase() as phase:
        trainer = agent_run.RecordingTrainer(
            student(), None, args, train_dataset=rows, processing_class=tokenizer, tools=agent_tools.ZONE_TOOLS,
            teacher_model=teacher(),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    costs = {"rollouts": agent_run.rollouts(trainer), "tokens_trained": agent_run.tokens_in(trainer.read)}
    return trainer.model, {**costs, "seconds": phase.seconds, "peak_mib": phase.peak_mib}


def write_down(
    teacher: Build, tokenizer: PreTrainedTokenizerBase, args: SDPOConfig, rows: Dataset, tokens: int
) -> list[Row]:
    """Fixed data: what the teacher samples for all questions, again and again, until so many tokens are there."""
    data: list[Row] = []
    args = copy.copy(args)
    while tokens > 0:
        said = [row for row in act(teacher(), tokenizer, args, rows)[1] if agent_run.tokens_in([row])]
        if not said:
            raise ValueError("The teacher wrote nothing that could be learned: all its trajectories are masked.")
        random.Random(args.seed).shuffle(said)
        for row in said:
            if tokens > 0:
                data.append(row)
                tokens -= agent_run.tokens_in([row])
        args.seed += 1  # a trainer sets the seed, and with the same one the teacher would write the same once more
    return data


def finetune(
    student: Build, tokenizer: PreTrainedTokenizerBase, args: SDPOConfig, data: list[Row], rate: float
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Supervised, each trajectory once, with the on-policy run's batches and its options of training."""
    args = agent_run.in_folder(args, f"fixed_data_{rate}")
    shared = {f.name: getattr(args, f.name) for f in fields(TrainingArguments) if f.init}
    own = {"num_train_epochs": 1, "max_steps": -1, "learning_rate": rate, "remove_unused_columns": True,
           "dataloader_drop_last": False}  # fmt: skip
    config = SFTConfig(**shared | own, max_length=None)
    with desk.Phase() as phase:
        rows = Dataset.from_dict({"input_ids": [ids for ids, _ in data], "labels": [said for _, said in data]})
        trainer = SFTTrainer(student(), config, train_dataset=rows, processing_class=tokenizer)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return trainer.model, {
        "tokens_trained": agent_run.tokens_in(data),
        "seconds": phase.seconds,
        "peak_mib": phase.peak_mib,
    }


def main(argv: list[str] | None = None) -> dict[str, Any]:
    start = time.perf_counter()
    torch.set_num_threads(1)  # so small a model gains little from more, and loses much where cores are shared
    parser = TrlParser((DistillationArguments, SDPOConfig))
    parser.set_defaults(**DEFAULTS)
    options, args = parser.parse_args_and_config(argv)
    check(options, args)
    agent_run.prepare(args)
    rng = random.Random(args.seed)
    groups = agent_zones.deal((TRAINED_ON, VALIDATION, HELD_OUT), rng)
    own, validation, held_out = (
        agent_zones.choose(cities, getattr(options, name), name, rng)
        for cities, name in zip(groups, ("prompts", "validation", "held_out"), strict=True)
    )
    tokenizer, student, teacher = build_models(options, validation + held_out, args)
    system = options.model is not None
    asked, chosen_on = (rows_of(tasks * options.samples, system) for tasks in (held_out, validation))
    trained_on = rows_of(own, system)
    warm = round(time.perf_counter() - start, 1)

    def measured(model: PreTrainedModel, costs: dict[str, Any]) -> dict[str, Any]:
        return {**act(model, tokenizer, args, asked)[0], **costs}

    def run_each(train: Callable[[float], tuple[PreTrainedModel, dict[str, Any]]], name: str) -> PreTrainedModel:
        """Train with each rate; the table gets the one that does best on the validation split."""
        best = None
        for rate in options.learning_rates:
            model, costs = train(rate)
            chosen_by = act(model, tokenizer, args, chosen_on)[0]["accuracy"]
            rates.setdefault(name, {})[str(rate)] = measured(model, {"validation": chosen_by, **costs})
            if best is None or chosen_by > best[1]["validation"]:  # the first of equals
                best = model, rates[name][str(rate)]
        table[name] = best[1]
        return best[0]

    table, rates = {"student before": measured(student(), {}), "teacher": measured(teacher(), {})}, {}
    model = run_each(lambda rate: distil(student, teacher, tokenizer, args, trained_on, rate), "student, on-policy")
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    with desk.Phase() as writing:
        data = write_down(teacher, tokenizer, args, trained_on, table["student, on-policy"]["tokens_trained"])
    run_each(lambda rate: finetune(student, tokenizer, args, data, rate), "student, fixed data")
    for row in rates["student, fixed data"].values():
        row["seconds"] = round(row["seconds"] + writing.seconds, 1)
        if row["peak_mib"] is not None:
            row["peak_mib"] = max(row["peak_mib"], writing.peak_mib)
    results = {"seed": args.seed, "warm_start_seconds": warm, "table": table, "rates": rates,
               "rollouts": table["student, on-policy"]["rollouts"],
               "seconds": round(time.perf_counter() - start, 1)}  # fmt: skip
    Path(args.output_dir, agent_run.RESULTS).write_text(json.dumps(results, indent=1))
    print(desk.markdown(table))
    print(f"{len(held_out)} held-out questions, seed {args.seed}; {results['seconds']:.0f} s in all, "
          f"{warm:.0f} of them for the warm start. Results: {args.output_dir}/results.json")  # fmt: skip
    return results


if __name__ == "__main__":
    main()
