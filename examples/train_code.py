"""SDPO on programming problems, unattended: sample answers, run them in the sandbox, turn failures into text, learn.

    accelerate launch --config_file accelerate_configs/cpu.yaml --num_cpu_threads_per_process 1 \\
        examples/train_code.py --config examples/configs/code_cpu.yaml                 # offline, a model built in code
    accelerate launch --config_file accelerate_configs/ddp.yaml examples/train_code.py \\
        --config examples/configs/code_rich_feedback.yaml --output_dir out             # the paper, section 4

Every `--eval_steps` the held-out problems are tried: pass@1, pass@k (k = `--num_generations_eval`), and the
self-teacher's success with feedback in its context go to the log and to `evaluations.json`; the best checkpoint is
loaded at the end and saved. `--resume true` goes on from the last complete checkpoint of `--output_dir`, or starts
where there is none, so a queue may restart the same command. `--distillation_weight` 1 is pure SDPO, 0 is GRPO,
between them both; all other options of SDPOConfig and trl.ModelConfig work too. Programs run under bubblewrap
(`apt-get install bubblewrap`).
"""

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import letters
import small_programs
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from sdpo_trl import SDPOConfig
from sdpo_trl.checkpoints import last_complete
from sdpo_trl.environments import CodeReward, Limits, LLMFeedback, Sandbox, load_code, own_problems
from sdpo_trl.problem_trainer import ProblemPlan, ProblemTrainer

SHOWN = {"success_share": "pass@1", "success_group_share": "pass@k", "teacher_success_share": "self-teacher"}


@dataclass
class CodeArguments:
    dataset_name: str = field(
        default="own",
        metadata={"help": "own (60 shipped problems), names (for the model built in code), a Hub id or local file."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub dataset."})
    dataset_train_split: str = field(default="train", metadata={"help": "Rows to train on, such as train[:100]."})
    dataset_test_split: str = field(default="test", metadata={"help": "Held-out rows, such as train[100:]."})
    public_tests: int = field(default=2, metadata={"help": "Tests that feedback may show, where rows do not say."})
    max_hidden_tests: int | None = field(default=None, metadata={"help": "Keep the first so many hidden tests."})
    score: str = field(default="pass", metadata={"help": "pass: all tests or nothing. share: the tests passed."})
    show_expected: bool = field(default=True, metadata={"help": "Feedback holds a failed public test's output."})
    program_seconds: float = field(default=6.0, metadata={"help": "CPU time of a program on one test."})
    program_mib: int = field(default=1024, metadata={"help": "Memory of a program."})
    program_workers: int | None = field(default=None, metadata={"help": "Programs at once. None: all processors."})
    feedback_model: str | None = field(
        default=None, metadata={"help": "A model that explains failures; the key is read from OPENAI_API_KEY."}
    )
    feedback_base_url: str | None = field(default=None, metadata={"help": "Its OpenAI-compatible endpoint."})
    skip_solved: bool = field(default=False, metadata={"help": "Solved problems give their place to unsolved ones."})
    solved_share: float = field(default=1.0, metadata={"help": "Share of a group that must pass to be solved."})
    rest_steps: int | None = field(default=None, metadata={"help": "Steps until a solved problem is tried again."})
    signal_rows: int = field(default=0, metadata={"help": "Sample on until so many rollouts carry a signal."})
    max_rounds: int = field(default=4, metadata={"help": "Rounds of sampling for one batch at most."})
    resume: bool = field(default=False, metadata={"help": "Go on from output_dir's last checkpoint, if any."})


class Evaluations(TrainerCallback):
    """One readable line per evaluation, and all of them in `evaluations.json`."""

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        if state.is_world_process_zero:
            made = {  # a resumed run evaluates its first step once more
                row["step"]: {"step": row["step"], **self._named(row, args.num_generations_eval)}
                for row in state.log_history if any(f"eval_sdpo/{name}" in row for name in SHOWN)
            }  # fmt: skip
            points = list(made.values())
            if points:
                print(" ".join(f"{name} {value:.3g}" for name, value in points[-1].items()), flush=True)
            (Path(args.output_dir) / "evaluations.json").write_text(json.dumps(points, indent=1))

    @staticmethod
    def _named(row: dict[str, Any], k: int | None) -> dict[str, float]:
        names = {name: shown.replace("@k", f"@{k or 'k'}") for name, shown in SHOWN.items()}
        return {
            shown: round(row[f"eval_sdpo/{name}"], 4) for name, shown in names.items() if f"eval_sdpo/{name}" in row
        }


def check(data: CodeArguments, args: SDPOConfig) -> None:
    """Refuse what would have no effect."""
    if data.feedback_base_url is not None and data.feedback_model is None:
        raise ValueError("`feedback_base_url` is the endpoint of `feedback_model`: name the model, or drop it.")
    if data.resume and args.resume_from_checkpoint is not None:
        raise ValueError("`resume` takes the last complete checkpoint: drop it, or `resume_from_checkpoint`.")
    if data.dataset_name in ("own", "names"):
        plain, splits = CodeArguments(), ("dataset_train_split", "dataset_test_split")
        for name in ("dataset_config", *splits, "public_tests", "max_hidden_tests"):
            if getattr(data, name) != getattr(plain, name):
                raise ValueError(f"`dataset_name={data.dataset_name!r}` is fixed, so `{name}` has no effect: drop it.")


def problems(data: CodeArguments, seed: int, held_out: bool) -> Dataset:
    """The rows to train on, or the held-out ones."""
    if data.dataset_name == "names":
        trained, unseen, _ = letters.all_tasks(seed)
        return Dataset.from_list([small_programs.name_row(task) for task in (unseen if held_out else trained)])
    if data.dataset_name == "own":
        return own_problems("test" if held_out else "train")
    split = data.dataset_test_split if held_out else data.dataset_train_split
    limits = {"public": data.public_tests, "max_hidden": data.max_hidden_tests}
    return load_code(data.dataset_name, data.dataset_config, split, **limits)


def student(data: CodeArguments, args: SDPOConfig, model: ModelConfig) -> dict[str, Any]:
    """The trainer's arguments that say which model is trained."""
    if data.dataset_name == "names":
        if model.model_name_or_path is not None:
            raise ValueError("`dataset_name='names'` is for the model built in code: drop `model_name_or_path`.")
        torch.set_num_threads(1)  # so small a model gains little from more
        built, tokenizer = small_programs.warm_started(small_programs.name_rows, args.seed)
        return {"model": built, "processing_class": tokenizer, "peft_config": get_peft_config(model)}
    if model.model_name_or_path is None:
        raise ValueError("Name the model: `--model_name_or_path` is a Hub id or a folder.")
    args.model_init_kwargs = {
        "revision": model.model_revision,
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
        **(args.model_init_kwargs or {}),
    }
    return {
        "model": model.model_name_or_path,
        "peft_config": get_peft_config(model),
        "quantization_config": get_quantization_config(model),
    }


def sets(data: CodeArguments, args: SDPOConfig) -> dict[str, Dataset | None]:
    """The trainer's datasets; a held-out problem that is trained on as well is spoken of."""
    trained = problems(data, args.seed, held_out=False)
    if args.eval_strategy == "no" and not args.eval_on_start:
        return {"train_dataset": trained, "eval_dataset": None}
    unseen = problems(data, args.seed, held_out=True)
    shared = {json.dumps(prompt) for prompt in trained["prompt"]} & {json.dumps(prompt) for prompt in unseen["prompt"]}
    if shared:
        warnings.warn(
            f"{len(shared)} of the {len(unseen)} held-out problems are trained on as well, so what is measured on "
            "them says nothing about new ones. See `dataset_train_split` and `dataset_test_split`.", stacklevel=2,
        )  # fmt: skip
    return {"train_dataset": trained, "eval_dataset": unseen}


def main(argv: list[str] | None = None) -> ProblemTrainer:
    data, args, model = TrlParser((CodeArguments, SDPOConfig, ModelConfig)).parse_args_and_config(argv)
    check(data, args)
    limits = Limits(cpu_seconds=data.program_seconds, wall_seconds=2.5 * data.program_seconds,
                    memory_bytes=data.program_mib << 20)  # fmt: skip
    reward = CodeReward(Sandbox(limits), score=data.score, workers=data.program_workers,
                        show_expected=data.show_expected)  # fmt: skip
    explain = None
    if data.feedback_model is not None:
        explain = LLMFeedback(data.feedback_model, base_url=data.feedback_base_url)
        reward = explain.wrap(reward)
    trainer = ProblemTrainer(
        **student(data, args, model),
        reward_funcs=reward,
        args=args,
        **sets(data, args),
        feedback_func=explain,
        callbacks=[Evaluations()],
        problem_plan=ProblemPlan(data.skip_solved, data.solved_share, data.rest_steps, data.signal_rows,
                                 data.max_rounds),
    )  # fmt: skip
    started = data.resume and last_complete(args.output_dir)[0] is not None
    trainer.train(resume_from_checkpoint=started or args.resume_from_checkpoint)
    trainer.save_model()
    if explain is not None and trainer.accelerator.is_main_process:
        print(f"Feedback by {data.feedback_model}: {explain.costs}")
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=data.dataset_name)
    trainer.accelerator.end_training()
    return trainer


if __name__ == "__main__":
    main()
