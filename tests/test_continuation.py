"""A run that is taken up from a checkpoint is the run that was never interrupted, bit for bit on a CPU."""

import os
import random
from itertools import pairwise

import numpy as np
import pytest
import tiny
import torch
from test_agents import Room, add, call, make
from trl.trainer.utils import RepeatSampler

from sdpo_trl.sampling_order import ResumableOrder

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_orders_are_trls(shuffle):
    def sampler():
        return RepeatSampler(range(7), 2, batch_size=3, repeat_count=2, shuffle=shuffle, seed=5)

    plain = sampler()
    expected = [list(plain) for _ in range(4)]
    ours = ResumableOrder(sampler())
    assert len(ours) == len(plain)
    assert [list(ours) for _ in range(4)] == expected  # without epochs, as TRL's
    for epoch in (0, 1, 2, 3, 1):
        ours.set_epoch(epoch)
        assert list(ours) == expected[epoch]
    assert all(one != two for one, two in pairwise(expected)) == shuffle


def watched(trainer):
    """Keep what the trainer asks, and everything that moves at the end of each step."""
    asked, states = [], []
    generate = trainer._generate_and_score_completions

    def generating(inputs):
        asked.append([str(row["prompt"]) for row in inputs])
        return generate(inputs)

    trainer._generate_and_score_completions = generating

    class Keep(tiny.TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **kwargs):
            moments = {
                f"{i} {name}": value.clone()
                for i, entry in enumerate(optimizer.state.values())
                for name, value in entry.items()
            }
            stores = {f"{n} {m}": v.clone() for n, s in trainer._stores.items() for m, v in s._values.items()}
            randomness = (random.random, np.random.random, torch.rand)
            # Looked at, not drawn from.
            kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
            drawn = [float(draw() if draw is not torch.rand else draw(1)) for draw in randomness]
            random.setstate(kept[0])
            np.random.set_state(kept[1])
            torch.set_rng_state(kept[2])
            states.append({"weights": tiny.trained(trainer.model), "moments": moments, "stores": stores,
                           "random": drawn, "rate": optimizer.param_groups[0]["lr"]})  # fmt: skip

    trainer.add_callback(Keep())
    return asked, states


def compare(folder, build, first, total, steps_per_batch=1):
    """`total` steps at once, against `first` and then the rest in another trainer."""
    options = {"max_steps": total, "save_strategy": "steps", "save_steps": first, "learning_rate": 1e-2}
    whole = build(folder / "a", **options)
    asked, states = watched(whole)
    whole.train()
    torch.manual_seed(99)
    random.seed(99)
    resumed = build(folder / "b", **options)
    tiny.shift(resumed.model)
    again, later = watched(resumed)
    resumed.train(resume_from_checkpoint=str(folder / "a" / f"checkpoint-{first}"))
    assert again == asked[first // steps_per_batch :] and len(later) == total - first
    for mine, expected in zip(later, states[first:], strict=True):
        for part in ("weights", "moments", "stores"):
            tiny.assert_equal(mine[part], expected[part])
        assert mine["random"] == expected["random"] and mine["rate"] == expected["rate"]
    logs, other = tiny.training_logs(whole)[first:], tiny.training_logs(resumed)[first:]
    assert logs == other
    return asked


@pytest.mark.parametrize("kind", ["ema", "base"])
@pytest.mark.parametrize("first", [3, 4, 5], ids=["within an epoch", "at its end", "in the next one"])
def test_single_turns(tmp_path, kind, first):
    """Eight prompts, two a step: an epoch has four steps."""

    def build(folder, **options):
        return tiny.trainer(
            folder, tiny.telling(reward=tiny.even_length), data=tiny.prompts(8), teacher_model_kind=kind,
            model=tiny.build_model(attention_dropout=0.1), **options,
        )  # fmt: skip

    asked = compare(tmp_path, build, first, 7)
    assert asked[:3] != asked[4:7]  # the second epoch has an order of its own


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_several_steps_per_rollout_batch(tmp_path, weight):
    """Four steps of one batch: a checkpoint after the first batch, in the middle of the second epoch."""

    def build(folder, **options):
        return tiny.trainer(
            folder, tiny.telling(reward=tiny.even_length), data=tiny.prompts(4), per_device_train_batch_size=4,
            steps_per_generation=2, num_iterations=2, distillation_weight=weight, **options,
        )  # fmt: skip

    compare(tmp_path, build, 12, 20, steps_per_batch=4)


def test_agents(tmp_path):
    """Interactions with a tool, whose first turn is given and whose second is sampled."""

    def build(folder, **options):
        first = call("add", a=1, b=2) + "$"
        return make(
            folder, None, data=tiny.prompts(6, chat=True), trainer_tools=[add], shuffle_dataset=True,
            max_completion_length=90, trainer_rollout_func=tiny.scripted([first, "no$"]), **options,
        )  # fmt: skip

    compare(tmp_path, build, 4, 6)


def test_tools_and_environments(tmp_path):
    """In TRL's own loop: every second first turn is a call, whatever was drawn, and the turns after it are sampled."""

    def build(folder, **options):
        def look(prompts, completions, rewards, **columns):
            return [[(len(turns) // 2, "look")] for turns in completions]

        trainer = make(
            folder, None, data=tiny.prompts(6, chat=True), trainer_environment_factory=Room, trainer_tools=[add],
            shuffle_dataset=True, max_completion_length=100, trainer_feedback_func=look, **options,
        )  # fmt: skip
        turn = trainer._generate_single_turn
        first = tiny.answer_ids(trainer._tokenizer, call("add", a=1, b=2) + "$")

        def generate(prompt_ids, *args, **kwargs):
            ids, logprobs = turn(prompt_ids, *args, **kwargs)
            starts = not any("<|tool|>" in text for text in trainer._tokenizer.batch_decode(prompt_ids))
            return [first if starts and i % 2 else row for i, row in enumerate(ids)], logprobs

        trainer._generate_single_turn = generate
        return trainer

    compare(tmp_path, build, 2, 4)


def test_another_teacher_without_rewards(tmp_path):
    def build(folder, **options):
        return tiny.trainer(
            folder, None, data=tiny.prompts(4), teacher_context="none", distillation_temperature=2.0,
            trainer_teacher_model=tiny.build_model(seed=7), **options,
        )  # fmt: skip

    compare(tmp_path, build, 3, 5)


@pytest.mark.parametrize("steps", [3, 4, 2])
def test_a_finished_run_is_not_trained_on(tmp_path, steps):
    """Also within an epoch, which has four steps, and where fewer steps are asked for by now."""

    def build(steps):
        return tiny.trainer(
            tmp_path, tiny.telling(), data=tiny.prompts(8), max_steps=steps, save_strategy="steps", save_steps=3
        )

    first = build(max(steps, 3))
    first.train()
    again = build(steps)
    tiny.shift(again.model)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == max(steps, 3)
    tiny.assert_equal(tiny.trained(again.model), tiny.trained(first.model))
