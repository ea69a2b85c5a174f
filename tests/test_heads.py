"""Heads against the models they are taken from."""

import copy

import numpy as np
import pytest
import torch
from tiny import from_config
from transformers import (
    CohereConfig,
    FalconH1Config,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PhiConfig,
    Qwen2Config,
)
from trl.trainer.utils import add_fused_lm_head

from sdpo_trl.divergence import DivergenceSpec
from sdpo_trl.heads import HeadTap, MixedHead, TapScores, TokenHead, logit_rules, predicting
from sdpo_trl.scores import ScoreRequest, score_tokens

VOCAB = 37
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
# Name: configuration, scale, soft cap.
ARCHITECTURES = {
    "llama": (lambda: LlamaConfig(**SIZES), 1.0, None),
    "llama_tied": (lambda: LlamaConfig(**SIZES, tie_word_embeddings=True), 1.0, None),
    "gemma2": (lambda: Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0), 1.0, 2.0),
    "gemma2_uncapped": (lambda: Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=None), 1.0, None),
    "cohere": (lambda: CohereConfig(**SIZES, logit_scale=0.3), 0.3, None),
    "granite": (lambda: GraniteConfig(**SIZES, logits_scaling=8.0), 1 / 8, None),
    "gpt2": (lambda: GPT2Config(**GPT2), 1.0, None),
    "gpt2_untied": (lambda: GPT2Config(**GPT2, tie_word_embeddings=False), 1.0, None),
    "qwen2": (lambda: Qwen2Config(**SIZES), 1.0, None),
    "qwen2_tied": (lambda: Qwen2Config(**SIZES, tie_word_embeddings=True), 1.0, None),
    "phi": (lambda: PhiConfig(**{**SIZES, "num_key_value_heads": 2}), 1.0, None),  # its head has a bias
}
architectures = pytest.mark.parametrize("name", ARCHITECTURES)


def build(name, dtype=torch.float32, temperature=0.7, **options):
    """A random model with TRL's fused head and a tap, and an untouched copy of it."""
    model = from_config(ARCHITECTURES[name][0](), seed=3).to(dtype).eval()
    if model.get_output_embeddings().bias is not None:
        torch.nn.init.normal_(model.get_output_embeddings().bias)
    plain = copy.deepcopy(model)
    add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
    return model, HeadTap(model, temperature, **options), plain


def batch(lengths=(9, 5, 7), seed=0):
    """Left-padded ids and their mask."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (len(lengths), max(lengths)), generator=generator)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, max(lengths) - length :] = 1
    return ids * mask, mask


def run(model, tap, ids, mask, **inputs):
    with tap.capture() as heads:
        model(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True, **inputs)
    (head,) = heads
    return head


def positions(mask):
    return (mask.cumsum(-1) - 1).clamp(min=0)


def test_a_copy_of_a_tapped_model_is_refused():
    """It would run with the weights of the original, whatever is trained into it."""
    model, tap, plain = build("llama")
    ids, mask = batch()
    assert torch.equal(model(ids).logits, plain(ids).logits)
    with pytest.raises(RuntimeError, match="a copy of one that was given to a trainer"):
        copy.deepcopy(model)(ids)
    run(model, tap, ids, mask)


# The rules of the architectures


@architectures
def test_logit_rules(name):
    config, scale, softcap = ARCHITECTURES[name]
    assert logit_rules(config()) == (pytest.approx(scale), softcap)


def test_logit_rules_of_falcon_h1():
    assert logit_rules(FalconH1Config(lm_head_multiplier=0.25)) == (0.25, None)


@architectures
def test_logits_are_the_models_own(name):
    model, tap, plain = build(name)
    ids, mask = batch()
    head = run(model, tap, ids, mask)
    expected = plain(input_ids=ids, attention_mask=mask, position_ids=positions(mask)).logits / 0.7
    assert head.vocab_size == VOCAB
    real = mask.bool()
    torch.testing.assert_close(head.logits(VOCAB)[real], expected[real], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head.logits(20)[real], expected[real][:, :20], rtol=1e-5, atol=1e-5)
    assert expected[real].std() > 0.05  # nothing is equal only because it is small


@architectures
def test_gradients_are_the_models_own(name):
    model, tap, plain = build(name)
    ids, mask = batch()
    weights = torch.randn(*ids.shape, VOCAB) * mask[..., None]
    (run(model, tap, ids, mask).logits(VOCAB) * weights).sum().backward()
    (plain(input_ids=ids, attention_mask=mask, position_ids=positions(mask)).logits / 0.7 * weights).sum().backward()
    for (parameter, own), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        if expected.grad is None or expected.grad.abs().max() < 1e-5:
            continue
        difference = (own.grad - expected.grad).abs().max() / expected.grad.abs().max()
        assert difference < 1e-4, parameter


@architectures
def test_log_probs_are_trls(name):
    """What TRL's own fused head computes, at the same temperature."""
    model, tap, _ = build(name)
    ids, mask = batch()
    own = run(model, tap, ids, mask).logits(VOCAB).log_softmax(-1)[:, :-1]
    labels = ids.masked_fill(mask == 0, -100)
    theirs = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    scored = labels[:, 1:] != -100
    picked = own.gather(-1, ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(picked[scored], theirs.log_probs[scored], rtol=1e-5, atol=1e-5)
    own_entropy = -(own.exp() * own).sum(-1)
    torch.testing.assert_close(own_entropy[scored], theirs.entropy[scored], rtol=1e-5, atol=1e-5)


@architectures
def test_a_padded_row_equals_the_row_alone(name):
    model, tap, _ = build(name)
    ids, mask = batch((9, 4, 1))
    together = run(model, tap, ids, mask).logits(VOCAB)
    for row in range(3):
        length = int(mask[row].sum())
        alone = run(model, tap, ids[row : row + 1, -length:], mask[row : row + 1, -length:]).logits(VOCAB)
        torch.testing.assert_close(together[row, -length:], alone[0], rtol=1e-5, atol=1e-5)


def test_position_ids_come_from_the_mask_only_where_asked():
    ids, mask = batch((9, 4))
    model, tap, _ = build("gpt2")
    numbered = run(model, tap, ids, mask).logits(VOCAB)
    given = run(model, tap, ids, mask, position_ids=torch.arange(9)[None].expand(2, 9)).logits(VOCAB)
    assert (numbered[1, -4:] - given[1, -4:]).abs().max() > 1e-2  # the caller's own are respected
    other, other_tap, _ = build("gpt2", position_ids_from_mask=False)
    assert torch.equal(run(other, other_tap, ids, mask).logits(VOCAB), given)
    # TRL's own scores, without a consumer, count the same positions.
    alone = model(input_ids=ids[1:, -4:], attention_mask=mask[1:, -4:], labels=ids[1:, -4:], fused_lm_head=True)
    both = model(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True)
    torch.testing.assert_close(both.log_probs[1, -3:], alone.log_probs[0], rtol=1e-5, atol=1e-5)


# The tap


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_without_a_consumer_the_forward_is_the_former_one(name):
    model, tap, plain = build(name)
    ids, mask = batch()
    inputs = {"input_ids": ids, "attention_mask": mask}
    assert torch.equal(model(**inputs).logits, plain(**inputs).logits)
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(**inputs, **options), plain.generate(**inputs, **options))
    with tap.capture() as heads:
        pass
    assert heads == []


def test_a_consumers_scores_take_the_place_of_trls():
    model, tap, _ = build("llama")
    ids, mask = batch()
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids, "fused_lm_head": True}
    seen = []

    def consumer(head: TokenHead) -> TapScores:
        seen.append(head)
        value = head.logits(VOCAB).logsumexp(-1)[:, :-1]
        return TapScores(value.sum(), value, 2 * value)

    before = model(**inputs)
    with tap.consume(consumer):
        output = model(**inputs)
    assert len(seen) == 1 and seen[0].hidden.shape == (3, 9, 16)
    assert torch.equal(output.entropy, 2 * output.log_probs) and output.loss == output.log_probs.sum()
    output.loss.backward()
    assert all(p.grad.abs().sum() > 0 for n, p in model.named_parameters() if "lm_head" in n or "mlp" in n)
    after = model(**inputs)
    assert torch.equal(after.log_probs, before.log_probs)
    assert not torch.equal(output.log_probs, before.log_probs)


def test_consumers_nest_and_survive_exceptions():
    model, tap, _ = build("llama")
    ids, mask = batch()

    def broken(head):
        raise RuntimeError("broken consumer")

    with tap.capture() as outer:
        with pytest.raises(RuntimeError, match="broken consumer"), tap.consume(broken):
            model(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True)
        assert outer == []
        model(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True)
        assert len(outer) == 1
    model(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True)
    assert len(outer) == 1


def test_the_tapped_model_still_makes_its_own_copy_and_state():
    model, tap, plain = build("llama")
    assert model.state_dict().keys() == plain.state_dict().keys()
    ids, mask = batch()
    with torch.no_grad():
        head = run(model, tap, ids, mask)
        before = head.logits(VOCAB)
        model.lm_head.weight.mul_(2.0)
        after = run(model, tap, ids, mask).logits(VOCAB)
    assert not head.hidden.requires_grad
    torch.testing.assert_close(after, 2 * before)  # the head is looked up at each forward


# Precision


def test_half_precision_weights_give_float32_logits():
    head = TokenHead(torch.randn(6, 16).bfloat16(), torch.randn(VOCAB, 16).bfloat16(), temperature=0.7)
    assert head.logits(VOCAB).dtype == torch.float32
    expected = (head.hidden @ head.weight.t()).float() / 0.7
    torch.testing.assert_close(head.logits(VOCAB), expected)
    exact = head.hidden.double() @ head.weight.double().t() / 0.7
    torch.testing.assert_close(head.logits(VOCAB).double(), exact, rtol=1e-2, atol=5e-2)


def test_the_projection_can_run_in_float32():
    """TRL's `cast_lm_head_to_fp32`: only the inputs are rounded, not the sums."""
    model, tap, _ = build("llama", torch.bfloat16, cast_to_fp32=True)
    ids, mask = batch()
    head = run(model, tap, ids, mask)
    exact = head.hidden.double() @ head.weight.double().t() / 0.7
    torch.testing.assert_close(head.logits(VOCAB).double(), exact, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(head.logits(VOCAB).double(), exact, rtol=1e-5, atol=1e-5)


def test_autocast_projects_in_its_own_precision():
    model, tap, plain = build("llama")
    ids, mask = batch()
    with torch.autocast("cpu", torch.bfloat16):
        head = run(model, tap, ids, mask)
        expected = plain(input_ids=ids, attention_mask=mask, position_ids=positions(mask)).logits
    assert expected.dtype == torch.bfloat16
    torch.testing.assert_close(head.logits(VOCAB)[mask.bool()], expected[mask.bool()].float() / 0.7)


def test_detach_shares_values_and_cuts_the_graph():
    head = TokenHead(*(torch.randn(s, requires_grad=True) for s in ((4, 8), (5, 8), (5,))), 0.7, 0.3, 2.0)
    cut = head.detach()
    assert torch.equal(cut.logits(5), head.logits(5)) and not cut.logits(5).requires_grad
    assert head.logits(5).requires_grad and cut.weight.data_ptr() == head.weight.data_ptr()


# Selection and mixture


def test_predicting_picks_the_state_before_each_token():
    length, answer = 6, 3
    hidden = torch.arange(2 * length, dtype=torch.float64).view(2, length, 1)
    active = torch.tensor([[True, False, True], [False, True, True]])
    head = predicting(TokenHead(hidden, torch.ones(1, 1, dtype=torch.float64)), active)
    expected = [row * length + (length - answer + t) - 1 for row in range(2) for t in range(answer) if active[row, t]]
    assert head.hidden[:, 0].tolist() == expected
    nothing = predicting(TokenHead(hidden, torch.ones(1, 1, dtype=torch.float64)), torch.zeros_like(active))
    assert nothing.hidden.shape == (0, 1)


def test_predicting_keeps_masked_states_out_of_the_graph():
    hidden = torch.randn(2, 5, 4, dtype=torch.float64)
    active = torch.tensor([[True, True, False], [False, False, False]])
    hidden[0, 3], hidden[1] = float("nan"), float("nan")
    hidden.requires_grad_()
    weight = torch.randn(VOCAB, 4, dtype=torch.float64, requires_grad=True)
    predicting(TokenHead(hidden, weight), active).logits(VOCAB).logsumexp(-1).sum().backward()
    assert torch.isfinite(hidden.grad).all() and torch.isfinite(weight.grad).all()
    assert (hidden.grad[0, 1:3] != 0).all()
    assert not hidden.grad[0, 0].any() and not hidden.grad[0, 3:].any() and not hidden.grad[1].any()


@pytest.mark.parametrize("mix", [0.0, 0.01, 0.3, 1.0])
def test_mixed_head(mix):
    base = TokenHead(torch.randn(4, 8), torch.randn(VOCAB, 8), temperature=0.7)
    live = TokenHead(torch.randn(4, 8), torch.randn(VOCAB + 3, 8), temperature=0.7)
    mixed = MixedHead(base, live, mix)
    assert mixed.vocab_size == VOCAB
    a = (base.hidden.double() @ base.weight.double().t()).numpy() / 0.7
    b = (live.hidden.double() @ live.weight.double().t()).numpy()[:, :VOCAB] / 0.7
    np.testing.assert_allclose(mixed.logits(VOCAB).numpy(), (1 - mix) * a + mix * b, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mixed.logits(9).numpy(), ((1 - mix) * a + mix * b)[:, :9], rtol=1e-4, atol=1e-5)
    if mix in (0.0, 1.0):
        assert torch.equal(mixed.logits(VOCAB), (base, live)[int(mix)].logits(VOCAB))


# Vocabularies of different size


@pytest.mark.parametrize("implementation", ["reference", "fused"])
@pytest.mark.parametrize(("student_size", "teacher_size"), [(11, 8), (8, 11), (11, 11)])
@pytest.mark.parametrize(
    "spec",
    [
        DivergenceSpec("full_logits", 0.0),
        DivergenceSpec("full_logits", 0.5),
        DivergenceSpec("full_logits", 1.0),
        DivergenceSpec("topk_logits", 0.5, 4, True),
        DivergenceSpec("topk_logits", 1.0, 4, False),
        DivergenceSpec("topk_logits", 0.5, 9, True),
        DivergenceSpec("sampled_token", 1.0),
    ],
    ids=lambda spec: f"{spec.mode}-{spec.alpha}-{spec.topk}",
)
def test_padded_vocabularies_are_compared_over_the_items_that_both_have(
    spec, student_size, teacher_size, implementation
):
    shared = min(student_size, teacher_size)
    hidden = torch.randn(5, 6, dtype=torch.float64)
    weight = torch.randn(student_size, 6, dtype=torch.float64)
    teacher = TokenHead(torch.randn(5, 6, dtype=torch.float64), torch.randn(teacher_size, 6, dtype=torch.float64))
    narrow = TokenHead(teacher.hidden, teacher.weight[:shared])
    tokens = torch.randint(0, shared, (5,))
    coefficients = torch.rand(5, dtype=torch.float64)

    def scored(student_weight, other, how):
        h, w = hidden.clone().requires_grad_(), student_weight.clone().requires_grad_()
        scores = score_tokens(TokenHead(h, w), other, ScoreRequest(tokens, spec, coefficients), how)
        scores.loss.backward()
        return scores, h.grad, w.grad

    padded, padded_h, padded_w = scored(weight, teacher, implementation)
    equal, equal_h, equal_w = scored(weight[:shared], narrow, "reference")
    for name in ("loss", "divergence", "teacher_log_prob", "teacher_entropy"):
        torch.testing.assert_close(getattr(padded, name), getattr(equal, name), rtol=1e-9, atol=1e-9, msg=name)
    torch.testing.assert_close(padded_h, equal_h, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(padded_w[:shared], equal_w, rtol=1e-9, atol=1e-9)
    assert (padded_w[shared:].abs() < 1e-15).all()
    # The student's own statistics are those of its whole vocabulary, as TRL's are.
    whole = (hidden @ weight.t()).log_softmax(-1)
    torch.testing.assert_close(padded.log_prob.double(), whole.gather(1, tokens[:, None])[:, 0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(padded.entropy.double(), -(whole.exp() * whole).sum(-1), rtol=1e-9, atol=1e-9)
