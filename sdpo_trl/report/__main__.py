"""The heat map of an answer, from the command line.

    python -m sdpo_trl.report --model Qwen/Qwen3-0.6B --prompt "What is 17 * 23?" --feedback "Carry the 2."
    python -m sdpo_trl.report --model out/checkpoint-100 --table out/completions/completions_00100.parquet

Without `--answer`, one is sampled. The path of the page is printed.
"""

import argparse
import json
from pathlib import Path

from transformers import set_seed

from .record import Heatmap
from .rescore import Rescorer, scoring_config
from .table import table_heatmap


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(
        "python -m sdpo_trl.report", description="Show how a teacher that has read feedback judges each token."
    )
    add = options.add_argument
    add("--model", required=True, help="The student: a Hub id or a folder.")
    add("--teacher_model", help="Another teacher: a Hub id or a folder. By default the student itself.")
    add("--prompt", help="The question, as a user's turn where the tokenizer has a chat template.")
    add("--feedback", help="What was said about the answer.")
    add("--solution", help="A demonstration that the teacher is shown.")
    add("--answer", action="append", help="The answer to look at; give it several times to compare. Default: sampled.")
    add("--table", type=Path, help="A completions table (parquet) instead of a prompt.")
    add("--row", type=int, default=0, help="Which of the table's prompts, from 0.")
    add("--rollouts", type=int, help="How many of its rollouts; default: all.")
    add("--topk", type=int, default=10, help="Likeliest tokens to list, of each model.")
    add("--alpha", type=float, default=0.5, help="0: KL(teacher || student), 1: KL(student || teacher), between: JSD.")
    add("--temperature", type=float, default=1.0, help="Sampling temperature of both models.")
    add("--max_completion_length", type=int, default=512, help="Of a sampled answer, in tokens.")
    add(
        "--chat_template_kwargs",
        type=json.loads,
        default={},
        help="As in training, say '{\"enable_thinking\": false}'.",
    )
    add("--seed", type=int, default=42)
    add("--out", type=Path, default=Path("heatmap.html"), help="The page.")
    return options


def main(argv: list[str] | None = None) -> Heatmap:
    """Parse, score, write; the heat map is returned. Options that contradict each other end with status 2."""
    options = parser()
    args = options.parse_args(argv)
    if (args.prompt is None) == (args.table is None):
        options.error("give either --prompt or --table")
    if args.prompt is not None and not (args.feedback or args.solution):
        options.error("--prompt needs --feedback or --solution: without them the teacher reads what the student reads")
    if args.table is not None and (args.feedback or args.solution or args.answer):
        options.error("--table brings its own answers and feedback: drop --feedback, --solution and --answer")
    set_seed(args.seed)
    kind = {} if args.teacher_model is None else {"teacher_model_kind": "ema"}  # its default: not in use
    config = scoring_config(
        distillation_alpha=args.alpha,
        temperature=args.temperature,
        max_completion_length=args.max_completion_length,
        chat_template_kwargs=args.chat_template_kwargs,
        **kind,
    )
    scorer = Rescorer(args.model, teacher_model=args.teacher_model, args=config, topk=args.topk)
    if args.table is not None:
        heatmap = table_heatmap(args.table, scorer, prompt=args.row, rollouts=args.rollouts)
    else:
        heatmap = scorer.heatmap(args.prompt, feedback=args.feedback, solution=args.solution, answer=args.answer)
    print(heatmap.save(args.out))
    return heatmap


if __name__ == "__main__":
    main()
