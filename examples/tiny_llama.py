"""Small Llamas that the examples build and teach something, before a trainer gets them: seconds to minutes on a CPU.

A row is `(ids, labels)` as TRL's trainers take it; labels are -100 where nothing is learned. Rows are padded on the
right, where causal attention never looks, so no attention mask is needed.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

Row = tuple[list[int], list[int]]


def build_model(
    tokenizer: PreTrainedTokenizerBase, seed: int, *, hidden_size: int, num_layers: int, positions: int, **more
) -> LlamaForCausalLM:
    """A Llama with random weights, in float32; `more` goes to its `LlamaConfig`."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden_size, intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=positions,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa", **more,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def answers(tokenizer: PreTrainedTokenizerBase, pairs: Sequence[tuple[str, str]]) -> list[Row]:
    """Rows of prompt + answer + end token, of which prompts are not learned."""
    prompts = tokenizer([prompt for prompt, _ in pairs]).input_ids
    said = [[*ids, tokenizer.eos_token_id] for ids in tokenizer([answer for _, answer in pairs]).input_ids]
    return [(prompt + own, [-100] * len(prompt) + own) for prompt, own in zip(prompts, said, strict=True)]


def pad_right(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, both `(rows, longest)`."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _ in rows])
    return ids, torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows])


def warm_start(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    draw: Callable[[], Sequence[Row]],
    *,
    steps: int,
    learning_rate: float,
) -> float:
    """
    Teach the model, in place, what the rows hold.

    Args:
        draw: One batch of rows, short ones first: its two halves are padded apart.

    Returns:
        The last batch's loss per token, in nats: the mean of its halves'.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=max(steps, 11), pct_start=0.1, cycle_momentum=False
    )  # it divides by zero where a tenth of the steps is one
    model.train()
    total = 0.0
    progress = tqdm(range(steps), desc="warm start", disable=None)
    for _ in progress:
        batch, total = draw(), 0.0
        parts = [part for part in (batch[: len(batch) // 2], batch[len(batch) // 2 :]) if part]  # of one row, one
        for part in parts:
            ids, labels = pad_right(tokenizer, part)
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]  # (rows, longest - 1, vocabulary)
            loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()) / len(parts)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        progress.set_postfix(loss=f"{total:.3f}", refresh=False)
    return total


@torch.no_grad()
def mean_probability(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]) -> float:
    """The mean probability, exactly, that the model says all that is learned in a row, given the rest of it."""
    ids, labels = pad_right(tokenizer, rows)
    logits = model(input_ids=ids.to(model.device), use_cache=False).logits[:, :-1].float().cpu()
    losses = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")  # (rows, longest - 1)
    return losses.sum(1).neg().exp().mean().item()
