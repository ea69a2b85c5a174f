"""A tiny model, a tokenizer and datasets, built in code: no Hub, no files."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

from sdpo_trl import SDPOConfig, SDPOTrainer

CHARACTERS = [chr(i) for i in range(32, 127)] + ["\n"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for b in m['content'] %}{{ b['text'] }}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if think is defined and think %}<think>{% endif %}{% endif %}"
)

TOOL_TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}<|{{ m['role'] }}|>"
    "{{ m['content'] }}{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if think is defined and think %}<think>{% endif %}{% endif %}"
)
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<eos>\s*", "content": "text"},
    },
}


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


def tool_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny tokenizer with a template and a parser for tool calls: `<tool_call>{...}</tool_call>`."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
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


def scripted(answers: list[str], masks: list[list[int]] | None = None, **extra: list[Any]) -> Callable[..., dict]:
    """
    A `rollout_func` that gives these answers in order instead of sampling. `$` is the end token.

    `masks` marks the model's own tokens with 1 and a tool's with 0.
    """

    def rollout_func(batch: list[Any], trainer: SDPOTrainer) -> dict[str, list[Any]]:
        prompt_ids, _, _ = trainer._tokenize_prompts(batch)
        texts = [answers[i % len(answers)] for i in range(len(batch))]
        completion_ids = [answer_ids(trainer._tokenizer, text) for text in texts]
        output = {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}
        if masks is not None:
            output["env_mask"] = [masks[i % len(masks)] for i in range(len(batch))]
        return output | {key: [values[i % len(values)] for i in range(len(batch))] for key, values in extra.items()}

    return rollout_func


def acting(trainer: SDPOTrainer, scripts: list[list[str]]) -> SDPOTrainer:
    """
    Let the students of a batch say these turns instead of sampling: row `i` follows `scripts[i % len(scripts)]`.

    `$` is the end token. TRL's tool loop runs as always.
    """
    said: list[list[Any]] = []  # what a row reads next begins with this; its turns so far

    def generate(prompt_ids, *args, **kwargs):
        starts = not said or (len(said) == len(prompt_ids) and all(len(row[0]) >= len(prompt_ids[0]) for row in said))
        if starts:
            said[:] = [[list(ids), -1, scripts[i % len(scripts)]] for i, ids in enumerate(prompt_ids)]
        turns, used = [], set()
        for number, ids in enumerate(prompt_ids):
            fits = (i for i, row in enumerate(said) if i not in used and list(ids[: len(row[0])]) == row[0])
            index = number if starts else next(fits)
            used.add(index)
            said[index][1] += 1
            turn = answer_ids(trainer._tokenizer, said[index][2][said[index][1]])
            said[index][0] = [*ids, *turn]
            turns.append(turn)
        return turns, None

    trainer._generate_single_turn = generate
    return trainer


def answer_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The ids of a scripted answer, `$` being the end token."""
    ids = tokenizer(text.removesuffix("$"))["input_ids"]
    return [*ids, tokenizer.eos_token_id] if text.endswith("$") else ids


def lora(**overrides: Any) -> LoraConfig:
    return LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **overrides}
    )


def trained_adapter(seed: int = 3, **overrides: Any) -> PeftModel:
    """The tiny model with an adapter that already changes its outputs."""
    model = get_peft_model(build_model(), lora(**overrides))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the tensors that train."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def shift(model: torch.nn.Module, scale: float = 0.02, seed: int = 5) -> None:
    """Move what trains, as some optimizer steps would."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.data.add_((scale * noise).to(parameter.dtype))


def micro_batches(trainer: Any) -> list[dict[str, Any]]:
    """The first rollout batch as the trainer would train on it, without training."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    return trainer._buffered_inputs


def scored(inputs: dict[str, Any]) -> torch.Tensor:
    """The tokens that are distilled, bool of shape `(B, T)`."""
    mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    return mask.bool() & inputs["feedback_available"][:, None]


def teacher_head(trainer: Any, inputs: dict[str, Any]) -> Any:
    """The teacher's head over the scored tokens, by a pass of its own."""
    fresh = {name: value for name, value in inputs.items() if name != "teacher_hidden"}
    return trainer._teacher_pass.head(fresh, scored(inputs))


def gradient(trainer: Any, inputs: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of one micro-batch and its gradient."""
    trainer.model.zero_grad(set_to_none=True)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}


class FirstGradient(TrainerCallback):
    """Keeps the gradient that the first optimizer step used. Needs `max_grad_norm=0`."""

    def __init__(self) -> None:
        self.value: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.value:
            names = ((name.removeprefix("module."), p.grad) for name, p in model.named_parameters())
            self.value = {name: grad.clone() for name, grad in names if grad is not None}


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def assert_near(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float = 1e-4) -> None:
    """Up to `rtol` of the largest entry of all tensors."""
    assert actual.keys() == expected.keys()
    scale = max(value.abs().max().item() for value in expected.values())
    for name, value in expected.items():
        difference = (actual[name].double() - value.double()).abs().max().item()
        assert difference <= rtol * scale, f"{name}: {difference} of {scale}"


def training_logs(trainer: Any) -> list[dict[str, float]]:
    """The logs of the training steps, without the times and the summary at the end."""
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return [
        {key: value for key, value in row.items() if key != "step_time" and not key.startswith("sdpo/time/")}
        for row in rows
    ]


# `Trainer.train` collects garbage at its start; without this it walks through all that was imported, 0.3 s each time.
gc.collect()
gc.freeze()
