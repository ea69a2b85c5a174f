"""Learning at test time (paper, section 5): one hard problem; sample, learn, repeat until the first success.

    python examples/test_time.py                                                   # offline, 20 problems, minutes
    python examples/test_time.py --dataset_name problems.jsonl --model_name_or_path Qwen/Qwen3-8B --use_peft \\
        --bf16 true --use_cpu false --learning_rate 1e-5 --max_completion_length 8192 --budget 2752 --output_dir out

Each problem starts from the same model, and each method may sample `--budget` answers to it:

- *sdpo*: batches of `--num_generations` answers, one step of learning after each, from feedback alone: there is
  nothing else to learn from before the first success, and nothing to do after it;
- *best of k*: the model as it is, without learning;
- *reprompting*: as many conversations at once, in each the next answer is written under the prompt that the teacher
  would read about the last one, feedback included.

discovery@k is the share of problems that were solved by the first k answers. Writes `results.json` and
`test_time.png` to `--output_dir`. All options of SDPOConfig and trl.ModelConfig work; defaults are `DEFAULTS`.
"""

import copy
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import small_programs
import torch
from datasets import Dataset
from matplotlib import pyplot
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TrainerCallback
from trl import ModelConfig, TrlParser, get_peft_config

from sdpo_trl import SDPOConfig, SDPOTrainer
from sdpo_trl.environments import CodeReward, Limits, Sandbox, load_code, own_problems
from sdpo_trl.reprompt import Hint, Prompt, teacher_prompt

DEFAULTS = {
    "output_dir": "runs/test_time",
    # The paper's: reverse divergence, log-ratios cut at 5, 16 answers a step.
    "distillation_alpha": 1.0,
    "distillation_log_ratio_clip": 5.0,
    "num_generations": 16,
    "per_device_train_batch_size": 16,
    # For the small model.
    "teacher_model_kind": "base",
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "max_completion_length": small_programs.MAX_COMPLETION_LENGTH,
    **small_programs.TEMPLATES,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "report_to": "none",
    "logging_strategy": "no",
    "disable_tqdm": True,
}
METHODS = {"sdpo": "SDPO", "best": "best of k", "reprompting": "reprompting"}


@dataclass
class TestTimeArguments:
    dataset_name: str = field(
        default="tables", metadata={"help": "tables (for the model built in code), own, a Hub id or a local file."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub dataset."})
    dataset_split: str = field(default="train", metadata={"help": "Rows to solve, such as train[:20]."})
    problems: int = field(default=20, metadata={"help": "The first so many."})
    budget: int = field(default=256, metadata={"help": "Answers per problem and method."})
    methods: list[str] = field(default_factory=lambda: list(METHODS), metadata={"help": f"Of {', '.join(METHODS)}."})
    program_seconds: float = field(default=6.0, metadata={"help": "CPU time of a program on one test."})


class Grader:
    """The reward function; remembers at which answer the first success came."""

    def __init__(self, reward: CodeReward) -> None:
        self.reward, self.__name__ = reward, reward.__name__
        self.seen, self.first = 0, None

    def __call__(self, prompts: list[Prompt], completions: list[Prompt], **columns: Any) -> list[float]:
        rewards = self.reward(prompts, completions, **columns)
        if self.first is None and 1.0 in rewards:
            self.first = self.seen + rewards.index(1.0) + 1
        self.seen += len(rewards)
        return rewards


class StopWhenSolved(TrainerCallback):
    """Ends the run with the step in which the problem was solved."""

    def __init__(self, grader: Grader) -> None:
        self._grader = grader

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= self._grader.first is not None


def solve_by_learning(
    row: dict, model: Any, tokenizer: Any, args: SDPOConfig, reward: CodeReward, peft: Any
) -> int | None:
    """The number of the first right answer, or `None` within the budget."""
    grader = Grader(reward)
    trainer = SDPOTrainer(
        model=copy.deepcopy(model), reward_funcs=grader, args=copy.deepcopy(args),
        train_dataset=Dataset.from_list([row] * (args.generation_batch_size // args.num_generations)),
        processing_class=tokenizer, peft_config=peft, callbacks=[StopWhenSolved(grader)],
    )  # fmt: skip
    trainer.train()
    return grader.first


@torch.no_grad()
def sample(model: Any, tokenizer: Any, args: SDPOConfig, prompts: list[Prompt]) -> list[str]:
    """One answer to each prompt, at the temperature of training."""
    chats = not isinstance(prompts[0], str)
    options = {"add_generation_prompt": True, "tokenize": False, **(args.chat_template_kwargs or {})}
    texts = [tokenizer.apply_chat_template(prompt, **options) if chats else prompt for prompt in prompts]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=not chats, padding_side="left")
    inputs = inputs.to(model.device)
    config = GenerationConfig(
        max_new_tokens=args.max_completion_length, do_sample=True, temperature=args.temperature, top_k=0, top_p=1.0,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    made = model.generate(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, generation_config=config)
    return tokenizer.batch_decode(made[:, inputs.input_ids.size(1) :], skip_special_tokens=True)


def solve_by_sampling(
    row: dict, model: Any, tokenizer: Any, args: SDPOConfig, reward: CodeReward, budget: int, *, reprompts: bool
) -> int | None:
    """The same for a model that stays as it is; with `reprompts`, each answer is told what failed in the last one."""
    model.eval()
    grader = Grader(reward)
    prompts = [row["prompt"]] * args.num_generations
    columns = {name: [row[name]] * args.num_generations for name in ("public_tests", "hidden_tests", "function")}
    while grader.first is None and grader.seen < budget:
        told: dict[str, list[str | None]] = {}
        answers = sample(model, tokenizer, args, prompts)
        grader(prompts, answers, log_extra=told.__setitem__, **columns)
        if reprompts:
            prompts = [
                row["prompt"] if text is None
                else teacher_prompt(row["prompt"], Hint(None, text), args.templates, args.reprompt_placement)
                for text in told["feedback"]
            ]  # fmt: skip
    return grader.first


def hard_problems(options: TestTimeArguments, seed: int) -> list[dict]:
    if options.dataset_name == "tables":
        tables = small_programs.hidden_tables(options.problems, seed)
        return [small_programs.table_row(number, table) for number, table in enumerate(tables)]
    if options.dataset_name == "own":
        return list(own_problems())[: options.problems]
    return list(load_code(options.dataset_name, options.dataset_config, options.dataset_split))[: options.problems]


def load(options: TestTimeArguments, args: SDPOConfig, model: ModelConfig) -> tuple[Any, Any]:
    if options.dataset_name == "tables":
        return small_programs.warm_started(small_programs.table_rows, seed=0)  # `--seed` draws the problems
    if model.model_name_or_path is None:
        raise ValueError("Name the model: `--model_name_or_path` is a Hub id or a folder.")
    name = model.model_name_or_path
    loaded = AutoModelForCausalLM.from_pretrained(name, dtype=model.dtype, revision=model.model_revision)
    return loaded.to(args.device), AutoTokenizer.from_pretrained(name, revision=model.model_revision)


def discovery(found: list[int | None], k: int) -> float:
    """Share of problems that were solved by the first `k` answers."""
    return sum(first is not None and first <= k for first in found) / len(found)


def plot(results: dict, path: Path) -> None:
    figure, axis = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    budget = results["budget"]
    for (name, label), color in zip(METHODS.items(), ("#0b6e4f", "#b5541c", "#3d5a98"), strict=True):
        if name in results["first_success"]:
            found = results["first_success"][name]
            places = sorted({1, budget, *(first for first in found if first is not None)})
            shares = [discovery(found, k) for k in places]
            axis.step(places, shares, where="post", label=label, color=color, linewidth=2.2)
    count = len(next(iter(results["first_success"].values())))
    axis.set(xlabel="answers per problem, k", ylabel="discovery@k", ylim=(-0.02, 1.02), xlim=(0, budget))
    axis.set_title(f"{count} problems, one at a time")
    axis.grid(alpha=0.3)
    axis.legend(loc="upper left")
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> dict:
    parser = TrlParser((TestTimeArguments, SDPOConfig, ModelConfig))
    parser.set_defaults(**DEFAULTS)
    options, args, model_args = parser.parse_args_and_config(argv)
    unknown = set(options.methods) - METHODS.keys()
    if unknown or not options.methods:
        raise ValueError(f"`methods` must be among {', '.join(METHODS)}, got {', '.join(options.methods)}.")
    for name in ("problems", "budget"):
        if getattr(options, name) < 1:
            raise ValueError(f"`{name}` must be at least 1, got {getattr(options, name)}.")
    if options.dataset_name == "tables":
        torch.set_num_threads(1)  # so small a model gains little from more
    args.max_steps = -(-options.budget // args.generation_batch_size)
    rows = hard_problems(options, args.seed)
    model, tokenizer = load(options, args, model_args)
    limits = Limits(cpu_seconds=options.program_seconds, wall_seconds=2.5 * options.program_seconds)
    reward = CodeReward(Sandbox(limits))
    found: dict[str, list[int | None]] = {name: [] for name in METHODS if name in options.methods}
    seconds = dict.fromkeys(found, 0.0)
    ks = [k for k in (args.num_generations * 2**i for i in range(20)) if k < options.budget] + [options.budget]
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for row in tqdm(rows, desc="problems"):
        for name, firsts in found.items():
            start = time.perf_counter()
            torch.manual_seed(args.seed + len(firsts))
            shared = (row, model, tokenizer, args, reward)
            if name == "sdpo":
                firsts.append(solve_by_learning(*shared, get_peft_config(model_args)))
            else:
                firsts.append(solve_by_sampling(*shared, options.budget, reprompts=name == "reprompting"))
            seconds[name] += time.perf_counter() - start
        results = {
            "budget": options.budget,
            "problems": [row["id"] for row in rows],
            "first_success": found,
            "discovery": {name: {str(k): discovery(firsts, k) for k in ks} for name, firsts in found.items()},
            "seconds": {name: round(value, 1) for name, value in seconds.items()},
        }
        (folder / "results.json").write_text(json.dumps(results, indent=1))  # so far
    plot(results, folder / "test_time.png")
    print("| discovery@k | " + " | ".join(map(str, ks)) + " |\n" + "|" + " --- |" * (len(ks) + 1))
    for name, shares in results["discovery"].items():
        print(f"| {METHODS[name]} | " + " | ".join(f"{share:.2f}" for share in shares.values()) + " |")
    return results


if __name__ == "__main__":
    main()
