"""A tiny model, a tokenizer and datasets, built in code: no Hub, no files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from sdpo_trl import SDPOConfig, SDPOTrainer

CHARACTERS = [chr(i) for i in range(32, 127)] + ["\n"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for b in m['content'] %}{{ b['text'] }}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if think is defined and think %}<think>{% endif %}{% endif %}"
)


def build_tokenizer(pad_is_eos: bool = False) -> PreTrainedTokenizerFast:
    """One token per printable character, plus the markers of a small chat template."""
    special = ["<pad>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
    vocab = {token: i for i, token in enumerate([*special, "<unk>", *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<eos>" if pad_is_eos else "<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=special[2:],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A Llama of about 20 thousand parameters with weights large enough to prefer some tokens."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": 104,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": None,
            "initializer_range": 0.3,
            "attn_implementation": "eager",
            **overrides,
        }
    )
    return LlamaForCausalLM(config)


def from_config(config: Any, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config)


def prompts(count: int = 4, chat: bool = False, **columns: list[Any]) -> Dataset:
    texts = [f"task {i}: {'x' * i}=" for i in range(count)]
    rows = [[{"role": "user", "content": text}] for text in texts] if chat else texts
    return Dataset.from_dict({"prompt": rows, **columns})


def even_length(completions: list[Any], **kwargs: Any) -> list[float]:
    """Rewards an even number of characters: about half of random answers succeed."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [1.0 if len(text) % 2 == 0 else 0.0 for text in texts]


def never(completions: list[Any], **kwargs: Any) -> list[float]:
    return [0.0] * len(completions)


def always(completions: list[Any], **kwargs: Any) -> list[float]:
    return [1.0] * len(completions)


def telling(text: str = "wrong, try again", reward: Callable[..., list[float]] = never) -> Callable[..., list[float]]:
    """A reward function that also logs one feedback text per rollout."""

    def reward_with_feedback(completions, log_extra, **kwargs):
        log_extra("feedback", [f"{text} {i}" for i in range(len(completions))])
        return reward(completions)

    return reward_with_feedback


def config(folder: Path | str, **overrides: Any) -> SDPOConfig:
    return SDPOConfig(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "bf16": False,
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 6,
            "max_steps": 2,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "report_to": "none",
            "save_strategy": "no",
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            **overrides,
        }
    )


def trainer(folder: Path | str, reward: Any = even_length, model: Any = None, data: Any = None, **options: Any):
    """An `SDPOTrainer` on the tiny model; `trainer_*` options go to the trainer, the others to the config."""
    extra = {name[8:]: options.pop(name) for name in list(options) if name.startswith("trainer_")}
    return SDPOTrainer(
        model=build_model() if model is None else model,
        reward_funcs=reward,
        args=config(folder, **options),
        train_dataset=prompts() if data is None else data,
        processing_class=extra.pop("processing_class", None) or build_tokenizer(),
        **extra,
    )
