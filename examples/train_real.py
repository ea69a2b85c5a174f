"""A real model learns a strict answer format from its grader: SmolLM2-135M-Instruct, LoRA, SDPO against GRPO.

    pip install 'sdpo-trl[gguf]'
    python examples/get_smollm2.py smollm2
    python examples/train_real.py --model smollm2 --threads 2        # under 20 minutes on two idle cores

The task: is a short review positive or negative? (`--task yes_no`: is a word of a kind, such as "apple" and a city?)
An answer is *valid* if it is one of two words and nothing else, and *right* if it is the right one; the reward is 1
for a right answer. The model is told so, and nearly never does it: it writes a sentence. The feedback says what was
wrong with the format, and which answer is right. 24 questions are trained on, 16 are held out; each method has the
same number of rollouts and may choose between learning rates.

Shares are exact probabilities at temperature 1, end token included, measured without any feedback in the prompt.
Writes `results.json` to `--out` and prints a table.
"""

import argparse
import json
import os
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything of Hugging Face is imported; nothing is fetched

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from sdpo_trl import SDPOConfig, SDPOTrainer
from sdpo_trl.reprompt import Hint, Templates, teacher_prompt

TEMPLATES = {
    "reprompt_template": "{solution}{feedback}{prompt}",
    "solution_template": "A right answer:\n{successful_previous_attempt}\n\n",
    "feedback_template": "{feedback_raw}\n\n",
}
GOOD = (
    "I love this film, it was wonderful.", "What a great day at the beach!", "She is happy with her new car.",
    "Excellent service and kind people.", "The soup was warm and delicious.", "The music made me smile all evening.",
    "A beautiful hotel with a lovely garden.", "My children enjoyed every page of this book.",
    "The phone works perfectly and looks great.", "Our guide was friendly and very helpful.",
    "The best pizza I have ever eaten.", "I would gladly come back next year.",
    "A brilliant play with a perfect ending.", "The room was clean, bright and quiet.",
    "This coat is warm, light and well made.", "He was delighted with the gift.",
    "The teacher explains everything clearly and kindly.", "A charming little shop with fair prices.",
    "The concert was amazing from start to end.", "Fresh bread, good coffee, nice people.",
)  # fmt: skip
BAD = (
    "The food was cold and awful.", "I hate waiting in line for an hour.", "The book is boring and far too long.",
    "This phone broke after a single day.", "The waiter was rude and slow.", "A terrible film with a stupid story.",
    "The room was dirty and smelled bad.", "I want my money back.", "The worst hotel of our whole trip.",
    "The soup tasted like old water.", "Nobody answered my calls, very disappointing.",
    "The chair fell apart in a week.", "A dull concert, half the people left.", "The seats were hard, the hall cold.",
    "She was sad about the broken toy.", "The coat is ugly and badly made.", "All of it was late, loud and dear.",
    "The battery is weak and the screen is poor.", "An annoying game full of errors.", "I regret buying this lamp.",
)  # fmt: skip
KINDS = {
    "an animal": ("dog", "horse", "eagle", "snake"), "a fruit": ("apple", "banana", "cherry", "peach"),
    "a colour": ("red", "green", "purple"), "a city": ("London", "Paris", "Rome"),
    "a vegetable": ("carrot", "onion", "spinach"), "a metal": ("iron", "gold", "copper"),
}  # fmt: skip
HELD_OUT = 8  # of each answer


@dataclass(frozen=True)
class Task:
    """Questions with two possible answers: `words`, and for each of them the questions that it answers."""

    words: tuple[str, str]
    questions: tuple[list[str], list[str]]

    def rows(self) -> tuple[list[dict], list[dict]]:
        """Rows to train on, and held-out ones, each with `prompt` and `answer`."""
        made = [
            [{"prompt": [{"role": "user", "content": text}], "answer": word} for text in texts]
            for texts, word in zip(self.questions, self.words, strict=True)
        ]
        trained = [row for kind in made for row in kind[HELD_OUT:]]
        return trained, [row for kind in made for row in kind[:HELD_OUT]]

    def told(self, answer: str) -> str:
        """The feedback on every answer that is not right."""
        return f"Answer with one word only, {' or '.join(self.words)}. The right answer is: {answer}"

    def grade(self, completions: list, answer: list[str], log_extra: Any, log_metric: Any, **columns: Any) -> list:
        """The reward, with the feedback beside it."""
        texts = [completion[-1]["content"] for completion in completions]
        passed = [text == right for text, right in zip(texts, answer, strict=True)]
        log_extra("feedback", [None if ok else self.told(right) for ok, right in zip(passed, answer, strict=True)])
        log_metric("valid", sum(text in self.words for text in texts) / len(texts))
        return [float(ok) for ok in passed]


def review_questions(reviews: tuple[str, ...]) -> list[str]:
    return [f'Is this review positive or negative? Answer Positive or Negative.\n\n"{text}"' for text in reviews]


def kind_questions(shift: int) -> list[str]:
    """Is a word of its kind (`shift` 0), or of the one that stands `shift` places behind it? The first ones first."""
    kinds = list(KINDS)
    pairs = [
        (place, word, kinds[(number + shift) % len(kinds)])
        for number, kind in enumerate(kinds) for place, word in enumerate(KINDS[kind])
    ]  # fmt: skip
    return [f'Is "{word}" {kind}? Answer Yes or No.' for _, word, kind in sorted(pairs, key=lambda pair: pair[0])]


TASKS = {
    "reviews": Task(("Positive", "Negative"), (review_questions(GOOD), review_questions(BAD))),
    "yes_no": Task(("Yes", "No"), (kind_questions(0), kind_questions(1))),
}


@torch.no_grad()
def measure(model: Any, tokenizer: Any, task: Task, questions: list[dict], hinted: bool = False) -> dict[str, float]:
    """Mean probabilities of a valid and of a right answer; `hinted`: with the feedback in the prompt."""
    was_training = model.training
    model.eval()
    valid = right = 0.0
    for row in questions:
        prompt = row["prompt"]
        if hinted:
            templates = Templates(*TEMPLATES.values())
            prompt = teacher_prompt(prompt, Hint(None, task.told(row["answer"])), templates)
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        asked = tokenizer(text, add_special_tokens=False).input_ids
        for word in task.words:
            written = [*tokenizer(word, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
            ids = torch.tensor([asked + written])
            logits = model(input_ids=ids, logits_to_keep=len(written) + 1).logits[0, :-1].float()
            chosen = logits.log_softmax(-1).gather(1, torch.tensor(written)[:, None])
            probability = chosen.sum().exp().item()
            valid += probability
            right += probability * (word == row["answer"])
    model.train(was_training)
    return {"valid": round(valid / len(questions), 4), "right": round(right / len(questions), 4)}


def shares(model: Any, tokenizer: Any, task: Task) -> dict[str, dict[str, float]]:
    trained, held_out = task.rows()
    return {
        "held_out": measure(model, tokenizer, task, held_out), "trained": measure(model, tokenizer, task, trained),
        "with_feedback": measure(model, tokenizer, task, held_out, hinted=True),
    }  # fmt: skip


class Curve(TrainerCallback):
    """The shares on held-out rows every four steps, written to a file as they come."""

    def __init__(self, tokenizer: Any, task: Task, path: Path) -> None:
        self._tokenizer, self._task, self._path = tokenizer, task, path
        self.points: list[dict[str, float]] = []

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step % 4 == 0:
            shares = measure(model, self._tokenizer, self._task, self._task.rows()[1])
            self.points.append({"rollouts": state.global_step * args.generation_batch_size, **shares})
            self._path.write_text(json.dumps(self.points))


def settings(out: Path, rate: float, steps: int) -> SDPOConfig:
    return SDPOConfig(
        output_dir=str(out),
        learning_rate=rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        max_steps=steps,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=8,
        teacher_model_kind="ema",
        teacher_update_rate=0.1,
        distillation_alpha=0.5,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to="none",
        logging_steps=4,
        **TEMPLATES,
    )


def train(kind: str, task: Task, source: str, rate: float, steps: int, out: Path) -> dict[str, Any]:
    """One run from the untouched model, and what it came to."""
    args = settings(out / f"{kind}_{rate:g}", rate, steps)
    trained, _ = task.rows()
    cls: type = SDPOTrainer
    if kind == "grpo":
        shared = {f.name: getattr(args, f.name) for f in fields(GRPOConfig) if f.init}
        cls, args = GRPOTrainer, GRPOConfig(**{**shared, "generation_batch_size": None})
    lora = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    curve = Curve(tokenizer, task, out / f"{kind}_{rate:g}.json")
    rewards: list[float] = []

    def grade(**columns: Any) -> list[float]:
        made = task.grade(**columns)
        rewards.extend(made)
        return made

    trainer = cls(
        model=AutoModelForCausalLM.from_pretrained(source), reward_funcs=grade, args=args,
        train_dataset=Dataset.from_list(trained), peft_config=lora, processing_class=tokenizer, callbacks=[curve],
    )  # fmt: skip
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    return {
        "method": kind, "learning_rate": rate, "rollouts": len(rewards), "rewarded": int(sum(rewards)),
        **shares(trainer.model, tokenizer, task), "curve": curve.points, "seconds": round(seconds),
    }  # fmt: skip


def table(results: dict) -> str:
    lines = [
        "| | right rollouts | held-out: valid | right | trained: valid | right | with feedback: valid | right | s |"
    ]
    lines.append("|" + " --- |" * 9)
    for run in [{"method": "before", **results["before"]}, *results["runs"]]:
        rate = f", learning rate {run['learning_rate']:g}" if "learning_rate" in run else ""
        parts = [run[name][share] for name in ("held_out", "trained", "with_feedback") for share in ("valid", "right")]
        cells = " | ".join(f"{part:.3f}" for part in parts)
        name = {"sdpo": "SDPO", "grpo": "GRPO"}.get(run["method"], run["method"])
        found = f"{run['rewarded']} of {run['rollouts']}" if "rewarded" in run else ""
        lines.append(f"| {name}{rate} | {found} | {cells} | {run.get('seconds', '')} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M-Instruct, see get_smollm2.py")
    parser.add_argument("--task", choices=TASKS, default="reviews", help="what is asked, see TASKS")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps of 16 rollouts")
    parser.add_argument("--sdpo_learning_rates", type=float, nargs="*", default=[1e-3])
    parser.add_argument("--grpo_learning_rates", type=float, nargs="*", default=[1e-3, 1e-4])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("runs/train_real"))
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    task = TASKS[options.task]
    model = AutoModelForCausalLM.from_pretrained(options.model)
    before = shares(model, AutoTokenizer.from_pretrained(options.model), task)
    del model
    print("before", before, flush=True)
    results: dict[str, Any] = {"before": before, "runs": []}
    for kind, rates in (("sdpo", options.sdpo_learning_rates), ("grpo", options.grpo_learning_rates)):
        for rate in rates:
            results["runs"].append(train(kind, task, options.model, rate, options.steps, options.out))
            print(results["runs"][-1], flush=True)
            (options.out / "results.json").write_text(json.dumps(results, indent=1))
    print(table(results))
    return results


if __name__ == "__main__":
    main()
