"""An external teacher: another frozen model that reads the same tokens.

Knows: loading, preparing and checking it. Deliberately does not know: prompts, losses.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import is_peft_model
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from accelerate.utils.other import get_module_children_bottom_up
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl.models.utils import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import add_fused_lm_head, create_model_from_path, get_config_model_id

from .shards import whole_shape

logger = logging.getLogger(__name__)

# Each of them tells the ids of tokens, or which file does.
_TOKENIZER_FILES = (
    "tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip


def check_vocabulary(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> None:
    """
    Refuse a teacher whose tokens have other ids; a vocabulary that is only padded differently is fine.

    Raises:
        `ValueError`: the first token whose ids differ is named.
    """
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    for token, index in sorted(ours.items(), key=lambda item: item[1]):
        if theirs.get(token) != index:
            raise ValueError(
                f"The teacher's tokenizer maps {token!r} to {theirs.get(token)}, the student's to {index}. A teacher "
                "scores the student's own token ids, so both need one mapping: choose a teacher of the same family."
            )


@contextmanager
def _loaded_everywhere() -> Iterator[None]:
    """FSDP may load a model on one process and send it to the others when it wraps the student, never a teacher."""
    name = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    previous = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if previous is None:
            del os.environ[name]
        else:
            os.environ[name] = previous


def load_external_teacher(
    teacher: "str | PreTrainedModel",
    init_kwargs: dict | None,
    tokenizer: PreTrainedTokenizerBase,
    trust_remote_code: bool,
) -> PreTrainedModel:
    """
    Load (or take) the teacher, check its vocabulary against the student's, and freeze it.

    Args:
        teacher (`str` or `PreTrainedModel`): A path, a Hub id, or a model.
        init_kwargs (`dict`, *optional*): For `from_pretrained`.
        tokenizer (`PreTrainedTokenizerBase`): The student's.
        trust_remote_code (`bool`): As in `from_pretrained`.

    Raises:
        `ValueError`: the mappings differ, the teacher's head is too small, or `init_kwargs` come with a model object.
    """
    if isinstance(teacher, str):
        name = teacher
        with _loaded_everywhere():
            teacher = create_model_from_path(
                teacher, **{"trust_remote_code": trust_remote_code, **(init_kwargs or {})}
            )
    elif is_peft_model(teacher):
        raise ValueError("`teacher_model` is a `PeftModel`. Pass `teacher_model.merge_and_unload()`.")
    elif init_kwargs:
        raise ValueError(
            "`teacher_model_init_kwargs` is for a `teacher_model` given as a path; yours is a model object."
        )
    else:
        name = get_config_model_id(teacher.config)
    # A folder may hold weights alone, or be gone; a Hub id always comes with its tokenizer.
    local = Path(name).is_dir() or Path(name).is_absolute()
    if name and (not local or any((Path(name) / file).is_file() for file in _TOKENIZER_FILES)):
        check_vocabulary(tokenizer, AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code))
    else:
        logger.warning(
            "The external teacher has no tokenizer beside it, so only the size of its vocabulary was checked, not "
            "that its token ids mean the same as the student's."
        )
    needed = max(tokenizer.get_vocab().values()) + 1
    size = whole_shape(teacher.get_output_embeddings().weight)[0]
    if size < needed:
        raise ValueError(
            f"The teacher's head has {size} items, but the student's tokenizer has ids up to {needed - 1}. Choose a "
            "teacher of the same family."
        )
    return teacher.requires_grad_(False).eval()


def _shard_layers(teacher: PreTrainedModel, accelerator: Accelerator) -> None:
    """Give each layer its own FSDP2 unit, as Accelerate does for the student: TRL would gather the whole at once."""
    plugin = accelerator.state.fsdp_plugin
    separate = fsdp2_prepare_auto_wrap_policy(plugin, teacher)
    mesh = accelerator.torch_device_mesh
    for module in [] if separate is None else get_module_children_bottom_up(teacher)[:-1]:
        if separate(module):
            fully_shard(
                module,
                mesh=None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)],
                reshard_after_forward=plugin.reshard_after_forward,
                mp_policy=plugin.mixed_precision_policy or MixedPrecisionPolicy(),
                offload_policy=plugin.cpu_offload,
            )


def prepare_external_teacher(teacher: PreTrainedModel, temperature: float, trainer) -> PreTrainedModel:
    """Give the teacher TRL's fused head and place it as TRL places its reference model."""
    add_fused_lm_head(teacher, temperature=temperature)
    if trainer.is_deepspeed_enabled:
        return prepare_deepspeed(teacher, trainer.accelerator)
    if trainer.is_fsdp_enabled:
        _shard_layers(teacher, trainer.accelerator)
        return prepare_fsdp(teacher, trainer.accelerator)
    return trainer.accelerator.prepare_model(teacher, evaluation_mode=True)
