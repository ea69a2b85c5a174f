"""
What two processes do for test_distributed.py.

`torchrun --nproc_per_node 2 tests/distributed_worker.py FOLDER` runs every scenario; each process writes what it saw
to `FOLDER/NAME-RANK.pt`.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import tiny  # noqa: E402
import torch  # noqa: E402

# One group of four rollouts per process with batches of four; global row order.
ANSWERS = ["ab$", "abc$", "x", "hello$", "abcde$", "a$", "xyz", "qrs$"]
RANK = int(os.environ.get("RANK", "0"))


def answers_of_this_process(per_process):
    """A `rollout_func` that gives each process its part of `ANSWERS`."""
    return tiny.scripted(ANSWERS[RANK * per_process :] + ANSWERS[: RANK * per_process])


def told_by_text(completions, log_extra, **kwargs):
    """Success and feedback depend on the answer alone, wherever it is scored."""
    log_extra("feedback", [None if text.startswith("x") else f"no: {text}{text}" for text in completions])
    return [1.0 if text == "abc" else 0.0 for text in completions]


GRADIENT_CASES = {
    "plain": {},
    "blend": {"distillation_weight": 0.5, "beta": 0.2, "loss_type": "grpo"},
    "topk": {"distillation_mode": "topk_logits", "distillation_topk": 5, "distillation_alpha": 0.0},
    "routed": {"distillation_weight": 0.5, "distillation_routing": "failed", "loss_type": "grpo"},
    "weighed": {"token_weighting": "teacher_entropy", "prompt_weighting": "difficulty"},
    "gated": {"distillation_routing": "positive_advantage", "distillation_weight": 0.5},
}


def first_gradient(folder, processes, **options):
    """The gradient of one step on eight rollouts, and the loss that was logged."""
    seen = tiny.FirstGradient()
    trainer = tiny.trainer(
        folder,
        told_by_text,
        per_device_train_batch_size=8 // processes,
        max_steps=1,
        max_grad_norm=0.0,
        trainer_callbacks=[seen],
        trainer_rollout_func=answers_of_this_process(8 // processes),
        **options,
    )
    trainer.train()
    (log,) = tiny.training_logs(trainer)
    return seen.value, {name: value for name, value in log.items() if name == "loss" or name.startswith("sdpo/")}


def gradients(folder):
    return {name: first_gradient(folder, 2, **options) for name, options in GRADIENT_CASES.items()}


def replicas(folder):
    """Three steps on different rollouts: the weights, the teacher's, and the keys that were logged."""
    result = {}
    for name, options in {
        "full": {"model": tiny.build_model()},
        "lora": {
            "model": tiny.build_model(),
            "trainer_peft_config": tiny.lora(),
            "teacher_model_kind": "trust_region",
        },
    }.items():
        # `ddp_broadcast_buffers` and the like must not be what keeps the processes alike.
        trainer = tiny.trainer(
            folder, told_by_text, per_device_train_batch_size=4, max_steps=3, learning_rate=1e-2, beta=0.1, **options
        )
        keys, rollouts = [], []
        log, generate = trainer.log, trainer._generate_and_score_completions

        def logged(logs, *args, log=log, trainer=trainer, keys=keys, **kwargs):
            log(logs, *args, **kwargs)
            keys.append(sorted(logs))

        def generated(inputs, generate=generate, rollouts=rollouts):
            output = generate(inputs)
            rollouts.append(output["completion_ids"])
            return output

        trainer.log, trainer._generate_and_score_completions = logged, generated
        before = tiny.trained(trainer.model)
        trainer.train()
        result[name] = {
            "before": before,
            "student": tiny.trained(trainer.model),
            "stores": {key: dict(store._values) for key, store in trainer._stores.items()},
            "keys": keys,
            "rollouts": rollouts,
        }
    return result


def pairs(folder):
    """What student and teacher read, row by row, when the loss sees them: after gather, shuffle and split."""
    data = tiny.prompts(8)

    def tagged(prompts, completions, log_extra, **kwargs):
        log_extra("feedback", [f"<{p}|{c}>" for p, c in zip(prompts, completions, strict=True)])
        return [0.0] * len(completions)

    trainer = tiny.trainer(
        folder, tagged, data=data, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=2
    )
    rows, compute = [], trainer._compute_loss

    def watched(model, inputs):
        for i in range(inputs["prompt_ids"].size(0)):
            texts = [
                trainer._tokenizer.decode(
                    inputs[f"{name}_ids"][i][inputs[f"{name}_mask"][i].bool()], skip_special_tokens=True
                )
                for name in ("prompt", "completion", "teacher_prompt")
            ]
            rows.append(texts)
        return compute(model, inputs)

    trainer._compute_loss = watched
    trainer.train()
    return rows


def demonstration(folder):
    """One group of four over both processes, whose only success is a row of the second."""
    trainer = tiny.trainer(
        folder,
        lambda completions, **kwargs: [1.0 if text == "win" else 0.0 for text in completions],
        per_device_train_batch_size=2,
        trainer_rollout_func=tiny.scripted(["lose$", "bad$"] if RANK == 0 else ["win$", "no$"]),
        max_steps=1,
    )
    inputs = tiny.micro_batches(trainer)[0]
    rows = []
    for answer, available, hint in zip(
        inputs["completion_ids"], inputs["feedback_available"], inputs["teacher_prompt_ids"], strict=True
    ):
        rows.append((trainer._tokenizer.decode(answer), available.item(), trainer._tokenizer.decode(hint)))
    return {"rows": rows, "metrics": trainer._sums.flush("train")}


def all_fail(folder):
    """The first process has nothing to learn, then neither has; two evaluations in between."""
    finished = []
    for name, options in {
        "ema": {},
        "trust_region": {"teacher_model_kind": "trust_region"},
        "blend": {"distillation_weight": 0.5},
        "stale": {"num_iterations": 2},
        "external": {"trainer_teacher_model": tiny.build_model(seed=7)},
    }.items():

        def reward(completions, log_extra, trainer_state, **kwargs):
            silent = RANK == 0 or trainer_state.global_step >= 2
            log_extra("feedback", [None if silent else "no"] * len(completions))
            return [0.0] * len(completions)

        trainer = tiny.trainer(
            folder, reward, per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=4,
            eval_strategy="steps", eval_steps=2, trainer_eval_dataset=tiny.prompts(2), **options,
        )  # fmt: skip
        trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        finished.append((name, trainer.state.global_step, losses))
    trainer.accelerator.end_training()
    return finished


CONTROLS = {
    "distillation_weight": 0.7, "distillation_routing": "failed", "distillation_weight_schedule": "linear",
    "distillation_log_ratio_clip_running": 2.0, "token_weighting": "teacher_entropy", "prompt_weighting": "difficulty",
    "teacher_proximal_share": 0.9, "teacher_model_kind": "snapshot", "teacher_sync_steps": 1,
    "teacher_snapshot_gate": True, "success_buffer_size": 2, "demonstration_choice": "random",
}  # fmt: skip


def controls(folder):
    """Everything on, different rollouts: replicas and what they remember; the second process never succeeds."""

    def reward(completions, log_extra, **kwargs):
        log_extra("feedback", ["no"] * len(completions))
        return [1.0 if RANK == 0 and len(text) % 2 else 0.0 for text in completions]

    trainer = tiny.trainer(
        folder, reward, per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=4, learning_rate=1e-2,
        eval_strategy="steps", eval_steps=2, trainer_eval_dataset=tiny.prompts(2), **CONTROLS,
    )  # fmt: skip
    trainer.train()
    evaluated = [row for row in trainer.state.log_history if "eval_sdpo/teacher_success_share" in row]
    return {
        "student": tiny.trained(trainer.model),
        "teacher": dict(trainer._stores["teacher"]._values),
        "memory": {name: part.state() for name, part in trainer._remembers.items()},
        "evaluated": len(evaluated),
    }


def images_on_one_process(folder):
    """Every other group of a vision-language model has no image: one process runs a text batch, the other images."""
    from test_vision import losses, vision_trainer

    return [
        losses(
            vision_trainer(
                folder, images="alternate", per_device_train_batch_size=4, teacher_model_kind=kind,
                log_multimodal=False, shuffle_dataset=False, ddp_find_unused_parameters=True,
            )
        )
        for kind in ("ema", "live")
    ]  # fmt: skip


def agents(folder):
    """One process acts over several turns and is told something about them, the other answers at once."""
    from test_agents import add, call, make

    first = call("add", a=1, b=2) + "$"
    scripts = [[first, first, "done$"], [first, "ok$"]] if RANK == 0 else [["at once$"], ["x$"]]

    def judge(prompts, completions, rewards, **columns):
        return [[(1, "look")] if len(turns) > 1 else None for turns in completions]

    seen = []
    for span in ("all", "hinted_turn"):
        trainer = make(
            folder, scripts, tiny.never, trainer_tools=[add], trainer_feedback_func=judge, distillation_span=span,
            per_device_train_batch_size=4, max_steps=2, teacher_model_kind="base",
        )  # fmt: skip
        trainer.train()
        seen.append((tiny.trained(trainer.model), trainer.state.log_history))
    return seen


def continued(folder):
    """Resumed in the middle of the second epoch: what each process asks, and where it ends."""
    options = {
        "data": tiny.prompts(8), "per_device_train_batch_size": 4, "max_steps": 8, "save_strategy": "steps",
        "save_steps": 6,
    }  # fmt: skip
    runs = []
    for name, checkpoint in (("a", None), ("b", str(folder / "a" / "checkpoint-6"))):
        trainer = tiny.trainer(folder / name, tiny.telling(), **options)
        asked = []
        generate = trainer._generate_and_score_completions
        trainer._generate_and_score_completions = lambda rows, asked=asked, generate=generate: (
            asked.append([row["prompt"] for row in rows]),
            generate(rows),
        )[1]
        trainer.train(resume_from_checkpoint=checkpoint)
        runs.append((asked, tiny.trained(trainer.model)))
    return runs


def watched(folder):
    """Two steps with and without heat maps: the weights, and the pages that this process wrote."""
    from sdpo_trl.report import TokenHeatmapCallback

    pages = folder / f"pages-{RANK}"
    result = {}
    for name, callbacks in (("with", [TokenHeatmapCallback(every=1, rollouts=2, folder=pages)]), ("without", [])):
        trainer = tiny.trainer(
            folder, told_by_text, per_device_train_batch_size=4, max_steps=2, trainer_callbacks=callbacks
        )
        trainer.train()
        result[name] = tiny.trained(trainer.model)
    result["pages"] = {path.name: path.read_text(encoding="utf-8") for path in pages.glob("*")}
    return result


def problems(folder):
    """Solved problems rest and rounds are merged, with a group per process and with groups across both."""
    from sdpo_trl.problem_trainer import ProblemPlan, ProblemTrainer

    def reward(prompts, log_extra, **columns):
        numbers = [int(prompt.split(":")[0].removeprefix("task ")) for prompt in prompts]
        log_extra("feedback", [f"no {i} {RANK}" if number in (4, 5) else None for i, number in enumerate(numbers)])
        asked.append(numbers)
        return [float(number < 2) for number in numbers]

    result = []
    for group in (4, 8):
        asked = []
        trainer = ProblemTrainer(
            model=tiny.build_model(), reward_funcs=reward,
            args=tiny.config(folder / str(group), per_device_train_batch_size=4, num_generations=group, max_steps=8),
            train_dataset=tiny.prompts(8), processing_class=tiny.build_tokenizer(),
            problem_plan=ProblemPlan(skip_solved=True, signal_rows=6, max_rounds=4),
        )  # fmt: skip
        trainer.train()
        solved = trainer._solved.state()
        result.append((asked, tiny.trained(trainer.model), solved, tiny.training_logs(trainer)))
    return result


def main(folder):
    scenarios = (
        problems,
        agents,
        continued,
        gradients,
        replicas,
        pairs,
        demonstration,
        controls,
        watched,
        images_on_one_process,
        all_fail,
    )  # the last one may hang, and ends the group
    for scenario in scenarios:
        result = scenario(folder / scenario.__name__)
        torch.save(result, folder / f"{scenario.__name__}-{RANK}.pt")


if __name__ == "__main__":
    from accelerate import PartialState

    size = PartialState(cpu=True, backend="gloo").num_processes
    assert size == 2, f"torchrun was to start two processes, but there are {size}"
    main(Path(sys.argv[1]))
