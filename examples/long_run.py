"""A long run: what breaks with a plain teacher, and what the controls do about it. Offline, two CPU cores.

    python examples/long_run.py --seeds 0 1 2 --steps 600

The quickstart's task and warm start, trained for 600 steps (38,400 rollouts) instead of 100, with every setting of
`SETTINGS` below and nothing else changed. Writes `results.json` and `long_run.png` to `--out`: success without a hint
on trained, unseen and known names, and the self-teacher's success with feedback, against the steps.
"""

import argparse
import copy
import json
import os
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything of Hugging Face is imported; nothing is fetched

import letters
import quickstart
import torch
from datasets import Dataset
from matplotlib import pyplot
from transformers import TrainerCallback

from sdpo_trl import SDPOConfig, SDPOTrainer

# What each run changes in the quickstart's options (`quickstart.DEFAULTS`); all distil by the JSD.
EMA = {"teacher_model_kind": "ema", "teacher_update_rate": 0.05, "distillation_alpha": 0.5}
SNAPSHOT = {"teacher_model_kind": "snapshot", "teacher_sync_steps": 20, "distillation_alpha": 0.5}
ROUTED = {"distillation_weight": 0.5, "distillation_routing": "failed", "token_weighting": "teacher_entropy"}
# One answer per prompt, each batch of them trained on 32 times in a row, at six times the quickstart's learning rate.
STALE = {
    "teacher_model_kind": "base", "distillation_alpha": 0.5, "num_generations": 1, "num_iterations": 32,
    "learning_rate": 3e-3, "distillation_is_clip": None,
}  # fmt: skip
SETTINGS = {
    "live": {"teacher_model_kind": "live", "distillation_alpha": 0.5},
    "ema": EMA,
    "snapshot": SNAPSHOT,
    "ema, routed": {**EMA, **ROUTED},
    "snapshot, gated": {**SNAPSHOT, "teacher_snapshot_gate": True},
    "snapshot, gated and routed": {**SNAPSHOT, "teacher_snapshot_gate": True, **ROUTED},
    "stale": STALE,
    "stale, ratio clip 2": {**STALE, "distillation_is_clip": 2.0},
    "stale, clipped": {
        **STALE, "distillation_is_clip": 2.0, "distillation_is_clip_low": 0.5,
        "distillation_log_ratio_clip_running": 3.0,
    },
}  # fmt: skip
MEASURES = ("trained", "unseen", "known", "with_feedback")


class Curves(TrainerCallback):
    """Exact success on all kinds of names, every so many steps."""

    def __init__(self, tokenizer, tasks, every: int) -> None:
        self.points: list[dict[str, float]] = []
        self._tokenizer, self._tasks, self._every = tokenizer, tasks, every

    def on_train_begin(self, args, state, control, model, **kwargs):
        self._measure(0, model)

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step % self._every == 0:
            self._measure(state.global_step, model)

    def _measure(self, step: int, model) -> None:
        trained, unseen, known = self._tasks
        asked = {"trained": (trained, "none"), "unseen": (unseen, "none"), "known": (known, "none"),
                 "with_feedback": (trained, "feedback")}  # fmt: skip
        rates = {name: round(letters.success_rate(model, self._tokenizer, *what), 4) for name, what in asked.items()}
        self.points.append({"step": step, **rates})


def train(name: str, model, tokenizer, tasks, seed: int, steps: int, out: Path) -> dict:
    options = {**quickstart.DEFAULTS, "max_steps": steps, "seed": seed, "logging_steps": 20, "disable_tqdm": True,
               "output_dir": str(out / "run"), **SETTINGS[name]}  # fmt: skip
    per_step = options["per_device_train_batch_size"] // options["num_generations"]
    trained = tasks[0] * -(-per_step // len(tasks[0]))  # a step draws so many rows
    rows = Dataset.from_dict({"prompt": [t.prompt for t in trained], "target": [str(t.program) for t in trained]})
    curves = Curves(tokenizer, tasks, every=20)
    trainer = SDPOTrainer(
        model=copy.deepcopy(model), reward_funcs=quickstart.passes_tests, args=SDPOConfig(**options),
        train_dataset=rows, processing_class=tokenizer, callbacks=[curves],
    )  # fmt: skip
    start = time.perf_counter()
    trainer.train()
    return {"seconds": round(time.perf_counter() - start, 1), "points": curves.points}


def table(results: dict) -> str:
    """One row per setting: the best and the last success on trained names, the last of the others; mean (worst)."""
    lines = ["| setting | best trained | last trained | unseen | known | with feedback |", "|" + " --- |" * 6]
    for name in SETTINGS:
        runs = [seed[name]["points"] for seed in results.values() if name in seed]
        if not runs:
            continue
        columns = [[max(p["trained"] for p in run) for run in runs], *([r[-1][m] for r in runs] for m in MEASURES)]
        cells = " | ".join(f"{sum(values) / len(values):.2f} ({min(values):.2f})" for values in columns)
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def plot(results: dict, path: Path) -> None:
    """Every seed a line; what is compared with each other in one row."""
    parts = [[name for name in SETTINGS if name.startswith("stale") == stale] for stale in (False, True)]
    figure, axes = pyplot.subplots(2, 4, figsize=(16, 8), sharey=True, layout="constrained")
    for row, names in zip(axes, parts, strict=True):
        _plot_row(row, names, results)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _plot_row(axes, names: list[str], results: dict) -> None:
    colors = pyplot.colormaps["tab10"]
    for axis, measure in zip(axes, MEASURES, strict=True):
        for index, name in enumerate(names):
            for count, runs in enumerate(results.values()):
                if name in runs:
                    points = runs[name]["points"]
                    axis.plot([p["step"] for p in points], [p[measure] for p in points], color=colors(index),
                              alpha=0.75, linewidth=1.5, label=name if count == 0 else None)  # fmt: skip
        axis.set(title=measure.replace("_", " "), xlabel="optimizer steps", ylim=(-0.02, 1.02))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("success at temperature 1")
    axes[0].legend(fontsize="small")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--out", type=Path, default=Path("runs/long_run"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict] = {}
    for seed in options.seeds:
        tasks, tokenizer = letters.all_tasks(seed), letters.build_tokenizer()
        model = letters.build_model(tokenizer, seed)
        letters.warm_start(model, tokenizer, seed)
        results[str(seed)] = {}
        for name in options.settings:
            report = train(name, model, tokenizer, tasks, seed, options.steps, options.out)
            results[str(seed)][name] = report
            print(f"seed {seed}, {name}: {report['points'][-1]} in {report['seconds']} s", flush=True)
            (options.out / "results.json").write_text(json.dumps(results, indent=1))
    print(table(results))
    plot(results, options.out / "long_run.png")


if __name__ == "__main__":
    main()
