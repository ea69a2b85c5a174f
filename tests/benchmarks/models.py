"""A random model of SmolLM2-135M's shape, a synthetic rollout batch, and the three trainers that get it."""

import copy
from pathlib import Path
from typing import Any

import tiny
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from sdpo_trl import SDPOTrainer

VOCABULARY = 49152


def smollm() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True, attn_implementation="sdpa",
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batch(prompt: int, teacher_prompt: int, length: int, shared: bool, scored: int = 8) -> dict[str, torch.Tensor]:
    """8 answers to one question, `scored` of them with feedback: the same for all (`shared`), or each its own."""
    generator = torch.Generator().manual_seed(1)

    def ids(*shape):
        return torch.randint(110, VOCABULARY, shape, generator=generator)

    question = ids(1, prompt).expand(8, -1).contiguous()
    told = ids(1, teacher_prompt).expand(8, -1).contiguous()
    if not shared:  # what follows the question differs
        told[:, prompt:] = ids(8, teacher_prompt - prompt)
    available = torch.arange(8) < scored
    ones = torch.ones(8, length, dtype=torch.long)
    return {
        "prompt_ids": question, "prompt_mask": torch.ones_like(question), "completion_ids": ids(8, length),
        "completion_mask": ones, "advantages": torch.randn(8, generator=generator),
        "num_items_in_batch": torch.tensor(8 * length), "feedback_available": available,
        "active_tokens": torch.tensor(scored * length), "active_rows": torch.tensor(scored),
        "teacher_prompt_ids": told, "teacher_prompt_mask": torch.ones_like(told),
    }  # fmt: skip


def ours(folder: str | Path, model: Any, **options: Any) -> SDPOTrainer:
    return tiny.trainer(folder, model=model, num_generations=8, **options)


def grpo(folder: str | Path, model: Any) -> GRPOTrainer:
    args = GRPOConfig(
        str(folder), use_cpu=True, bf16=False, per_device_train_batch_size=8, num_generations=8, report_to="none",
        gradient_checkpointing=False, max_completion_length=256,
    )  # fmt: skip
    return GRPOTrainer(model, tiny.even_length, args, tiny.prompts(), processing_class=tiny.build_tokenizer())


def trl_sdpo(folder: str | Path, model: Any, **options: Any):
    """TRL's experimental trainer; it loads its EMA teacher from the model's folder."""
    from trl.experimental.sdpo import SDPOConfig
    from trl.experimental.sdpo import SDPOTrainer as TheirTrainer

    home = Path(folder) / "model"
    model.save_pretrained(home)
    model = copy.deepcopy(model)
    model.config._name_or_path = str(home)
    args = SDPOConfig(
        str(folder), use_cpu=True, bf16=False, per_device_train_batch_size=8, num_generations=8, report_to="none",
        gradient_checkpointing=False, distillation_mode="full_logits", distillation_alpha=0.5, **options,
    )  # fmt: skip
    return TheirTrainer(
        model=model, reward_funcs=tiny.even_length, args=args, train_dataset=tiny.prompts(),
        processing_class=tiny.build_tokenizer(),
    )  # fmt: skip
