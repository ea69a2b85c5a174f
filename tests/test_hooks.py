"""What of TRL's insides the trainer stands on; a new release that moves any of it fails here, by name."""

import ast
import hashlib
import inspect
import textwrap

import pytest
import trl.trainer.base_trainer
import trl.trainer.utils
from transformers import Trainer
from trl import GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from sdpo_trl import SDPOTrainer
from sdpo_trl.online import OnlineTrainer
from sdpo_trl.problem_trainer import ProblemTrainer

# The source without comments, docstrings and layout. To renew one after reading what changed: run this file.
EXPECTED = {
    "GRPOTrainer.__init__": "a9957d15de1e56db",
    "GRPOTrainer._set_signature_columns_if_needed": "d29bc22f99c1edb3",
    "GRPOTrainer._get_train_sampler": "1b25d1c0176a460e",
    "GRPOTrainer._get_per_token_logps_and_entropies": "31bbe58ca8ba5d47",
    "GRPOTrainer.training_step": "96c133253ca1d7ee",
    "GRPOTrainer._prepare_inputs": "b6f38f7a05aa4406",
    "GRPOTrainer._log_completion_extra": "519c96e35fca63f9",
    "GRPOTrainer._calculate_rewards": "a30f2929443bd289",
    "GRPOTrainer._tokenize_prompts": "f0e7e168ffd63d94",
    "GRPOTrainer._generate": "c43183674d09daf2",
    "GRPOTrainer._generate_single_turn": "7e2f21bdaf91a7fb",
    "GRPOTrainer._get_tool_suffix_ids": "143d703a93fd42bb",
    "GRPOTrainer._tool_call_loop": "ba4ef3a633e2e4ee",
    "GRPOTrainer._generate_and_score_completions": "739def7da67c5a5b",
    "GRPOTrainer._compute_loss": "6b861df63f5aaa7a",
    "GRPOTrainer.log": "c4d4db52f9ef2366",
    "GRPOTrainer._load_optimizer_and_scheduler": "f0236c69fcf3477c",
    "Trainer._save_optimizer_and_scheduler": "99a0de2f24536135",
    "Trainer._load_from_checkpoint": "9041218b8c5dc09e",
    "Trainer._load_optimizer_and_scheduler": "cd72a358e3c58c51",
    "GRPOTrainer._save_checkpoint": "96c508fc0fca70f7",
    "Trainer.train": "ef0b73cdf6420286",
    "Trainer._inner_training_loop": "68a3ebc1aaea235b",
    "Trainer._run_epoch": "28066199eba1991e",
    "Trainer._finalize_training": "6915ca6112509126",
    "Trainer._get_grad_norm": "b2787642923d849b",
    "Trainer.save_model": "0ea4ba18a261c6c7",
    "Trainer.push_to_hub": "725529267e92cc52",
    "Trainer._push_from_checkpoint": "fc40ece078cb892e",
    "_BaseTrainer.create_model_card": "2845ed823c4df45c",
    "RepeatSampler": "0769fe928c1dc733",
    "add_fused_lm_head": "27301e73e4ace4f2",
    "shuffle_sequence_dict": "03c0043ab5aba2fe",
    "split_tensor_dict": "5cf32f6e8f1430a4",
    "get_config_model_id": "46df7d62a20eba18",
    "VLLMClient.__init__": "348d6c3979bd0020",
    "VLLMClient.get_sequence_logprobs": "c9f23a8f57793d41",
    "VLLMGeneration._iter_named_params": "6d5a7763acd5eb5f",
    "VLLMGeneration._iter_fsdp2_params": "220255536cae4736",
    "VLLMGeneration.sync_weights": "9c4671d678ef37bb",
    "is_async_callable": "27fc54a379c4c250",
    "pad": "ed2b0f1c87c28daf",
}
TRLS_ATTRIBUTES = [
    "_async_tool_dicts", "_batch_environments", "_buffered_inputs", "_entropy_bonus_enabled", "_env_tools",
    "_has_async_funcs", "_is_vlm", "_last_loaded_step", "_logs", "_metrics", "_step", "_sync_tool_dicts", "_tokenizer",
    "aux_loss_enabled",
    "current_gradient_accumulation_steps", "environment_factories", "generation_config", "num_generations_eval",
    "reward_func_names", "reward_funcs", "reward_processing_classes", "reward_weights", "rollout_func", "tools",
    "use_vllm", "vllm_generation",
]  # fmt: skip
OWNERS = {
    "GRPOTrainer": GRPOTrainer,
    "Trainer": Trainer,
    "VLLMClient": VLLMClient,
    "VLLMGeneration": VLLMGeneration,
    "_BaseTrainer": trl.trainer.base_trainer._BaseTrainer,
}


def find(name):
    owner, _, attribute = name.rpartition(".")
    return getattr(OWNERS[owner] if owner else trl.trainer.utils, attribute)


def fingerprint(function):
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


def ours(cls):
    return cls.__module__.startswith("sdpo_trl")


ALL = list(dict.fromkeys([*ProblemTrainer.__mro__, *OnlineTrainer.__mro__]))
LAYERS = [cls for cls in ALL if ours(cls)]
BELOW = [cls for cls in SDPOTrainer.__mro__ if not ours(cls) and cls is not object]


def overrides():
    """Each method of a layer of ours that a class of TRL's or transformers' has too, with its layer."""
    return sorted(
        (
            (name, cls)
            for cls in LAYERS
            for name, value in vars(cls).items()
            if inspect.isfunction(value) and any(name in vars(base) for base in BELOW)
        ),
        key=lambda entry: entry[0],
    )


@pytest.mark.parametrize("name", EXPECTED)
def test_trl_has_not_moved(name):
    assert fingerprint(find(name)) == EXPECTED[name], (
        f"TRL's `{name}` is not the one that SDPOTrainer was written against. Read what changed, adapt the trainer, "
        "then renew its entry in EXPECTED."
    )


def test_what_is_overridden_is_watched():
    watched = {name.rpartition(".")[2] for name in EXPECTED}
    assert not {name for name, _ in overrides()} - watched, "an override whose TRL body is not in EXPECTED"


@pytest.mark.parametrize(("name", "cls"), [entry for entry in overrides() if entry[0] != "__init__"])
def test_signatures_match_trls(name, cls):
    """Names and kinds; TRL's defaults and annotations may be written in other words."""

    def parameters(function):
        return [(p.name, p.kind.name) for p in inspect.signature(inspect.unwrap(function)).parameters.values()]

    inherited = next(vars(base)[name] for base in BELOW if name in vars(base))
    assert parameters(vars(cls)[name]) == parameters(inherited), (
        f"`{cls.__name__}.{name}` no longer has the parameters of TRL's"
    )


def test_every_override_extends():
    assert len(overrides()) >= 10
    for name, cls in overrides():
        tree = ast.parse(textwrap.dedent(inspect.getsource(vars(cls)[name])))
        calls = [
            node.func.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Call)
            and isinstance(node.func.value.func, ast.Name)
            and node.func.value.func.id == "super"
        ]
        assert name in calls, f"`{cls.__name__}.{name}` copies instead of calling `super().{name}`"


def test_trl_still_sets_the_attributes_that_are_read():
    source = inspect.getsource(GRPOTrainer) + inspect.getsource(Trainer)
    for name in TRLS_ATTRIBUTES:
        assert f"self.{name} = " in source, f"TRL no longer sets `{name}`"


if __name__ == "__main__":
    for hook in EXPECTED:
        print(f'    "{hook}": "{fingerprint(find(hook))}",')
