"""What a token counts in the loss, against sums over rows and tokens in plain Python."""

import math

import pytest
import torch

from sdpo_trl.loss import Normalizer, token_coefficients

LOSS_TYPES = ["dapo", "cispo", "vespo", "grpo", "sapo", "dr_grpo", "luspo", "bnpo"]
MAX_LENGTH = 7
every_type = pytest.mark.parametrize("loss_type", LOSS_TYPES)
split_types = pytest.mark.parametrize("loss_type", LOSS_TYPES[:-1])


def batch(rows=8, length=5, seed=0):
    """Values and a ragged mask: a row without active tokens, gaps as tools leave them, a row of one token."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, length, generator=generator, dtype=torch.float64)
    active = torch.rand(rows, length, generator=generator) < 0.6
    active[1] = False
    active[2] = torch.tensor([True] + [False] * (length - 1))
    active[rows - 1] = True
    return values, active


def normalizer(active, share=1.0, accumulation=1):
    return Normalizer(active.sum(), active.any(dim=1).sum(), share, accumulation, MAX_LENGTH)


def loss_of(values, active, loss_type, norm):
    return (token_coefficients(active, loss_type, norm).double() * values).sum()


def slow_loss(values, active, loss_type):
    """One whole batch, as the loss types are described."""
    rows = [
        [v for v, a in zip(vs, xs, strict=True) if a] for vs, xs in zip(values.tolist(), active.tolist(), strict=True)
    ]
    rows = [row for row in rows if row]
    tokens = [value for row in rows for value in row]
    if loss_type in ("dapo", "cispo", "vespo", "bnpo"):
        return math.fsum(tokens) / len(tokens)
    if loss_type in ("grpo", "sapo"):
        return math.fsum(math.fsum(row) / len(row) for row in rows) / len(rows)
    if loss_type == "dr_grpo":
        return math.fsum(tokens) / (len(rows) * MAX_LENGTH)
    return math.fsum(tokens) / len(rows)


@every_type
def test_one_batch_equals_the_slow_sums(loss_type):
    values, active = batch()
    loss = loss_of(values, active, loss_type, normalizer(active))
    assert loss.item() == pytest.approx(slow_loss(values, active, loss_type), rel=1e-6)
    coefficients = token_coefficients(active, loss_type, normalizer(active))
    assert torch.equal(coefficients != 0, active)
    assert (coefficients >= 0).all()


@split_types
@pytest.mark.parametrize("cut", [4, 2])
def test_accumulated_micro_batches_equal_one_batch(loss_type, cut):
    """Their sum, as gradients accumulate: micro-batches of very different numbers of active tokens."""
    values, active = batch()
    norm = normalizer(active, accumulation=8 // cut)
    parts = [loss_of(values[i : i + cut], active[i : i + cut], loss_type, norm) for i in range(0, 8, cut)]
    assert sum(parts).item() == pytest.approx(slow_loss(values, active, loss_type), rel=1e-6)


@split_types
@pytest.mark.parametrize("accumulation", [1, 2])
def test_averaged_processes_equal_one_batch(loss_type, accumulation):
    """Two processes, whose gradients are averaged, each with one or two micro-batches."""
    values, active = batch()
    norm = normalizer(active, share=0.5, accumulation=accumulation)
    size = 4 // accumulation
    per_process = [
        sum(
            loss_of(values[i : i + size], active[i : i + size], loss_type, norm) for i in range(start, start + 4, size)
        )
        for start in (0, 4)
    ]
    assert (sum(per_process) / 2).item() == pytest.approx(slow_loss(values, active, loss_type), rel=1e-6)


@split_types
def test_several_optimizer_steps_share_one_rollout_batch(loss_type):
    """Each of two steps stands for half of the batch, so their losses average to that of the whole."""
    values, active = batch()
    norm = normalizer(active, share=0.5)
    steps = [loss_of(values[i : i + 4], active[i : i + 4], loss_type, norm) for i in (0, 4)]
    assert (sum(steps) / 2).item() == pytest.approx(slow_loss(values, active, loss_type), rel=1e-6)


def test_bnpo_averages_each_micro_batch_by_itself():
    values, active = batch()
    parts = [loss_of(values[i : i + 4], active[i : i + 4], "bnpo", normalizer(active, accumulation=2)) for i in (0, 4)]
    halves = [slow_loss(values[i : i + 4], active[i : i + 4], "bnpo") for i in (0, 4)]
    assert sum(parts).item() == pytest.approx(sum(halves) / 2, rel=1e-6)
    assert sum(parts).item() != pytest.approx(slow_loss(values, active, "bnpo"), rel=1e-3)


@every_type
def test_rows_without_active_tokens_change_nothing(loss_type):
    _, active = batch()
    alone = token_coefficients(active, loss_type, normalizer(active))
    more = torch.cat([torch.zeros(3, 5, dtype=torch.bool), active, torch.zeros(2, 5, dtype=torch.bool)])
    padded = token_coefficients(more, loss_type, normalizer(more))
    assert torch.equal(padded[3:11], alone)
    assert not padded[:3].any() and not padded[11:].any()
    wider = torch.cat([active, torch.zeros(8, 4, dtype=torch.bool)], dim=1)
    assert torch.equal(token_coefficients(wider, loss_type, normalizer(wider))[:, :5], alone)


@every_type
def test_nothing_active(loss_type):
    nothing = torch.zeros(3, 5, dtype=torch.bool)
    assert torch.equal(token_coefficients(nothing, loss_type, normalizer(nothing)), torch.zeros(3, 5))
    _, active = batch()  # another micro-batch has something to learn
    assert torch.equal(token_coefficients(nothing, loss_type, normalizer(active)), torch.zeros(3, 5))
    empty = torch.zeros(3, 0, dtype=torch.bool)
    assert token_coefficients(empty, loss_type, normalizer(empty)).shape == (3, 0)


@every_type
def test_dropping_a_row_removes_it_from_numerator_and_denominator(loss_type):
    values, active = batch()
    dropped = active.clone()
    dropped[7] = False  # a truncated answer
    loss = loss_of(values, dropped, loss_type, normalizer(dropped)).item()
    assert loss == pytest.approx(slow_loss(values[:7], active[:7], loss_type), rel=1e-6)
    assert loss != pytest.approx(slow_loss(values, active, loss_type), rel=1e-3)


def test_counts_beyond_float32_integers():
    """16,777,217 tokens: a long batch of many processes."""
    active = torch.ones(1, 1, dtype=torch.bool)
    norm = Normalizer(torch.tensor(2**24 + 1), torch.tensor(2**14), 1.0, 1, MAX_LENGTH)
    assert token_coefficients(active, "dapo", norm).item() == pytest.approx(1 / (2**24 + 1), rel=1e-6)


def test_an_unknown_type_is_named():
    _, active = batch()
    with pytest.raises(ValueError, match="'unheard_of'"):
        token_coefficients(active, "unheard_of", normalizer(active))
