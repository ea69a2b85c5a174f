"""The teacher's pass: once per rollout batch, shared prefixes, only the rows that are scored; equal to one by one."""

import pytest
import tiny
import torch
from transformers import GPT2Config, MistralConfig, Qwen2Config

from sdpo_trl.batches import take_rows, trim_padding
from sdpo_trl.prefixes import plan_prefixes, shares_prefixes
from sdpo_trl.teacher import evaluation_mode


def test_plan_prefixes():
    plan = plan_prefixes([[1, 2, 3, 4], [9, 8, 7], [1, 2, 5], [9, 8, 7]], ["a", "b", "a", "b"])
    assert plan.prefixes == [[1, 2], [9, 8]]  # each row keeps at least its last token
    assert plan.group == [0, 1, 0, 1]
    assert plan.rests == [[3, 4], [7], [5], [7]]
    assert plan.tokens(10) == 2 * 2 + 4 * (2 + 10)
    assert plan_prefixes([[1, 2], [3, 2]], ["a", "a"]) is None
    assert plan_prefixes([[1], [1]], ["a", "a"]) is None


def test_which_models_share_prefixes():
    sizes = {"vocab_size": 104, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    assert shares_prefixes(tiny.build_model())
    assert shares_prefixes(tiny.from_config(Qwen2Config(**sizes, sliding_window=4, use_sliding_window=False)))
    assert not shares_prefixes(tiny.from_config(Qwen2Config(**sizes, sliding_window=4, use_sliding_window=True,
                                                            max_window_layers=1)))  # fmt: skip
    assert not shares_prefixes(tiny.from_config(MistralConfig(**sizes, sliding_window=4)))


def batch_of(trainer):
    """One rollout batch as the loss gets it, before TRL shuffles it."""
    trainer.model.train()
    rows = [trainer.train_dataset[i // 4] for i in range(8)]
    torch.manual_seed(3)
    return trainer._generate_and_score_completions(rows)


def make(folder, model=None, **options):
    return tiny.trainer(folder, tiny.telling(reward=tiny.even_length), model=model, **options)


@pytest.mark.parametrize(
    "config",
    [
        None,
        GPT2Config(vocab_size=104, n_embd=32, n_layer=2, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=1),
        Qwen2Config(vocab_size=104, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, tie_word_embeddings=True),
    ],
    ids=["llama", "gpt2", "qwen2"],
)  # fmt: skip
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_shared_prefixes_equal_each_row_alone(tmp_path, config, attention):
    model = tiny.build_model() if config is None else tiny.from_config(config)
    model.set_attn_implementation(attention)
    trainer = make(tmp_path, model, teacher_model_kind="live", data=tiny.prompts(chat=True))
    trainer._teacher_pass._once = False
    batch = batch_of(trainer)
    runner = trainer._teacher_pass
    assert runner._shares
    rows = batch["feedback_available"].nonzero().squeeze(1)
    plan = runner._plan(batch, rows)
    assert len(plan.prefixes) == 2 < rows.numel()
    with evaluation_mode(trainer.model):
        shared = runner._shared_hidden(trainer.model, batch, rows, plan)
        for place, row in enumerate(rows.tolist()):
            alone = trim_padding(take_rows(batch, torch.tensor([row])))
            truth = runner._plain_hidden(trainer.model, alone, torch.tensor([0]))[0]
            used = int(batch["completion_mask"][row].sum())
            torch.testing.assert_close(shared[place, :used], truth[:used], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["live", "base", "ema", "snapshot"])
def test_hidden_states_made_with_the_batch_give_the_same_loss(tmp_path, kind):
    losses = []
    for once in (True, False):
        options = {"teacher_sync_steps": 5} if kind == "snapshot" else {}
        trainer = make(tmp_path, teacher_model_kind=kind, **options)
        trainer._teacher_pass._once = once
        batch = batch_of(trainer)
        assert ("teacher_hidden" in batch) == once
        trainer.current_gradient_accumulation_steps = 1
        loss = trainer._compute_loss(trainer.model, batch)
        loss.backward()
        grads = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
        losses.append((loss.detach(), grads))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "once"),
    [
        ({"teacher_model_kind": "base"}, True),
        ({"teacher_model_kind": "ema"}, True),
        ({"teacher_model_kind": "live"}, True),  # one optimizer step per rollout batch
        ({"teacher_model_kind": "live", "steps_per_generation": 2}, False),
        ({"teacher_model_kind": "ema", "steps_per_generation": 2}, True),
        ({"teacher_model_kind": "ema", "steps_per_generation": 2, "teacher_sync_steps": 1}, False),
        ({"teacher_model_kind": "ema", "steps_per_generation": 2, "teacher_sync_steps": 4}, True),
        ({"teacher_model_kind": "snapshot", "teacher_sync_steps": 3, "num_iterations": 2}, False),
        ({"teacher_model_kind": "trust_region"}, False),
    ],
)
def test_a_teacher_is_scored_once_only_while_it_rests(tmp_path, options, once):
    assert make(tmp_path, per_device_train_batch_size=4, **options)._teacher_pass._once == once


def test_rows_without_feedback_are_run_by_neither_model(tmp_path, monkeypatch):
    trainer = tiny.trainer(tmp_path, tiny.even_length, teacher_model_kind="live", steps_per_generation=1)
    batch = batch_of(trainer)
    active = int(batch["feedback_available"].sum())
    batch["feedback_available"] &= torch.arange(8) % 2 == 0
    fewer = int(batch["feedback_available"].sum())
    assert 0 < fewer < active
    seen = []
    hook = trainer.model.model.register_forward_hook(
        lambda module, args, kwargs, out: seen.append(kwargs["input_ids"].size(0)), with_kwargs=True
    )
    batch.pop("teacher_hidden", None)
    trainer.current_gradient_accumulation_steps = 1
    trainer._compute_loss(trainer.model, batch)
    hook.remove()
    assert max(seen) == fewer


def test_trim_padding_cuts_what_all_rows_share():
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    completion = torch.tensor([[1, 1, 0], [1, 0, 0]])
    batch = {
        "prompt_ids": torch.arange(8).view(2, 4), "prompt_mask": mask, "completion_ids": torch.arange(6).view(2, 3),
        "completion_mask": completion, "advantages": torch.ones(2), "importance_sampling_ratio": torch.ones(2, 1),
        "active_tokens": torch.tensor(3),
    }  # fmt: skip
    trimmed = trim_padding(batch)
    assert trimmed["prompt_ids"].tolist() == [[1, 2, 3], [5, 6, 7]]
    assert trimmed["completion_ids"].tolist() == [[0, 1], [3, 4]]
    assert trimmed["importance_sampling_ratio"].shape == (2, 1) and trimmed["advantages"].shape == (2,)
    assert batch["prompt_ids"].shape == (2, 4)
    empty = trim_padding({**batch, "completion_mask": torch.zeros(2, 3)})
    assert empty["completion_ids"].shape == (2, 1)
