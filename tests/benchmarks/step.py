"""One training step on the same rollouts: ours, TRL's experimental SDPO, TRL's GRPO; generation timed apart.

A step is the teacher's pass, the loss, the backward pass and the optimizer, on a random model of SmolLM2-135M's shape,
full fine-tuning, full-vocabulary JSD, an EMA teacher, 8 answers to one question of 128 tokens. The teacher's prompt
has 384 tokens: the same for all rows (a sibling's success was shown), or each row its own feedback.

python tests/benchmarks/step.py [--lengths 64 256] [--shared] [--out FOLDER]
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import measure  # noqa: E402
import models  # noqa: E402
import torch  # noqa: E402


def finish(trainer, optimizer, loss) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def ready(trainer, case):
    """Put a trainer into its training loop; its optimizer and the rollouts."""
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-6)
    return optimizer, models.batch(128, 384, case["length"], case["shared"], case["scored"])


# Every control that changes a step's work, beside each other.
CONTROLS = {
    "distillation_weight": 0.5, "distillation_routing": "failed", "distillation_weight_schedule": "cosine",
    "distillation_log_ratio_clip": 5.0, "distillation_log_ratio_clip_running": 3.0, "distillation_is_clip_low": 0.1,
    "token_weighting": "teacher_entropy", "prompt_weighting": "difficulty", "teacher_proximal_share": 0.9,
    "success_buffer_size": 2, "demonstration_choice": "shortest",
}  # fmt: skip


def our_step(folder, case, **options):
    trainer = models.ours(folder, models.smollm(), max_completion_length=256, **options)
    optimizer, batch = ready(trainer, case)
    trainer._teacher_pass._verified = True  # the one comparison of a run is not part of a step
    trainer._gap_size.value = 1.0
    active = batch["feedback_available"][:, None] & batch["completion_mask"].bool()
    if "distillation_routing" in options:
        kept = ~batch["feedback_available"]
        tokens, rows = torch.tensor(8 * case["length"]), torch.tensor(8)
        batch |= {"in_policy_term": kept, "policy_tokens": kept.sum() * case["length"], "policy_rows": kept.sum(),
                  "all_tokens": tokens, "all_rows": rows, "prompt_weight": torch.ones(8)}  # fmt: skip

    def call():
        made = trainer._teacher_pass.cached(batch, active)
        finish(trainer, optimizer, trainer._compute_loss(trainer.model, {**batch, **made}))
        trainer._stores["teacher"].move(0.05)

    return call


def trl_step(folder, case):
    trainer = models.trl_sdpo(folder, models.smollm())
    optimizer, batch = ready(trainer, case)
    ids = torch.cat([batch["teacher_prompt_ids"], batch["completion_ids"]], dim=1)
    inputs = {
        **{key: batch[key] for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")},
        "teacher_input_ids": ids, "teacher_attention_mask": torch.ones_like(ids),
        "self_distillation_mask": batch["feedback_available"].float(), "advantages": batch["advantages"],
    }  # fmt: skip
    callback = next(c for c in trainer.callback_handler.callbacks if "SyncTeacher" in type(c).__name__)

    def call():
        finish(trainer, optimizer, trainer.compute_loss(trainer.model, inputs))
        callback.on_step_end(trainer.args, trainer.state, trainer.control, model=trainer.model)

    return call


def grpo_step(folder, case):
    trainer = models.grpo(folder, models.smollm())
    optimizer, batch = ready(trainer, case)

    def call():
        finish(trainer, optimizer, trainer._compute_loss(trainer.model, batch))

    return call


def generation(folder, case):
    """Sampling the 8 answers, as both trainers do it."""
    trainer = models.grpo(folder, models.smollm())
    prompts = models.batch(128, 384, case["length"], True)["prompt_ids"]

    def call():
        with torch.no_grad():
            trainer.model.generate(prompts, min_new_tokens=case["length"], max_new_tokens=case["length"],
                                   do_sample=True, pad_token_id=0)  # fmt: skip

    return call


CONTENDERS = {
    "ours": our_step,
    "ours_blend": lambda folder, case: our_step(folder, case, distillation_weight=0.5),
    "ours_controls": lambda folder, case: our_step(folder, case, **CONTROLS),
    "trl_sdpo": trl_step,
    "grpo": grpo_step,
    "generation": generation,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256], help="tokens of an answer")
    parser.add_argument("--shared", action="store_true", help="only the rows that share a demonstration")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peak", nargs=2, metavar=("CONTENDER", "CASE"))
    options = parser.parse_args()
    measure.prepare()
    with tempfile.TemporaryDirectory() as folder:
        if options.peak:
            call = CONTENDERS[options.peak[0]](folder, json.loads(options.peak[1]))
            print(measure.peak_of(call))
            return
        rows = []
        for length in options.lengths:
            for scored, shared in ((8, True), (8, False), (4, True), (4, False)):
                if options.shared and not shared:
                    continue
                case = {"length": length, "scored": scored, "shared": shared}
                # Peaks first: this process would still hold the memory of its own models.
                peaks = {n: measure.peak_in_process(__file__, n, json.dumps(case)) for n in ("ours", "trl_sdpo")}
                calls = {name: make(folder, case) for name, make in CONTENDERS.items()}
                times = measure.interleave(calls, options.rounds)
                del calls
                rows.append({
                    **case, "ours_s": times["ours"], "/trl_sdpo": times["ours"] / times["trl_sdpo"],
                    "blend/pure": times["ours_blend"] / times["ours"],
                    "controls/blend": times["ours_controls"] / times["ours_blend"], "grpo_s": times["grpo"],
                    "generation_s": times["generation"],
                    "whole/grpo": (times["ours"] + times["generation"]) / (times["grpo"] + times["generation"]),
                    "peak/trl_sdpo": peaks["ours"] / peaks["trl_sdpo"], "ours_MB": round(peaks["ours"] / 1e6),
                })  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
    measure.publish("step", rows, options.out)


if __name__ == "__main__":
    main()
