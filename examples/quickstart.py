"""The main job: a small model learns hidden programs from the feedback of failed tests, offline, on two CPU cores.

    accelerate launch --config_file accelerate_configs/cpu.yaml examples/quickstart.py --seed 0

A character-level Llama is warm-started (a minute) so that it can *use* a hint in its prompt, but cannot know what the
new names mean (`letters.py`). Then it answers bare prompts, and is trained by SDPO: each failed answer is read once
more with a sibling's correct program or the outcome of its own failed tests in the prompt. GRPO gets the same number
of rollouts, and does not see the feedback. Writes `results.json`, `curve.png` and the model to `--output_dir`.

`--teacher`, `--alpha` and `--mode` are short for `--teacher_model_kind`, `--distillation_alpha`,
`--distillation_mode`; `--use_peft` and every other option of SDPOConfig and trl.ModelConfig works too.
"""

import copy
import json
import os
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything of Hugging Face is imported; nothing is fetched

import matplotlib

matplotlib.use("Agg")

import letters
import torch
from datasets import Dataset
from matplotlib import pyplot
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config

from sdpo_trl import SDPOConfig, SDPOTrainer

DEFAULTS = {
    "output_dir": "runs/quickstart",
    "teacher_model_kind": "base",
    "distillation_alpha": 0.0,
    "learning_rate": 5e-4,
    "weight_decay": 0.01,
    "max_steps": 100,
    "per_device_train_batch_size": 64,
    "num_generations": 8,
    "max_completion_length": letters.MAX_COMPLETION_LENGTH,
    "reprompt_template": letters.REPROMPT_TEMPLATE,
    "solution_template": letters.SOLUTION_TEMPLATE,
    "feedback_template": letters.FEEDBACK_TEMPLATE,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "report_to": "none",
    "logging_steps": 40,
}
SHORT = {"--teacher": "--teacher_model_kind", "--alpha": "--distillation_alpha", "--mode": "--distillation_mode"}


@dataclass
class QuickstartArguments:
    grpo_learning_rates: list[float] = field(
        default_factory=lambda: [3e-4, 1e-4], metadata={"help": "GRPO is run with each; the better one counts."}
    )
    measure_every: int = field(default=5, metadata={"help": "Optimizer steps between two points of the curves."})


def passes_tests(completions, target, log_extra, **columns) -> list[float]:
    """The reward: 1 if the program passes its tests. Beside it, the outcome of the failed ones as feedback."""
    graded = [letters.grade(completion, goal) for completion, goal in zip(completions, target, strict=True)]
    log_extra("feedback", [feedback for _, feedback in graded])
    return [reward for reward, _ in graded]


class SuccessCurve(TrainerCallback):
    """Success without a hint against the rollouts generated so far."""

    def __init__(self, measure, every: int, rollouts_per_step: int) -> None:
        self.points = [[0, measure()]]
        self._measure, self._every, self._per_step = measure, every, rollouts_per_step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self._every == 0 or state.global_step == state.max_steps:
            self.points.append([state.global_step * self._per_step, self._measure()])


def parse(argv: list[str] | None) -> tuple[QuickstartArguments, SDPOConfig, ModelConfig]:
    parser = TrlParser((QuickstartArguments, SDPOConfig, ModelConfig))
    parser.set_defaults(**DEFAULTS)

    def expand(argument: str) -> str:
        name, equals, value = argument.partition("=")
        return SHORT.get(name, name) + equals + value

    arguments = [expand(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    given = " ".join(arguments).replace("=", " ").lower()
    if "--no_include_environment_feedback" in given or "--include_environment_feedback false" in given:
        # The trainer refuses a template that nothing would fill.
        parser.set_defaults(feedback_template=SDPOConfig.feedback_template)
    return parser.parse_args_and_config(arguments)


def run(trainer_class, model, tokenizer, args, tasks, every: int, peft_config):
    """Train a copy of the warm-started model, and measure it on all three kinds of names."""
    trained, unseen, known = tasks
    rows = Dataset.from_dict({"prompt": [t.prompt for t in trained], "target": [str(t.program) for t in trained]})
    trainer = trainer_class(
        model=copy.deepcopy(model), reward_funcs=passes_tests, args=args, train_dataset=rows,
        processing_class=tokenizer, peft_config=peft_config,
    )  # fmt: skip

    def measure(names, hint="none"):
        return round(letters.success_rate(trainer.model, tokenizer, names, hint), 4)

    curve = SuccessCurve(lambda: measure(trained), every, args.generation_batch_size)
    trainer.add_callback(curve)
    start = time.perf_counter()
    trainer.train()
    report = {
        "before": curve.points[0][1],
        "after": curve.points[-1][1],
        "after_unseen": measure(unseen),
        "after_known": measure(known),
        "after_with_solution": measure(trained, "solution"),
        "after_with_feedback": measure(trained, "feedback"),
        "seconds": round(time.perf_counter() - start, 1),
        "curve": curve.points,
    }
    return trainer, report


def plot(results: dict, path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    axes.plot(*zip(*results["sdpo"]["curve"], strict=True), label="SDPO", color="#0b6e4f", linewidth=2.5)
    for rate, report in results["grpo"]["runs"].items():
        label = f"GRPO, learning rate {float(rate):g}"
        axes.plot(*zip(*report["curve"], strict=True), label=label, linestyle="--", linewidth=1.8)
    axes.set(xlabel="rollouts generated", ylabel="success without any hint", ylim=(-0.02, 1.02))
    axes.set_title(f"Hidden programs, seed {results['seed']}")
    axes.grid(alpha=0.3)
    axes.legend(loc="center right")
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> dict:
    start = time.perf_counter()
    torch.set_num_threads(1)  # so small a model gains little from more, and loses much where cores are shared
    options, args, model_args = parse(argv)
    folder = Path(args.output_dir)
    tasks = letters.all_tasks(args.seed)
    tokenizer = letters.build_tokenizer()
    model = letters.build_model(tokenizer, args.seed)
    letters.warm_start(model, tokenizer, args.seed)
    warm = time.perf_counter() - start
    before = {
        "unseen": letters.success_rate(model, tokenizer, tasks[1]),
        "known": letters.success_rate(model, tokenizer, tasks[2]),
        "with_solution": letters.success_rate(model, tokenizer, tasks[0], "solution"),
        "with_feedback": letters.success_rate(model, tokenizer, tasks[0], "feedback"),
    }
    peft_config = get_peft_config(model_args)
    trainer, sdpo = run(SDPOTrainer, model, tokenizer, args, tasks, options.measure_every, peft_config)
    trainer.save_model()
    grpo = {}
    for rate in options.grpo_learning_rates:
        shared = {f.name: getattr(args, f.name) for f in fields(GRPOConfig) if f.init}
        shared |= {"learning_rate": rate, "generation_batch_size": None, "output_dir": str(folder / "grpo")}
        config = GRPOConfig(**shared)
        _, grpo[str(rate)] = run(GRPOTrainer, model, tokenizer, config, tasks, options.measure_every, peft_config)
    best = max(grpo, key=lambda rate: grpo[rate]["after"])
    results = {
        "seed": args.seed,
        "rollouts": args.max_steps * args.generation_batch_size,
        "warm_start": {**{name: round(value, 4) for name, value in before.items()}, "seconds": round(warm, 1)},
        "sdpo": sdpo,
        "grpo": {**grpo[best], "learning_rate": float(best), "runs": grpo},
        "seconds": round(time.perf_counter() - start, 1),
    }
    if trainer.accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(json.dumps(results, indent=1))
        plot(results, folder / "curve.png")
        print(f"Success without a hint on {len(tasks[0])} trained names: {sdpo['before']:.2f} before, "
              f"{sdpo['after']:.2f} after SDPO, {results['grpo']['after']:.2f} after GRPO on the same rollouts.\n"
              f"On {len(tasks[1])} unseen names: {before['unseen']:.2f}, {sdpo['after_unseen']:.2f}, "
              f"{results['grpo']['after_unseen']:.2f}. Results: {folder}/results.json, {folder}/curve.png "
              f"({results['seconds']:.0f} s)")  # fmt: skip
    trainer.accelerator.end_training()
    return results


if __name__ == "__main__":
    main()
