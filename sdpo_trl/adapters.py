"""Which adapters can be trained, written and brought back, as far as PEFT's own files can hold them.

Knows: PEFT. Deliberately does not know: trainers, teachers, vLLM.
"""

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict
from peft.utils.other import TrainableTokensWrapper
from torch import nn
from transformers import PreTrainedModel


def check_adapter(model: PeftModel) -> None:
    """
    Refuse what would train nothing, or would train something else than is written.

    Raises:
        `ValueError`: an adapter that is merged, whose base cannot be made again, or with weights that PEFT leaves out.
    """
    merged = [name for name, m in model.named_modules() if isinstance(m, BaseTunerLayer) and m.merged]
    if merged:
        raise ValueError(
            f"The adapter is merged into its base (first in {merged[0]!r}), so it would not train. Call "
            "`model.unmerge_adapter()` first."
        )
    for name in model.active_adapters:
        config = model.peft_config[name]
        if config.is_adaption_prompt:
            raise ValueError("Adaption prompts do not run in TRL's GRPO, nor here. Use LoRA or another adapter.")
        start = getattr(config, "init_lora_weights", None)
        if isinstance(start, str) and start.startswith("pissa_niter"):
            raise ValueError(
                f"`init_lora_weights={start!r}` takes a random part out of the base model's weights, another one each "
                "time it is loaded, so neither a checkpoint nor the export could be brought back. Use "
                "`init_lora_weights='pissa'`, which is exact."
            )
    unsaved = _unsaved(model)
    if unsaved:
        raise ValueError(
            f"{unsaved[0]!r} trains ({len(unsaved)} such weights) but is no part of the active adapter, so neither a "
            "checkpoint nor the export would hold it. Name its module in the adapter's `modules_to_save`, or "
            "freeze it."
        )


def _unsaved(model: PeftModel) -> list[str]:
    """The weights of the base model that train and that PEFT leaves out of the active adapters' files."""
    own = ("prompt_encoder.", model.base_model.prefix) if hasattr(model.base_model, "prefix") else ("prompt_encoder.",)
    idle = [f".{name}." for name in model.peft_config if name not in model.active_adapters]
    trained = {
        name: p for name, p in model.named_parameters()
        if p.requires_grad and not any(part in name for part in (*own, *idle))
    }  # fmt: skip
    if not trained:
        return []
    saved: set[int] = set()
    content = model.state_dict(keep_vars=True)  # the parameters themselves
    for adapter in model.active_adapters:
        written = get_peft_model_state_dict(model, content, adapter, save_embedding_layers=False)
        saved.update(id(value) for value in written.values())
    return [name for name, p in trained.items() if id(p) not in saved]


def check_resumable(model: nn.Module) -> None:
    """
    Refuse to bring back an adapter of which PEFT keeps the outputs alone.

    Raises:
        `ValueError`: prompts that a trained network writes (P-tuning, prefix tuning with `prefix_projection`).
    """
    for name, p in model.named_parameters():
        parts = name.split(".")
        if "prompt_encoder" in parts and p.requires_grad and "embedding" not in parts:
            raise ValueError(
                f"This run cannot be resumed: PEFT saves the prompts that {name!r} writes, which is all that an "
                "export needs, but not that weight itself. Start anew, or use prompt tuning, prefix tuning without "
                "`prefix_projection`, or LoRA."
            )


def show_bias(model: PreTrainedModel, sharded: bool) -> None:
    """
    TRL reads the output head's `bias`, which PEFT's wrapper of a head with trained tokens hides.

    Args:
        model (`transformers.PreTrainedModel`): The model under the adapter.
        sharded (`bool`): Whether processes will share its parameters (FSDP2, ZeRO-3).

    Raises:
        `NotImplementedError`: both.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, TrainableTokensWrapper):
        return
    if sharded:
        raise NotImplementedError(
            "Trained tokens of an output head (`trainable_token_indices` with tied embeddings) do not run under FSDP2 "
            "or ZeRO-3, which find the same weight in two places. Use DDP or ZeRO-2, load the model with "
            "`tie_word_embeddings=False`, or train the embeddings whole (`modules_to_save`)."
        )
    vars(head)["bias"] = getattr(head.original_module, "bias", None)  # not registered a second time
