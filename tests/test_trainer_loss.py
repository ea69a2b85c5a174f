"""The trainer's loss and gradient against TRL's own and against hand-written sums in float64."""

import math
import os

import pytest
import tiny
import torch
from peft import get_peft_model
from trl import GRPOConfig, GRPOTrainer

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

LOSS_TYPES = ["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"]
# Two groups of four; even numbers of characters succeed. Ragged, some cut (no end token `$`).
ANSWERS = ["ab$", "abc$", "x", "hello$", "abcde$", "a$", "xyz", "qrs$"]


def even(completions, **kwargs):
    return [1.0 if len(text) % 2 == 0 else 0.0 for text in completions]


def uneven(completions, **kwargs):
    """Other rewards, the same successes."""
    return [3.0 + i if len(text) % 2 == 0 else -0.5 * i for i, text in enumerate(completions)]


def told(reward=even, rows=(0, 1, 3, 4, 5, 7), text="no: {}"):
    """`reward`, and a text for some rows; the others have none."""

    def reward_with_feedback(completions, log_extra, **kwargs):
        log_extra("feedback", [text.format("?" * i) if i in rows else None for i in range(len(completions))])
        return reward(completions)

    return reward_with_feedback


def scripted_trainer(folder, reward=None, answers=ANSWERS, masks=None, **options):
    options.setdefault("trainer_rollout_func", tiny.scripted(answers, masks))
    return tiny.trainer(folder, reward=told() if reward is None else reward, **options)


def grpo_trainer(folder, reward, model=None, **options):
    extra = {name[8:]: options.pop(name) for name in list(options) if name.startswith("trainer_")}
    args = tiny.config(folder, **options).to_dict()
    names = {name for name in GRPOConfig.__dataclass_fields__ if GRPOConfig.__dataclass_fields__[name].init}
    args = {name: value for name, value in args.items() if name in names and name != "generation_batch_size"}
    return GRPOTrainer(
        model=tiny.build_model() if model is None else model,
        reward_funcs=reward,
        args=GRPOConfig(**args),
        train_dataset=tiny.prompts(),
        processing_class=tiny.build_tokenizer(),
        **extra,
    )


# w = 0


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    """A folder, from which TRL can build its reference model."""
    folder = tmp_path_factory.mktemp("saved") / "tiny"
    tiny.build_model().save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("peft", [False, True])
def test_zero_weight_is_grpo_bit_for_bit(tmp_path, saved_model, beta, peft):
    options = {"model": saved_model, "beta": beta, "max_steps": 3, "num_iterations": 2, "trainer_peft_config": None}
    if peft:
        options["trainer_peft_config"] = tiny.lora()
    ours = tiny.trainer(tmp_path / "sdpo", distillation_weight=0.0, **options)
    ours.train()
    theirs = grpo_trainer(tmp_path / "grpo", reward=tiny.even_length, **options)
    theirs.train()
    assert any(row["grad_norm"] > 0 for row in tiny.training_logs(theirs))
    tiny.assert_equal(tiny.trained(ours.model), tiny.trained(theirs.model))
    assert tiny.training_logs(ours) == tiny.training_logs(theirs)


# w = 1 and between


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("stale", [False, True])
def test_full_weight_has_no_policy_term(tmp_path, loss_type, stale):
    results = []
    for reward in (even, uneven):
        steps = {"per_device_train_batch_size": 4, "steps_per_generation": 2} if stale else {}
        trainer = scripted_trainer(tmp_path, told(reward), loss_type=loss_type, **steps)
        batches = tiny.micro_batches(trainer)
        assert ("old_per_token_logps" in batches[0]) is stale
        tiny.shift(trainer.model)
        results.append((tiny.gradient(trainer, batches[0]), batches[0]["advantages"]))
    assert not torch.equal(results[0][1], results[1][1])
    (loss, grads), (other_loss, other_grads) = results[0][0], results[1][0]
    assert loss == other_loss != 0.0
    tiny.assert_equal(grads, other_grads)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("stale", [False, True])
def test_blend_is_the_weighted_sum_of_separate_terms(tmp_path, loss_type, stale):
    options = {"loss_type": loss_type, "trainer_rollout_func": tiny.scripted(ANSWERS)}
    if stale:
        options |= {"per_device_train_batch_size": 4, "steps_per_generation": 2}
    parts = {}
    for name in ("policy", "distillation", "blend"):
        if name == "policy":
            trainer = grpo_trainer(tmp_path, told(uneven), **options)
        else:
            weight = 1.0 if name == "distillation" else 0.3
            trainer = tiny.trainer(tmp_path, told(uneven), distillation_weight=weight, **options)
        batch = tiny.micro_batches(trainer)[-1]
        tiny.shift(trainer.model, 0.05)
        parts[name] = tiny.gradient(trainer, batch)
    (policy, policy_grads), (distillation, distillation_grads), (blend, blend_grads) = parts.values()
    assert blend == pytest.approx(0.7 * policy + 0.3 * distillation, rel=1e-5, abs=1e-6)
    assert max(grad.abs().max() for grad in policy_grads.values()) > 1e-3
    expected = {name: 0.7 * policy_grads[name] + 0.3 * distillation_grads[name] for name in policy_grads}
    tiny.assert_near(blend_grads, expected, rtol=1e-4)


# Independent sums


def double_model(state):
    model = tiny.build_model().double()
    model.load_state_dict({name: value.double() for name, value in state.items()})
    return model


def next_token_logits(model, prompt, answer, temperature):
    """`(T, V)`: one row alone, no padding."""
    ids = torch.tensor([prompt + answer])
    return model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature


def naive_divergence(student, teacher, token, mode, alpha, topk, tail):
    """One token, from probabilities."""
    p, q = torch.softmax(student, 0), torch.softmax(teacher, 0).detach()
    if mode == "sampled_token":
        return (p[token].log() - q[token].log()).detach() * p[token].log()
    if mode == "topk_logits":
        support = p.detach().argsort(descending=True)[:topk]
        p, q = p[support], q[support]
        if tail:
            p, q = torch.cat([p, 1 - p.sum()[None]]), torch.cat([q, 1 - q.sum()[None]])
        else:
            p, q = p / p.sum(), q / q.sum()
    if alpha == 0:
        return (q * (q / p).log()).sum()
    if alpha == 1:
        return (p * (p / q).log()).sum()
    m = (1 - alpha) * p + alpha * q
    return (1 - alpha) * (p * (p / m).log()).sum() + alpha * (q * (q / m).log()).sum()


def rows_of(inputs):
    """`(student prompt, teacher prompt, answer)` of each row, as lists of ids without padding."""
    for row in range(inputs["completion_ids"].size(0)):
        yield tuple(
            inputs[f"{name}_ids"][row][inputs[f"{name}_mask"][row].bool()].tolist()
            for name in ("prompt", "teacher_prompt", "completion")
        )


def naive_loss(inputs, student, teacher, old, *, temperature, clip, spec, loss_type, tokens, rows, max_length):
    """The distillation loss of one micro-batch out of its sums; `tokens` and `rows` are its share of the step's."""
    sums, lengths = [], []
    for row, (prompt, hinted, answer) in enumerate(rows_of(inputs)):
        if not inputs["feedback_available"][row] or not answer:
            continue
        counted = [True] * len(answer)
        if "tool_mask" in inputs:
            counted = inputs["tool_mask"][row][: len(answer)].bool().tolist()
        now = next_token_logits(student, prompt, answer, temperature)
        with torch.no_grad():
            hint = next_token_logits(teacher, hinted, answer, temperature)
            before = next_token_logits(old, prompt, answer, temperature) if old is not None else now
        total = 0.0
        for t in (t for t in range(len(answer)) if counted[t]):
            token = answer[t]
            ratio = math.exp((now[t].log_softmax(0)[token] - before[t].log_softmax(0)[token]).item())
            total = total + min(ratio, clip) * naive_divergence(now[t], hint[t], token, *spec)
        sums.append(total)
        lengths.append(sum(counted))
    total = sum(sums)
    if loss_type in ("dapo", "cispo", "vespo"):
        return total / tokens
    if loss_type == "bnpo":
        return total / sum(lengths)
    if loss_type == "luspo":
        return total / rows
    if loss_type == "dr_grpo":
        return total / (rows * max_length)
    return sum(s / n for s, n in zip(sums, lengths, strict=True)) / rows


def check_against_naive(trainer, batches, index, teacher_state, old_state, rtol=1e-4, **options):
    counted = [b["completion_mask"] * b.get("tool_mask", 1) * b["feedback_available"][:, None] for b in batches]
    values = {
        "temperature": trainer.temperature,
        "clip": 2.0,
        "spec": ("full_logits", 0.5, None, True),
        "loss_type": "dapo",
        "tokens": sum(mask.sum().item() for mask in counted) / len(batches),
        "rows": sum(mask.any(dim=1).sum().item() for mask in counted) / len(batches),
        "max_length": trainer.args.max_completion_length,
        **options,
    }
    student = double_model(trainer.model.state_dict())
    old = None if old_state is None else double_model(old_state)
    expected = naive_loss(batches[index], student, double_model(teacher_state), old, **values)
    expected.backward()
    loss, grads = tiny.gradient(trainer, batches[index])
    assert loss == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    naive_grads = {name: p.grad for name, p in student.named_parameters()}
    tiny.assert_near(grads, naive_grads, rtol)


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


SPECS = [
    *(("full_logits", alpha, None, True) for alpha in (0.0, 0.3, 0.5, 1.0)),
    *(("topk_logits", alpha, 5, tail) for alpha in (0.0, 0.5, 1.0) for tail in (True, False)),
    ("sampled_token", 1.0, None, True),
]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: "-".join(map(str, s)))
def test_loss_and_gradient_equal_hand_written_sums(tmp_path, spec, temperature):
    mode, alpha, topk, tail = spec
    trainer = scripted_trainer(
        tmp_path,
        temperature=temperature,
        distillation_mode=mode,
        distillation_alpha=alpha,
        distillation_topk=topk,
        distillation_add_tail=tail,
    )
    initial = state_of(trainer.model)
    tiny.shift(trainer.model)  # the EMA teacher stays where it was
    batches = tiny.micro_batches(trainer)
    check_against_naive(trainer, batches, 0, initial, None, spec=spec)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_each_aggregation_on_stale_rollouts_equals_hand_written_sums(tmp_path, loss_type):
    trainer = scripted_trainer(
        tmp_path, loss_type=loss_type, per_device_train_batch_size=4, steps_per_generation=2, distillation_is_clip=1.1
    )
    batches = tiny.micro_batches(trainer)
    initial = state_of(trainer.model)
    tiny.shift(trainer.model)
    for index in range(2):
        check_against_naive(trainer, batches, index, initial, initial, clip=1.1, loss_type=loss_type)


@pytest.mark.parametrize("kind", ["live", "base", "trust_region"])
def test_each_teacher_equals_hand_written_sums(tmp_path, kind):
    trainer = scripted_trainer(tmp_path, teacher_model_kind=kind, **({"teacher_mix": 0.4} if kind[0] == "t" else {}))
    initial = state_of(trainer.model)
    tiny.shift(trainer.model)
    now = state_of(trainer.model)
    batches = tiny.micro_batches(trainer)
    if kind != "trust_region":
        check_against_naive(trainer, batches, 0, initial if kind == "base" else now, None)
        return
    # Logits are mixed, not weights: a model that does that by hand.
    base, live = double_model(initial), double_model(now)

    class Mixed:
        def __call__(self, input_ids):
            logits = 0.6 * base(input_ids=input_ids).logits + 0.4 * live(input_ids=input_ids).logits
            return type("Output", (), {"logits": logits})

    counted = batches[0]["completion_mask"] * batches[0]["feedback_available"][:, None]
    student = double_model(now)
    expected = naive_loss(
        batches[0], student, Mixed(), None, temperature=1.0, clip=2.0, spec=("full_logits", 0.5, None, True),
        loss_type="dapo", tokens=counted.sum().item(), rows=None, max_length=None,
    )  # fmt: skip
    expected.backward()
    loss, grads = tiny.gradient(trainer, batches[0])
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    tiny.assert_near(grads, {name: p.grad for name, p in student.named_parameters()})


# Splits


@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name != "bnpo"])
def test_one_batch_of_eight_equals_two_accumulated_of_four(tmp_path, loss_type):
    grads, losses = [], []
    for size, accumulation in ((8, 1), (4, 2), (2, 4)):
        seen = tiny.FirstGradient()
        trainer = scripted_trainer(
            tmp_path, loss_type=loss_type, per_device_train_batch_size=size, max_steps=1, max_grad_norm=0.0,
            gradient_accumulation_steps=accumulation, trainer_callbacks=[seen],
        )  # fmt: skip
        trainer.train()
        grads.append(seen.value)
        losses.append(trainer.state.log_history[0]["loss"])
    tiny.assert_near(grads[1], grads[0])
    tiny.assert_near(grads[2], grads[0])
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-4)


def test_blend_and_anchor_are_split_invariant_too(tmp_path):
    grads = []
    for size, accumulation in ((8, 1), (4, 2)):
        seen = tiny.FirstGradient()
        trainer = scripted_trainer(
            tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation, max_steps=1,
            max_grad_norm=0.0, distillation_weight=0.5, beta=0.1, trainer_callbacks=[seen],
        )  # fmt: skip
        trainer.train()
        grads.append(seen.value)
    tiny.assert_near(grads[1], grads[0])


# Masks


def hidden_gradient(trainer, inputs):
    """The loss' gradient with respect to the states that predict the answer's tokens, `(B, T, H)`; zero if not run."""
    seen = []

    def watch(module, args, output):
        if torch.is_grad_enabled():
            output.last_hidden_state.retain_grad()
            seen.append(output.last_hidden_state)

    handle = trainer.model.base_model.register_forward_hook(watch)
    try:
        tiny.gradient(trainer, inputs)
    finally:
        handle.remove()
    (hidden,) = seen
    by_state = hidden.grad[:, -inputs["completion_ids"].size(1) - 1 : -1]
    if by_state.size(0) < inputs["completion_ids"].size(0):  # rows without a scored token may be left out
        rows = tiny.scored(inputs).any(dim=1)
        by_state = by_state.new_zeros(rows.size(0), *by_state.shape[1:]).masked_scatter(rows[:, None, None], by_state)
    return by_state


def test_exactly_the_scored_tokens_are_trained(tmp_path):
    masks = [[1, 0, 1], [1, 1, 0, 0], [1], [0] * 5 + [1], [1] * 6, [1, 1], [0, 0, 0], [1, 0, 0, 1]]
    trainer = scripted_trainer(tmp_path, masks=masks)
    inputs = tiny.micro_batches(trainer)[0]
    initial = state_of(trainer.model)
    tiny.shift(trainer.model)
    by_state = hidden_gradient(trainer, inputs)
    active = (inputs["completion_mask"] * inputs["tool_mask"]).bool() & inputs["feedback_available"][:, None]
    assert torch.equal(by_state.abs().sum(-1) > 0, active)
    available = inputs["feedback_available"].tolist()
    assert 0 < sum(available) < len(available)
    assert inputs["active_tokens"] == active.sum()
    check_against_naive(trainer, [inputs], 0, initial, None)


def test_a_broken_teacher_state_at_a_tool_token_changes_nothing(tmp_path):
    masks = [[1, 0, 1], [1, 1, 0, 1], [1], [0] * 5 + [1], [1] * 6, [1, 1], [0, 1, 0], [1, 0, 0, 1]]
    trainer = scripted_trainer(tmp_path, masks=masks)
    inputs = tiny.micro_batches(trainer)[0]
    tiny.shift(trainer.model)
    active = tiny.scored(inputs)
    scored_rows = active.any(dim=1)  # the teacher runs no others
    outside = (~active & inputs["completion_mask"].bool())[scored_rows]
    assert outside.any() and not scored_rows.all()

    def poison(module, args, output):
        if not torch.is_grad_enabled():
            states = output.last_hidden_state
            broken = torch.zeros(states.shape[:2], dtype=torch.bool)
            broken[:, -outside.size(1) - 1 : -1] = outside
            output.last_hidden_state = states.masked_fill(broken[..., None], float("nan"))
        return output

    loss, grads = tiny.gradient(trainer, inputs)
    handle = trainer.model.base_model.register_forward_hook(poison)
    other, other_grads = tiny.gradient(trainer, inputs)
    handle.remove()
    assert other == loss > 0
    tiny.assert_equal(other_grads, grads)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "luspo"])
def test_truncated_answers_leave_numerator_and_divisor_alike(tmp_path, loss_type):
    trainer = scripted_trainer(
        tmp_path, told(rows=range(8)), mask_truncated_completions=True, loss_type=loss_type, max_completion_length=8
    )
    batches = tiny.micro_batches(trainer)
    cut = sum(not text.endswith("$") for text in ANSWERS)
    assert batches[0]["active_rows"] == len(ANSWERS) - cut
    assert batches[0]["active_tokens"] == sum(len(text) for text in ANSWERS if text.endswith("$"))
    initial = state_of(trainer.model)
    tiny.shift(trainer.model)
    check_against_naive(trainer, batches, 0, initial, None, loss_type=loss_type)


def test_all_answers_truncated_and_masked(tmp_path):
    trainer = scripted_trainer(
        tmp_path, told(rows=range(8)), answers=["abc", "de"], mask_truncated_completions=True, max_steps=2
    )
    before = tiny.trained(trainer.model)
    trainer.train()
    assert_nothing_happened(trainer, before)


def test_a_prompt_that_is_longer_by_padding_changes_nothing(tmp_path):
    for mode, alpha, topk in (("full_logits", 0.5, None), ("topk_logits", 0.0, 4), ("sampled_token", 1.0, None)):
        trainer = scripted_trainer(tmp_path, distillation_mode=mode, distillation_alpha=alpha, distillation_topk=topk)
        inputs = tiny.micro_batches(trainer)[0]
        tiny.shift(trainer.model)
        loss, grads = tiny.gradient(trainer, inputs)
        wider = dict(inputs)
        for name in ("prompt", "teacher_prompt"):
            wider[f"{name}_ids"] = torch.nn.functional.pad(inputs[f"{name}_ids"], (9, 0), value=50)
            wider[f"{name}_mask"] = torch.nn.functional.pad(inputs[f"{name}_mask"], (9, 0), value=0)
        other, other_grads = tiny.gradient(trainer, wider)
        assert other == pytest.approx(loss, rel=1e-5)
        tiny.assert_near(other_grads, grads, rtol=1e-5)


def test_teacher_prompt_padding_inside_the_batch_changes_nothing(tmp_path):
    """A row's values do not depend on how long its neighbours' feedback is."""
    losses = []
    for long in (1, 300):
        reward = told(rows=range(4))
        if long > 1:

            def reward(completions, log_extra, **kwargs):
                texts = [f"no: {'?' * i}" for i in range(4)]
                log_extra("feedback", [*texts, *["!" * 300] * (len(completions) - 4)])
                return even(completions)

        trainer = scripted_trainer(tmp_path, reward, use_successful_as_teacher=False)
        inputs = tiny.micro_batches(trainer)[0]
        tiny.shift(trainer.model)
        short = [i for i, (_, hint, _) in enumerate(rows_of(inputs)) if 1 < len(hint) < 300]
        assert len(short) == 4
        only = torch.zeros(8, dtype=torch.bool)
        only[short] = True
        order = sorted(short, key=lambda i: inputs["completion_ids"][i].tolist())
        inputs["feedback_available"] = only
        active = tiny.scored(inputs)
        head = tiny.teacher_head(trainer, inputs)
        lengths = active.sum(dim=1)
        chunks = dict(zip(sorted(short), head.hidden.split(lengths[sorted(short)].tolist()), strict=True))
        losses.append(torch.cat([chunks[i] for i in order]))
    torch.testing.assert_close(losses[0], losses[1], atol=1e-5, rtol=1e-5)


def test_pad_equal_to_eos_keeps_the_end_token_trained(tmp_path):
    trainer = scripted_trainer(
        tmp_path, told(rows=range(8)), trainer_processing_class=tiny.build_tokenizer(pad_is_eos=True)
    )
    assert trainer._tokenizer.pad_token_id == trainer._tokenizer.eos_token_id
    inputs = tiny.micro_batches(trainer)[0]
    assert inputs["active_tokens"] == sum(len(text) for text in ANSWERS)
    tiny.shift(trainer.model)
    by_state = hidden_gradient(trainer, inputs)
    ends = (inputs["completion_ids"] == trainer._tokenizer.eos_token_id) & inputs["completion_mask"].bool()
    assert ends.sum() == sum(text.endswith("$") for text in ANSWERS)
    assert (by_state.abs().sum(-1)[ends] > 0).all()


# Nothing to learn


def none(completions, **kwargs):
    return [None] * len(completions)


def assert_nothing_happened(trainer, before):
    tiny.assert_equal(tiny.trained(trainer.model), before)
    rows = tiny.training_logs(trainer)
    assert rows
    for row in trainer.state.log_history:
        for key, value in row.items():
            assert value is None or not isinstance(value, float) or math.isfinite(value), (key, value)
    assert [row["loss"] for row in rows] == [0.0] * len(rows)
    assert [row["grad_norm"] for row in rows] == [0.0] * len(rows)


@pytest.mark.parametrize(
    ("reward", "weight", "loss_type"),
    [
        *((tiny.never, 0.5, loss_type) for loss_type in LOSS_TYPES),
        *((reward, 1.0, "dapo") for reward in (tiny.never, tiny.always, none)),
        (tiny.always, 0.5, "grpo"),
        (none, 0.5, "bnpo"),
    ],
)
def test_nothing_to_learn(tmp_path, reward, weight, loss_type):
    trainer = tiny.trainer(
        tmp_path, reward, use_successful_as_teacher=False, distillation_weight=weight, loss_type=loss_type,
        eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8, trainer_eval_dataset=tiny.prompts(),
    )  # fmt: skip
    before = tiny.trained(trainer.model)
    trainer.train()
    assert_nothing_happened(trainer, before)


def test_a_loss_of_nothing_is_attached_to_the_graph(tmp_path):
    trainer = tiny.trainer(tmp_path, tiny.never)
    inputs = tiny.micro_batches(trainer)[0]
    loss = trainer._compute_loss(trainer.model, inputs)
    assert loss.item() == 0.0 and loss.requires_grad
    loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in trainer.model.parameters())


# Evaluation


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_evaluation_before_the_first_step(tmp_path, weight):
    trainer = scripted_trainer(
        tmp_path,
        per_device_eval_batch_size=8,
        distillation_weight=weight,
        trainer_eval_dataset=tiny.prompts(2),
        max_steps=1,
    )
    metrics = trainer.evaluate()
    assert math.isfinite(metrics["eval_loss"])
    expected = {name for name in metrics if name.startswith("eval_sdpo/")}
    assert {"eval_sdpo/divergence", "eval_sdpo/success_share"} <= expected
    assert all(math.isfinite(metrics[name]) for name in expected)
    if weight == 1.0:  # dapo: the loss of the one batch is the mean over its tokens
        assert metrics["eval_loss"] == pytest.approx(metrics["eval_sdpo/divergence"], rel=1e-5)
        assert metrics["eval_loss"] > 0
    trainer.train()
    assert trainer.evaluate().keys() == metrics.keys() | {"epoch"}


# The teacher's pass


def test_the_teacher_leaves_nothing_on_the_graph(tmp_path):
    trainer = scripted_trainer(tmp_path)
    inputs = tiny.micro_batches(trainer)[0]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape), lambda x: x):
        head = tiny.teacher_head(trainer, inputs)
    assert not kept
    assert head.hidden.grad_fn is None and not head.hidden.requires_grad and not head.weight.requires_grad


# The anchor


def path_free(tmp_path):
    return {"model": tiny.build_model()}


def new_adapter(tmp_path):
    return {"model": tiny.build_model(), "trainer_peft_config": tiny.lora()}


def old_adapter(tmp_path):
    return {"model": tiny.trained_adapter()}


def from_path(tmp_path):
    tiny.build_model(seed=4).save_pretrained(tmp_path / "start")
    return {"model": str(tmp_path / "start")}


def initial_model(start):
    """What the trainer was given, built anew."""
    model = tiny.build_model(seed=4) if isinstance(start["model"], str) else start["model"]
    return (get_peft_model(model, start["trainer_peft_config"]) if "trainer_peft_config" in start else model).eval()


def plain_log_probs(model, inputs):
    """The model's log-probabilities of each answer's tokens, padded with zero, through its plain forward."""
    rows = torch.zeros(inputs["completion_ids"].shape, dtype=torch.float64)
    for row, (prompt, _, answer) in enumerate(rows_of(inputs)):
        logits = next_token_logits(model, prompt, answer, 1.0).double().log_softmax(-1)
        rows[row, : len(answer)] = logits.gather(-1, torch.tensor(answer)[:, None]).squeeze(-1)
    return rows


@pytest.mark.parametrize("start", [path_free, new_adapter, old_adapter, from_path])
@pytest.mark.parametrize("bias_correction", [False, True])
def test_beta_anchors_to_the_initial_policy(tmp_path, start, bias_correction):
    options = {"beta": 0.3, "use_bias_correction_kl": bias_correction, "trainer_rollout_func": tiny.scripted(ANSWERS)}
    trainer = tiny.trainer(tmp_path, tiny.never, **start(tmp_path), **options)
    assert trainer.ref_model is None
    with torch.no_grad():
        inputs = tiny.micro_batches(trainer)[0]
        assert trainer._compute_loss(trainer.model, inputs).item() == 0.0
    tiny.shift(trainer.model, 0.1)
    inputs = tiny.micro_batches(trainer)[0]  # new rollouts, a moved policy: the anchor did not move
    loss, grads = tiny.gradient(trainer, inputs)
    with torch.no_grad():
        now = plain_log_probs(trainer.model.eval(), inputs)
        reference = plain_log_probs(initial_model(start(tmp_path)), inputs)
    mask = inputs["completion_mask"].double()
    kl = ((reference - now).exp() - (reference - now) - 1) * mask
    assert loss == pytest.approx(0.3 * (kl.sum() / mask.sum()).item(), rel=1e-4)
    assert max(grad.abs().max() for grad in grads.values()) > 1e-4
    assert trainer._metrics["train"]["kl"][0] == 0.0
    assert trainer._metrics["train"]["kl"][-1] == pytest.approx(loss / 0.3, rel=1e-4)


def test_beta_holds_the_policy_near_its_start(tmp_path):
    distances = []
    for beta in (0.0, 5.0):
        trainer = scripted_trainer(tmp_path, beta=beta, max_steps=6, learning_rate=3e-3)
        before = tiny.trained(trainer.model)
        trainer.train()
        with torch.no_grad():
            moved = [(p - before[n]).square().sum() for n, p in trainer.model.named_parameters()]
        distances.append(torch.stack(moved).sum().item())
    assert distances[1] < distances[0]


# One generation; stale rollouts


def test_a_single_generation_learns_from_feedback_alone(tmp_path):
    trainer = tiny.trainer(
        tmp_path, tiny.telling(), num_generations=1, per_device_train_batch_size=3, max_steps=2,
        trainer_eval_dataset=tiny.prompts(), per_device_eval_batch_size=2, data=tiny.prompts(6),
    )  # fmt: skip
    before = tiny.trained(trainer.model)
    trainer.train()
    trainer.evaluate()
    rows = tiny.training_logs(trainer)
    assert [row["sdpo/distilled_share"] for row in rows] == [1.0, 1.0]
    assert all(row["loss"] > 0 and row["grad_norm"] > 0 for row in rows)
    for row in trainer.state.log_history:
        assert not any(isinstance(v, float) and math.isnan(v) for v in row.values())
    assert not torch.equal(before["lm_head.weight"], trainer.model.lm_head.weight)


@pytest.mark.parametrize(
    "reuse", [{"num_iterations": 2}, {"steps_per_generation": 2, "per_device_train_batch_size": 4}]
)
def test_stale_rollouts_are_weighted_and_cut(tmp_path, reuse):
    weights, shares = [], []
    for clip in (1.0001, 2.0, None):
        trainer = scripted_trainer(tmp_path, max_steps=4, learning_rate=1e-2, distillation_is_clip=clip, **reuse)
        trainer.train()
        weights.append(trainer.model.lm_head.weight.detach().clone())
        shares.append([row["sdpo/ratio_clipped_share"] for row in tiny.training_logs(trainer)])
    assert shares[0][0] == 0.0 and shares[0][1] > 0.1  # the first use is on-policy, the second is not
    assert shares[2] == [0.0] * 4
    assert not torch.equal(weights[0], weights[2])


def test_a_clip_can_only_lower_a_ratio(tmp_path):
    """Two uses of one batch: the second loss is smaller with a tight cut."""
    losses = []
    for clip in (1e-3, None):
        trainer = scripted_trainer(tmp_path, num_iterations=2, distillation_is_clip=clip, distillation_alpha=1.0)
        inputs = tiny.micro_batches(trainer)[0]
        tiny.shift(trainer.model)
        losses.append(tiny.gradient(trainer, inputs)[0])
    assert 0 < losses[0] < 0.01 * losses[1]
