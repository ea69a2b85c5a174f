"""What the model card of an SDPO run says beyond TRL's: its settings, and a snippet that runs as it stands.

Knows: texts, options. Deliberately does not know: weights, folders, the Hub.
"""

import json
from dataclasses import fields
from typing import Any

from huggingface_hub import ModelCard
from trl import GRPOConfig

_ALWAYS = (
    "learning_rate", "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps",
    "num_generations", "max_completion_length", "temperature", "beta", "loss_type", "seed",
    "distillation_weight", "distillation_mode", "distillation_alpha",
)  # fmt: skip
# Where something runs or is kept says nothing about the model, and loading options may hold a token.
_NEVER = ("teacher_model_init_kwargs", "teacher_offload", "distillation_impl", "reward_timeout", "max_nonfinite_steps")
_FOLLOWS = "### Framework versions"


def settings(args: Any) -> dict[str, Any]:
    """The options worth knowing: the usual ones, and those of SDPO's own that are not at their default."""
    inherited = {option.name for option in fields(GRPOConfig)}
    own = [f.name for f in fields(args) if f.name not in inherited and f.name not in _NEVER]
    shown = [*_ALWAYS, *(name for name in own if name not in _ALWAYS and getattr(args, name) != args._default(name))]
    return {name: getattr(args, name) for name in shown}


def complete_card(card: ModelCard, args: Any, teacher: str, *, adapter: bool, chats: bool, name: str) -> None:
    """
    Add the settings to TRL's card, and mend what would not run in its snippet.

    Args:
        card (`ModelCard`): TRL's; changed in place.
        args ([`SDPOConfig`]): Of the run.
        teacher (`str`): Its kind.
        adapter (`bool`): Whether the model is an adapter of PEFT's.
        chats (`bool`): Whether the tokenizer has a chat template.
        name (`str`): Of the folder, where the model has no name on the Hub.
    """
    if adapter:
        card.data.library_name = "peft"
    text = card.text.replace('model="None"', f"model={json.dumps(f'./{name}', ensure_ascii=False)}")
    if not chats:
        text = text.replace('[{"role": "user", "content": question}]', "question")
    lines = "\n".join(f"{key}: {json.dumps(value)}" for key, value in settings(args).items())
    section = (
        f"### Training settings\n\nThe teacher: {teacher}. The options, as a YAML file for `SDPOConfig`, those of "
        f"SDPO where they differ from its defaults:\n\n~~~yaml\n{lines}\n~~~\n\n"
    )
    card.text = text.replace(_FOLLOWS, section + _FOLLOWS, 1)
