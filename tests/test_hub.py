"""A run that is pushed to a Hub and loaded back from it, end to end, against the small Hub of hub_server.py."""

import copy
import io
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import hub_server
import pandas as pd
import pytest
import tiny
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load

from sdpo_trl import SDPOConfig

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
TESTS = Path(__file__).parent


def run(hub, part, folder):
    home = folder / f"home-{part}"  # what was pushed is not in the cache of the one that loads
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))} | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_TOKEN": "hf_test",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(TESTS / "hub_worker.py"), part, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    tiny.build_model().save_pretrained(folder / "base")
    tiny.build_tokenizer().save_pretrained(folder / "base")
    with hub_server.serve() as hub:
        hub.add("org/tiny-base", folder / "base")
        run(hub, "push", folder)
        yield hub, folder


@pytest.fixture(scope="module")
def loaded(pushed):
    hub, folder = pushed
    run(hub, "load", folder)
    return torch.load(folder / "loaded.pt", weights_only=True)


def test_only_known_routes_are_asked(pushed, loaded):
    hub, _ = pushed
    assert not hub.unknown
    assert {"create", "preupload", "lfs_batch", "lfs_upload", "commit", "resolve"} <= hub.asked


TOKENIZER = {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}
SHARED = {"README.md", *TOKENIZER}


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("me/adapter", {"adapter_config.json", "adapter_model.safetensors"}),
        ("me/online", {"adapter_config.json", "adapter_model.safetensors"}),
        ("me/full", {"config.json", "generation_config.json", "model.safetensors"}),
    ],
)
def test_the_student_the_tokenizer_and_the_card_are_there_and_nothing_else(pushed, name, weights):
    hub, folder = pushed
    files = hub.files["model", name]
    assert set(files) == SHARED | weights
    output = folder / name.split("/")[1]  # where TRL keeps its tables, and `Trainer` its pickled settings
    kept = (output / "training_args.bin").is_file()
    assert kept == (name != "me/online")  # a session pushes from a folder that goes
    assert any((output / "completions").glob("*.parquet")) == (name == "me/adapter")
    (tensors,) = (load(content) for path, content in files.items() if path.endswith(".safetensors"))
    assert len(tensors) == (8 if name != "me/full" else len(list(tiny.build_model().parameters())))
    assert not any(word in key for key in tensors for word in ("teacher", "ema", "ref", "initial"))


def test_nothing_of_a_conversation_is_pushed(pushed):
    hub, folder = pushed
    journal = (folder / "online" / "journal.jsonl").read_text()
    assert "secret words" in journal and "secret correction" in journal
    assert not any(b"secret" in content for content in hub.files["model", "me/online"].values())
    assert [message for repo, message, _ in hub.commits if repo == ("model", "me/online")] == ["A session"]


def test_every_checkpoint_and_the_end_are_commits(pushed):
    hub, _ = pushed
    said = [message for repo, message, _ in hub.commits if repo == ("model", "me/adapter")]
    assert "Training in progress, step 2" in said and said[-1] == "The adapter"
    assert [message for repo, message, _ in hub.commits if repo == ("model", "me/full")] == ["End of training"]


def test_what_is_loaded_back_is_what_was_trained(pushed, loaded):
    _, folder = pushed
    trained = torch.load(folder / "pushed.pt", weights_only=True)
    assert torch.equal(loaded["adapter"], trained["adapter"]) and torch.equal(loaded["full"], trained["full"])
    assert torch.equal(loaded["adapter, at once"], trained["adapter"])
    assert torch.equal(loaded["online"], trained["online"])
    for name in ("adapter", "full", "online"):
        assert not torch.allclose(loaded[name], loaded["base"], atol=1e-3)
    assert loaded["tokens"] == tiny.build_tokenizer()("task 1")["input_ids"]


def test_the_snippet_of_the_card_runs_as_it_stands(loaded):
    assert all(isinstance(text, str) and text for text in loaded["said"].values()) and len(loaded["said"]) == 2


@pytest.mark.parametrize("name", ["me/adapter", "me/full"])
def test_the_card(pushed, name):
    hub, folder = pushed
    text = hub.files["model", name]["README.md"].decode()
    card = ModelCard(text)
    tags = {"trl", "sdpo", "peft"} if name == "me/adapter" else {"trl", "sdpo"}
    assert tags <= set(card.data.tags) and ("peft" in card.data.tags) == (name == "me/adapter")
    assert card.data.base_model == "org/tiny-base"
    assert card.data.library_name == ("peft" if name == "me/adapter" else "transformers")
    assert (
        "https://huggingface.co/papers/2601.20802" in text and "Reinforcement Learning via Self-Distillation" in text
    )
    assert f'model="{name}"' in text and str(folder) not in text and "hf_test" not in text
    kind = "ema" if name == "me/adapter" else "trust_region"
    assert f"The teacher: {kind}." in text
    options = yaml.safe_load(text.split("~~~yaml\n")[1].split("~~~")[0])
    own = {"teacher_update_rate": 0.2} if name == "me/adapter" else {"teacher_model_kind": "trust_region"}
    assert options.items() >= {"learning_rate": 0.01, "num_generations": 4, "beta": 0.1, **own}.items()
    assert "reprompt_template" not in options
    SDPOConfig(str(folder / "again"), use_cpu=True, bf16=False, **options)
    if name == "me/adapter":
        assert card.data.datasets == "org/tasks"


def test_the_tables_of_rollouts_are_uploaded(pushed):
    hub, _ = pushed
    files = hub.files["dataset", "me/tables"]
    tables = [pd.read_parquet(io.BytesIO(content)) for path, content in files.items() if path.endswith(".parquet")]
    assert len(tables) == 2 and "README.md" in files and set(map(len, tables)) == {8}
    for table in tables:
        assert {"prompt", "completion", "reward_with_feedback", "feedback", "teacher_prompt"} <= set(table)
        assert table["feedback"].str.startswith("wrong, try again").all()


def test_a_card_without_a_hub_name_and_a_chat_template(tmp_path):
    tokenizer = tiny.build_tokenizer()
    tokenizer.chat_template = None
    trainer = tiny.trainer(
        tmp_path / "mine", tiny.never, trainer_processing_class=tokenizer, trainer_teacher_model=tiny.build_model(7),
        feedback_template="~ {feedback_raw} | \"`\n", reward_timeout=5.0,
    )  # fmt: skip
    trainer.create_model_card("mine")
    text = ModelCard.load(tmp_path / "mine" / "README.md").text
    assert 'model="./mine"' in text and "generator(question, max_new_tokens" in text
    assert "The teacher: external." in text and "reward_timeout" not in text
    options = yaml.safe_load(text.split("~~~yaml\n")[1].split("~~~\n")[0])
    assert options["feedback_template"] == '~ {feedback_raw} | "`\n' and json.dumps(options)
    plain = tiny.trainer(tmp_path / "grpo", tiny.even_length, distillation_weight=0.0)
    plain.create_model_card("grpo")
    assert "The teacher: none." in ModelCard.load(tmp_path / "grpo" / "README.md").text


def test_no_token_is_uploaded(pushed, tmp_path):
    """`Trainer` pickles the arguments and pushes them, token and all."""
    hub, _ = pushed
    assert hub.tokens == {"Bearer hf_secret", "Bearer hf_test"}
    for repo, files in hub.files.items():
        for path, content in files.items():
            assert b"hf_secret" not in content and b"hf_test" not in content, (repo, path)
    args = tiny.config(tmp_path, hub_token="hf_secret")
    assert args.hub_token == copy.copy(args).hub_token == copy.deepcopy(args).hub_token == "hf_secret"
    again = pickle.loads(pickle.dumps(args))
    assert again.hub_token is None and again.num_generations == args.num_generations
