"""
One update of a session in seconds, with what prompts have in common encoded once and without.

`python tests/benchmarks/online.py [--model FOLDER]`: LoRA (rank 16, all linear layers), a context of 512
tokens, denied answers of 64; a random model of SmolLM2-135M's shape where no other is given.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import models
import tiny
import torch
from measure import interleave, prepare, publish
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from sdpo_trl.online import OnlineTrainer, online_config

CONTEXT, ANSWER = 512, 64
FEEDBACK = "You overwrote the whole file. Change only the line that is asked for, with the tool that edits lines."


def build(folder: str, name: str | None, teacher: str) -> OnlineTrainer:
    if name is None:
        model, tokenizer = models.smollm(), tiny.build_tokenizer()
    else:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    args = online_config(
        folder, teacher_model_kind=teacher, max_completion_length=ANSWER, use_cpu=True, bf16=False, disable_tqdm=True
    )
    trainer = OnlineTrainer(
        model.float(), args, processing_class=tokenizer,
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )  # fmt: skip
    trainer.open()
    return trainer


def rows_of(trainer: OnlineTrainer, count: int) -> list[dict[str, Any]]:
    """Denied answers to one prompt of exactly `CONTEXT` tokens, header included."""
    generator = torch.Generator().manual_seed(1)
    words = 1
    while True:
        turn = {"role": "user", "content": "a" * words if len(trainer._tokenizer) < 1000 else "yes " * words}
        prompt = trainer.prompt_ids([turn], [])
        if len(prompt) >= CONTEXT:
            break
        words += CONTEXT - len(prompt)
    assert len(prompt) == CONTEXT, len(prompt)
    answers = torch.randint(110, len(trainer._tokenizer), (count, ANSWER), generator=generator)
    if len(trainer._tokenizer) < 1000:
        answers = torch.randint(10, 100, (count, ANSWER), generator=generator)
    values = trainer.log_probs([(prompt, ids) for ids in answers.tolist()])
    return [
        {
            "prompt": [turn],
            "prompt_ids": prompt,
            "completion_ids": ids,
            "logprobs": old,
            "privileged_context": FEEDBACK,
        }
        for ids, old in zip(answers.tolist(), values, strict=True)
    ]


def measure(trainer: OnlineTrainer, count: int, rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    rows = rows_of(trainer, count)

    def update(shares: bool) -> None:
        trainer.shares_prefixes = shares
        trainer.update(rows)

    return interleave({"shared": lambda: update(True), "each by itself": lambda: update(False)}, rounds, clock)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=["live-1", "live-4", "ema-4"], help="teacher and denied answers")
    parser.add_argument("--processor", action="store_true", help="processor time, for a machine that is shared")
    parser.add_argument("--out", default="runs/benchmarks")
    options = parser.parse_args()
    clock = time.process_time if options.processor else time.perf_counter
    prepare()
    table = []
    with tempfile.TemporaryDirectory() as folder:
        for case in options.cases:  # another teacher than a live one and one answer: nothing to share
            teacher, count = case.split("-")
            trainer = build(folder, options.model, teacher)
            seconds = measure(trainer, int(count), options.rounds, clock)
            ratio = seconds["shared"] / seconds["each by itself"]
            table.append({"teacher": teacher, "denied answers": int(count), **seconds, "ratio": ratio})
            publish("online", table, Path(options.out))


if __name__ == "__main__":
    main()
