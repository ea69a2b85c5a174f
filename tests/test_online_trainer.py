"""One update of a session is one step of `SDPOTrainer`; what prompts have in common is encoded once, exactly."""

import pytest
import talk
import tiny
import torch
from datasets import Dataset

from sdpo_trl.online.shared import drops_out
from sdpo_trl.online.snapshots import Snapshot

ANSWERS = ["one$", "two and three$", "four"]
KINDS = {
    "live": {},
    "ema": {"teacher_update_rate": 0.3},
    "base": {},
    "snapshot": {"teacher_sync_steps": 2},
    "trust_region": {"teacher_mix": 0.4},
}


def adapter_in_float64():
    return tiny.trained_adapter().double()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("peft", [False, True])
def test_shared_prefixes_change_nothing(tmp_path, kind, peft):
    """The same losses, gradients and weights as without them, over three updates, in float64."""
    results, positions = {}, []

    def count(module, args, output):
        positions[-1] += output[0].shape[:2].numel()

    for shares in (False, True):
        model = adapter_in_float64() if peft else tiny.build_model().double()
        trainer = talk.trainer(tmp_path, model, shares, teacher_model_kind=kind, **KINDS[kind])
        rows = talk.rows(trainer, ANSWERS)
        logs = [trainer.update(rows)]  # with a check, at the first use, that the cache is exact
        positions.append(0)
        hook = trainer._tap.model.base_model.register_forward_hook(count)
        logs += [trainer.update(rows) for _ in range(2)]
        hook.remove()
        assert trainer.prefixes._works is (True if shares else None)
        results[shares] = logs, tiny.trained(trainer.model)
    (plain, weights), (logs, others) = results[False], results[True]
    for one, two in zip(plain, logs, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)  # logged in float32
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-6)
    tiny.assert_near(others, weights, rtol=1e-6)
    assert positions[1] < 0.9 * positions[0]


def test_one_answer_and_a_live_teacher_share_too(tmp_path):
    gradients = []
    for shares in (False, True):
        trainer = talk.trainer(tmp_path, adapter_in_float64(), shares, teacher_model_kind="live", max_grad_norm=0.0)
        seen = tiny.FirstGradient()
        trainer.add_callback(seen)
        trainer.update(talk.rows(trainer, ["one answer$"]))
        gradients.append(seen.value)
        assert trainer.prefixes._works is (True if shares else None)
    tiny.assert_near(gradients[1], gradients[0], rtol=1e-7)


def test_dropout_keeps_each_row_to_itself(tmp_path):
    assert not drops_out(tiny.build_model()) and not drops_out(tiny.trained_adapter())
    assert drops_out(tiny.build_model(attention_dropout=0.1)) and drops_out(tiny.trained_adapter(lora_dropout=0.1))
    trainer = talk.trainer(tmp_path, tiny.build_model(attention_dropout=0.1), teacher_model_kind="live")
    trainer.update(talk.rows(trainer, ANSWERS))
    assert trainer.prefixes._works is None


@pytest.mark.parametrize("kind", ["live", "ema"])
@pytest.mark.parametrize("extra", [{}, {"beta": 0.1}, {"distillation_alpha": 1.0, "loss_type": "grpo"}])
def test_an_update_is_a_step_of_the_ordinary_trainer(tmp_path, kind, extra):
    shared = {
        "teacher_model_kind": kind, "learning_rate": 1e-3, "max_completion_length": 20, "max_grad_norm": 0.0,
        "optim": "sgd", **extra,
    }  # fmt: skip
    ours = talk.trainer(tmp_path, tiny.build_model(), **shared)
    rows = talk.rows(ours, ANSWERS)
    logs = ours.update(rows)
    data = Dataset.from_dict({name: [row[name] for row in rows] for name in ("prompt", "privileged_context")})
    theirs = tiny.trainer(
        tmp_path, None, data=data, num_generations=1, use_successful_as_teacher=False, reprompt_placement="append",
        per_device_train_batch_size=3, max_steps=1, lr_scheduler_type="constant", shuffle_dataset=False,
        trainer_rollout_func=tiny.scripted(ANSWERS), **shared,
    )  # fmt: skip
    theirs.train()
    other = tiny.training_logs(theirs)[0]
    assert logs["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-7)
    assert logs["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
    tiny.assert_near(tiny.trained(ours.model), tiny.trained(theirs.model), rtol=1e-5)
    if kind == "ema":
        tiny.assert_near(dict(ours._stores["teacher"].whole()), dict(theirs._stores["teacher"].whole()), rtol=1e-5)


def test_each_answer_has_the_ratio_of_its_own_weights(tmp_path):
    trainer = talk.trainer(tmp_path, tiny.build_model(), teacher_model_kind="base", distillation_is_clip=None)
    first = talk.rows(trainer, ANSWERS[:1])
    trainer.update(first)
    tiny.shift(trainer.model, 0.05)
    rows = [*first, *talk.rows(trainer, ANSWERS[1:2])]
    batch = trainer._generate_and_score_completions(rows)
    now = trainer.log_probs([(row["prompt_ids"], row["completion_ids"]) for row in rows])
    stale, fresh = (torch.tensor(now[i]) - batch["old_per_token_logps"][i, : len(now[i])] for i in range(2))
    assert stale.abs().max() > 0.01 and fresh.abs().max() < 1e-6
    assert batch["old_per_token_logps"][0, : len(now[0])].tolist() == pytest.approx(first[0]["logprobs"])
    # The stale answer's gradient is scaled token by token by its ratio: against the same without its ratio.
    trainer.current_gradient_accumulation_steps = 1
    alone = {**batch, "feedback_available": torch.tensor([True, False])}
    value, _ = tiny.gradient(trainer, alone)
    scored = tiny.gradient(trainer, {k: v for k, v in alone.items() if k != "old_per_token_logps"})[0]
    assert value != pytest.approx(scored, rel=1e-3)


def test_the_gain_lets_a_small_correction_count_beside_a_large_one(tmp_path):
    """Adam remembers the first, large gradient; without a gain the small one after it hardly moves the weights."""
    moved = {}
    for gain in (None, 5.0):
        options = {} if gain is None else {"distillation_gain_target": gain, "distillation_gain_max": 50.0}
        trainer = talk.trainer(
            tmp_path, tiny.build_model(), teacher_model_kind="live", max_grad_norm=0.0, adam_beta1=0.0, **options
        )
        trainer.update(talk.rows(trainer, ANSWERS))
        before = tiny.trained(trainer.model)
        trainer.args.teacher_proximal_share = 0.02  # a teacher that hardly differs from the student
        logs = trainer.update(talk.rows(trainer, ANSWERS))
        after = tiny.trained(trainer.model)
        moved[gain] = torch.cat([(after[n] - before[n]).flatten() for n in after]).norm().item()
        assert logs.get("sdpo/gain", 1.0) == pytest.approx(1.0 if gain is None else 50.0)
    assert moved[5.0] > 2 * moved[None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "extra",
    [{}, {"beta": 0.1, "distillation_log_ratio_clip_running": 3.0, "lr_scheduler_type": "linear", "max_steps": 9}],
)
def test_a_snapshot_brings_everything_back(tmp_path, kind, extra):
    """Bit for bit: three updates after it was restored equal the three before, in weights, teacher and logs."""
    trainer = talk.trainer(
        tmp_path, tiny.build_model(), peft=tiny.lora(), teacher_model_kind=kind, **KINDS[kind], **extra
    )
    rows = talk.rows(trainer, ANSWERS)
    trainer.update(rows)
    snapshot, start = Snapshot(trainer), tiny.trained(trainer.model)
    runs = []
    for _ in range(2):
        logs = [
            {k: v for k, v in trainer.update(rows).items() if k != "step_time" and "/time/" not in k} for _ in range(3)
        ]
        stores = {n: {k: v.clone() for k, v in s.whole()} for n, s in trainer._stores.items()}
        runs.append(
            (logs, tiny.trained(trainer.model), stores, trainer.state.global_step, trainer.lr_scheduler.get_last_lr())
        )
        snapshot.restore(trainer)
        tiny.assert_equal(tiny.trained(trainer.model), start)
        assert trainer.state.global_step == 1
    (logs, weights, stores, step, rate), again = runs
    assert logs == again[0] and (step, rate) == again[3:]
    tiny.assert_equal(again[1], weights)
    for name, values in stores.items():
        tiny.assert_equal(again[2][name], values)


def test_rows_need_a_log_probability_per_token(tmp_path):
    trainer = talk.trainer(tmp_path, tiny.build_model())
    rows = talk.rows(trainer, ANSWERS)
    rows[1]["logprobs"].pop()
    with pytest.raises(ValueError, match="Row 1 has 14 answer tokens and 13"):
        trainer.update(rows)
