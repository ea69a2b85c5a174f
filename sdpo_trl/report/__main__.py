"""The report of a run, or the heat map of an answer, from the command line.

    python -m sdpo_trl.report out
    python -m sdpo_trl.report out --model out/checkpoint-100
    python -m sdpo_trl.report --model Qwen/Qwen3-0.6B --prompt "What is 17 * 23?" --feedback "Carry the 2."
    python -m sdpo_trl.report --model out/checkpoint-100 --table out/completions/completions_00100.parquet

A run's report links the heat maps that `TokenHeatmapCallback` wrote; with `--model`, the other rollouts that it shows
are scored now. Without `--answer`, one is sampled. The path of the page is printed.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from .record import Heatmap
from .run_maps import MapWriter
from .run_page import REPORT, run_report
from .table import table_heatmap

if TYPE_CHECKING:
    from .rescore import Rescorer


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(
        "python -m sdpo_trl.report",
        description="Show a run on one page; or show how a teacher that has read feedback judges each token.",
    )
    add = options.add_argument
    add("run", nargs="?", type=Path, help="The `output_dir` of a run: its report is written.")
    add("--model", help="The student: a Hub id or a folder. With a run: scores the rollouts that it shows.")
    add("--teacher_model", help="Another teacher: a Hub id or a folder. By default the student itself.")
    add("--prompt", help="The question, as a user's turn where the tokenizer has a chat template.")
    add("--feedback", help="What was said about the answer.")
    add("--solution", help="A demonstration that the teacher is shown.")
    add("--answer", action="append", help="The answer to look at; give it several times to compare. Default: sampled.")
    add("--table", type=Path, help="A completions table (parquet) instead of a prompt.")
    add("--row", type=int, default=0, help="Which of the table's prompts, from 0.")
    add("--rollouts", type=int, help="How many of its rollouts; default: all.")
    add("--topk", type=int, default=10, help="Likeliest tokens to list, of each model.")
    add(
        "--alpha",
        type=float,
        help="0: KL(teacher || student), 1: KL(student || teacher), between: JSD. Default: the run's, or 0.5.",
    )
    add("--temperature", type=float, help="Sampling temperature of both models. Default: the run's, or 1.")
    add("--max_completion_length", type=int, default=512, help="Of a sampled answer, in tokens.")
    add(
        "--chat_template_kwargs",
        type=json.loads,
        help="As in training, say '{\"enable_thinking\": false}'. Default: the run's, or none.",
    )
    add("--seed", type=int, default=42)
    add("--out", type=Path, help=f"The page. Default: {REPORT} in the run's folder, or heatmap.html here.")
    return options


_ONLY_HEATMAP = ("prompt", "feedback", "solution", "answer", "table", "rollouts")


def main(argv: list[str] | None = None) -> "Heatmap | Path":
    """Parse, score, write; the heat map, or the report's path, is returned. Contradictions end with status 2."""
    options = parser()
    args = options.parse_args(argv)
    given = [name for name in _ONLY_HEATMAP if getattr(args, name) is not None]
    if args.run is not None and given:
        options.error(f"a run's report takes no --{given[0]}: for a heat map, leave {args.run} out")
    if args.run is not None:
        return _report(options, args)
    if args.model is None:
        options.error("give the folder of a run, or --model with --prompt or --table")
    if (args.prompt is None) == (args.table is None):
        options.error("give either --prompt or --table")
    if args.prompt is not None and not (args.feedback or args.solution):
        options.error("--prompt needs --feedback or --solution: without them the teacher reads what the student reads")
    if args.table is not None and (args.feedback or args.solution or args.answer):
        options.error("--table brings its own answers and feedback: drop --feedback, --solution and --answer")
    scorer = _scorer(args, {})
    if args.table is not None:
        heatmap = table_heatmap(args.table, scorer, prompt=args.row, rollouts=args.rollouts)
    else:
        heatmap = scorer.heatmap(args.prompt, feedback=args.feedback, solution=args.solution, answer=args.answer)
    print(heatmap.save(args.out or Path("heatmap.html")))
    return heatmap


def _scorer(args: argparse.Namespace, of_run: dict[str, object]) -> "Rescorer":
    """Scores as the run did, where the command line does not say otherwise."""
    from transformers import set_seed  # here, since a run's report needs neither models nor TRL

    from .rescore import Rescorer, scoring_config

    set_seed(args.seed)
    said = {
        "distillation_alpha": args.alpha,
        "temperature": args.temperature,
        "chat_template_kwargs": args.chat_template_kwargs,
    }
    said = {name: value for name, value in said.items() if value is not None}
    # An external teacher never moves: its kind, which is not in use, stays at its default.
    kind = {} if args.teacher_model is None else {"teacher_model_kind": "ema"}
    config = scoring_config(**{"max_completion_length": args.max_completion_length, **of_run, **said, **kind})
    return Rescorer(args.model, teacher_model=args.teacher_model, args=config, topk=args.topk)


def _report(options: argparse.ArgumentParser, args: argparse.Namespace) -> Path:
    out = args.out or args.run / REPORT
    try:
        writer = None
        if args.model is not None:
            writer = MapWriter(args.run, out, lambda of_run: _scorer(args, of_run))
        page = run_report(args.run, out, writer)
    except (OSError, ImportError) as error:
        options.error(str(error))
    print(page)
    return page


if __name__ == "__main__":
    main()
