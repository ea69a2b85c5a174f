"""What is written and read back: the student alone where it is exported, the teacher beside it in a checkpoint.

Knows: folders, cards, stores. Deliberately does not know: losses, prompts.
"""

import copy
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import transformers.trainer
from accelerate.utils import is_peft_model
from huggingface_hub import ModelCard
from trl import GRPOTrainer
from trl.trainer.utils import get_config_model_id

from .card import complete_card
from .run_state import RunState
from .sampling_order import ResumableOrder
from .store import WeightStore

logger = logging.getLogger(__name__)

# Of an output folder, what is of the run and not of the model.
_RECORDS = ("completions/*", "heatmaps/*", "training_args.bin")


@contextmanager
def attribute(target: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value within the context."""
    previous = getattr(target, name)
    setattr(target, name, value)
    try:
        yield
    finally:
        setattr(target, name, previous)


class FilesTrainer(GRPOTrainer):
    """
    GRPO whose checkpoints hold the stores too, and whose card names the base model also when that is a folder.

    A checkpoint at the boundary of a rollout batch (`global_step * gradient_accumulation_steps` is a multiple of
    `steps_per_generation * num_iterations`) continues bit for bit on a CPU: weights, optimizer, teacher, random
    states, and the order of the prompts, also in later epochs. Elsewhere the rollouts of the current batch are not
    kept, so the resumed run makes them anew, with the weights of the checkpoint. A streamed dataset continues exactly
    within its first pass alone, since `Trainer` does not know its length.
    """

    _stores: dict[str, WeightStore]
    _teacher_kind: str
    _remembers: dict[str, RunState]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._distills:
            for name, store in self._stores.items():
                store.save(Path(output_dir) / f"sdpo_{name}.safetensors", writes=self.args.should_save)
        if self._distills and self.args.should_save:
            state = {name: part.state() for name, part in self._remembers.items()}
            partial = Path(output_dir) / "sdpo_state.partial"
            partial.write_text(json.dumps(state), encoding="utf-8")
            partial.replace(partial.with_suffix(".json"))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self._distills and checkpoint is not None:
            for name, store in self._stores.items():
                store.load(Path(checkpoint) / f"sdpo_{name}.safetensors")
            path = Path(checkpoint) / "sdpo_state.json"
            saved = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
            for name, part in self._remembers.items():
                if name in saved:
                    part.restore(saved[name])
                elif name != "health":
                    logger.warning(f"SDPO: the checkpoint {checkpoint} knows no {name}, so it starts anew.")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """PEFT brings an adapter back in float32; one on a quantized base trains in bfloat16, as TRL made it."""
        kept = {name: p.dtype for name, p in self.model.named_parameters() if p.requires_grad}
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        for name, p in self.model.named_parameters():
            if p.dtype != kept.get(name, p.dtype):
                p.data = p.data.to(kept[name])

    def _get_train_sampler(self, dataset=None):
        return ResumableOrder(super()._get_train_sampler(dataset))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        target = Path(output_dir or self.args.output_dir)
        with self._trained_adapters_alone(), nullcontext() if _internal_call else self._exporting():
            super().save_model(output_dir, _internal_call)
        # TRL writes a card with a checkpoint or a push alone; PEFT fills an empty one in wherever there is none, and
        # names a base model that is a folder by its path, which the Hub refuses.
        with attribute(self.args, "output_dir", str(target)):
            self.create_model_card(model_name=(self.args.hub_model_id or target.name).split("/")[-1])

    @contextmanager
    def _trained_adapters_alone(self) -> Iterator[None]:
        """Within, PEFT saves of several adapters those that train; it would write the others beside them."""
        if not is_peft_model(self.model) or len(self.model.peft_config) == 1:
            yield
            return
        save = partial(self.model.save_pretrained, selected_adapters=list(self.model.active_adapters))
        self.model.save_pretrained = save
        try:
            yield
        finally:
            del self.model.save_pretrained

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        with self._exporting(), self._pushing():
            return super().push_to_hub(commit_message, blocking, token, revision, private, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with self._pushing():
            super()._push_from_checkpoint(checkpoint_folder)

    @contextmanager
    def _pushing(self) -> Iterator[None]:
        """
        Within, what `Trainer` uploads of its output folder leaves the run's own records at home.

        Rollouts may be private; `log_completions_hub_repo` is how to share them. The settings are in the card.
        """
        api = transformers.trainer.hf_api()
        narrowed = copy.copy(api)

        def upload_folder(*, folder_path: Any, ignore_patterns: Any = (), **kwargs: Any) -> Any:
            if Path(folder_path) == Path(self.args.output_dir):
                ignore_patterns = [*ignore_patterns, *_RECORDS]
            return api.upload_folder(folder_path=folder_path, ignore_patterns=ignore_patterns, **kwargs)

        narrowed.upload_folder = upload_folder
        with attribute(transformers.trainer, "hf_api", lambda: narrowed):
            yield

    @contextmanager
    def _exporting(self) -> Iterator[None]:
        """Within, FSDP's weights are written whole: with its `SHARDED_STATE_DICT`, `save_model` writes none."""
        if not self.is_fsdp_enabled:
            yield
            return
        with attribute(self.accelerator.state.fsdp_plugin, "state_dict_type", "FULL_STATE_DICT"):
            yield

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: "str | list[str] | None" = None
    ) -> None:
        adapter = is_peft_model(self.model)
        tags = [tags] if isinstance(tags, str) else list(tags or ())
        model_name = model_name or Path(self.args.output_dir).absolute().name  # "." has no name
        super().create_model_card(model_name, dataset_name, [*tags, *(["peft"] if adapter else [])])
        if not self.is_world_process_zero():
            return
        path = Path(self.args.output_dir) / "README.md"
        source = get_config_model_id(self.model.config)
        card = ModelCard.load(path)
        if not source or Path(source).is_dir():
            # TRL names no base model that is not on the Hub; its metadata must stay empty, its text need not.
            name = f"`{Path(source).name}` (a local folder)" if source else "a model built from its configuration"
            card.text = card.text.replace("[None](https://huggingface.co/None)", name)
        complete_card(
            card, self.args, self._teacher_kind, adapter=adapter, chats=self._tokenizer.chat_template is not None,
            name=path.absolute().parent.name,
        )  # fmt: skip
        card.save(path)
