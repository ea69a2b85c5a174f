"""What a run leaves on disk: the student alone, a model card, and a table of rollouts."""

import ast
import os
from pathlib import Path

import pandas as pd
import pytest
import tiny
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny-base"
    tiny.build_model().save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)
    return folder


def trained(folder, base_folder, peft, **options):
    if peft:
        options["trainer_peft_config"] = tiny.lora()
    trainer = tiny.trainer(
        folder, tiny.telling(), model=str(base_folder), max_steps=2, learning_rate=1e-2, save_strategy="steps",
        save_steps=2, beta=0.1, **options,
    )  # fmt: skip
    trainer.train()
    return trainer


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([[10, 20, 30, 40, 50]])).logits


def load(folder, base_folder, peft):
    if not peft:
        return AutoModelForCausalLM.from_pretrained(folder)
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_folder), folder)


WEIGHTS = {False: "model.safetensors", True: "adapter_model.safetensors"}


@pytest.mark.parametrize("peft", [False, True])
@pytest.mark.parametrize("kind", ["ema", "trust_region", "external"])
def test_the_export_is_the_student_alone(tmp_path, base_folder, peft, kind):
    options = (
        {"trainer_teacher_model": tiny.build_model(seed=7)} if kind == "external" else {"teacher_model_kind": kind}
    )
    trainer = trained(tmp_path, base_folder, peft, **options)
    expected = logits(trainer.model)
    assert not torch.allclose(expected, logits(AutoModelForCausalLM.from_pretrained(base_folder)), atol=1e-3)
    trainer.save_model(str(tmp_path / "export"))
    checkpoint = tmp_path / "checkpoint-2"
    for folder in (tmp_path / "export", checkpoint):
        assert torch.equal(logits(load(folder, base_folder, peft)), expected)
        names = set(load_file(folder / WEIGHTS[peft]))
        assert len(names) == sum(p.requires_grad for p in trainer.model.parameters())
        assert not any("ref" in name or "teacher" in name or "ema" in name for name in names)
        AutoTokenizer.from_pretrained(folder)
    assert not list((tmp_path / "export").glob("*sdpo*")) and not [p for p in checkpoint.iterdir() if p.is_dir()]
    stored = sorted(path.name for path in checkpoint.glob("sdpo_*"))
    # `beta` needs the initial policy for every kind
    teacher = ["sdpo_teacher.safetensors"] if kind == "ema" else []
    assert stored == ["sdpo_initial_policy.safetensors", "sdpo_state.json", *teacher]


@pytest.mark.parametrize("peft", [False, True])
def test_what_would_be_pushed(tmp_path, base_folder, monkeypatch, peft):
    """`push_to_hub` uploads the output folder but the checkpoints."""
    seen = {}

    class Hub:
        def upload_folder(self, *, folder_path, ignore_patterns, **kwargs):
            seen.update(folder=folder_path, ignored=ignore_patterns)

    monkeypatch.setattr("transformers.trainer.hf_api", Hub)
    trainer = trained(tmp_path, base_folder, peft)
    trainer.hub_model_id = "me/it"
    trainer.push_to_hub()
    assert any("checkpoint-" in pattern for pattern in seen["ignored"])
    pushed = {path.name for path in tmp_path.iterdir() if not path.name.startswith("checkpoint-")}
    assert WEIGHTS[peft] in pushed and "README.md" in pushed
    assert not [name for name in pushed if "sdpo" in name]
    assert torch.equal(logits(load(seen["folder"], base_folder, peft)), logits(trainer.model))


@pytest.mark.parametrize("peft", [False, True])
@pytest.mark.parametrize("local", [False, True])
def test_the_model_card(tmp_path, base_folder, peft, local):
    if local:
        trainer = trained(tmp_path, base_folder, peft)
    else:
        model = tiny.build_model()
        model.config._name_or_path = "someone/some-base"
        extra = {"trainer_peft_config": tiny.lora()} if peft else {}
        trainer = tiny.trainer(tmp_path, tiny.never, model=model, **extra)
    trainer.create_model_card(model_name="mine", dataset_name="numbers")
    card = ModelCard.load(tmp_path / "README.md")
    assert "SDPO" in card.text and "Reinforcement Learning via Self-Distillation" in card.text
    assert "2601.20802" in card.text
    assert {"trl", "sdpo"} <= set(card.data.tags)
    name = "tiny-base" if local else "someone/some-base"
    assert name in card.text
    assert "None" not in card.text.split("##")[0]
    # A path is no id: the Hub would refuse it.
    assert card.data.base_model == (None if local else name)
    assert str(base_folder) not in card.text


@pytest.mark.parametrize("peft", [False, True])
def test_a_model_built_in_memory_has_a_card_too(tmp_path, peft):
    extra = {"trainer_peft_config": tiny.lora()} if peft else {}
    trainer = tiny.trainer(tmp_path, tiny.never, **extra)
    trainer.create_model_card(model_name="mine")
    text = ModelCard.load(tmp_path / "README.md").text
    assert "SDPO" in text and "huggingface.co/None" not in text


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_saved_adapters_card_holds_no_path(tmp_path, base_folder, in_memory):
    model = tiny.build_model() if in_memory else AutoModelForCausalLM.from_pretrained(base_folder)
    trainer = tiny.trainer(
        tmp_path, tiny.never, model=model, trainer_peft_config=tiny.lora(), save_strategy="steps", save_steps=2
    )
    trainer.train()
    trainer.save_model()
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        card = ModelCard.load(folder / "README.md")
        assert card.data.base_model is None and card.data.library_name == "peft"
        assert {"trl", "sdpo", "peft"} <= set(card.data.tags)
        assert str(base_folder) not in str(card) and "base_model:" not in " ".join(card.data.tags)


def test_the_card_names_the_folder_that_a_run_begins_in(tmp_path, monkeypatch):
    folder = tmp_path / 'my "best" run'
    folder.mkdir()
    monkeypatch.chdir(folder)
    tiny.trainer(".", tiny.never).save_model()
    card = ModelCard.load(folder / "README.md")
    assert card.data.model_name == folder.name and f"# Model Card for {folder.name}\n" in card.text
    snippet = card.text.partition("```python\n")[2].partition("```")[0]
    (model,) = [node.value.value for node in ast.walk(ast.parse(snippet)) if getattr(node, "arg", None) == "model"]
    assert model == f"./{folder.name}"


@pytest.mark.parametrize("peft", [False, True])
def test_a_saved_model_has_the_card_without_a_checkpoint_or_a_push(tmp_path, peft):
    extra = {"trainer_peft_config": tiny.lora()} if peft else {}
    trainer = tiny.trainer(tmp_path / "run", tiny.never, **extra)
    for folder in (None, str(tmp_path / "elsewhere" / "mine")):
        trainer.save_model(folder)
        card = ModelCard.load(Path(folder or tmp_path / "run") / "README.md")
        assert "SDPO" in card.text and "2601.20802" in card.text
        assert {"trl", "sdpo"} <= set(card.data.tags)


@pytest.mark.parametrize("chat", [False, True])
def test_the_table_of_rollouts(tmp_path, chat):
    """Every value sits in the row of its rollout, over training and evaluation."""

    def text_of(value):
        return value if isinstance(value, str) else value[-1]["content"]

    def tag(prompt, completion):
        return f"[{text_of(prompt)} -> {text_of(completion)}]"

    def reward(prompts, completions, log_extra, **kwargs):
        told = [tag(p, c) if i % 2 else None for i, (p, c) in enumerate(zip(prompts, completions, strict=True))]
        log_extra("feedback", told)
        log_extra("again", [tag(p, c) for p, c in zip(prompts, completions, strict=True)])
        return [len(text_of(c)) / 100 for c in completions]

    trainer = tiny.trainer(
        tmp_path, reward, data=tiny.prompts(8, chat=chat), log_completions=True, num_completions_to_print=0,
        per_device_train_batch_size=4, gradient_accumulation_steps=4, max_steps=2, eval_strategy="steps", eval_steps=1,
        trainer_eval_dataset=tiny.prompts(2, chat=chat), per_device_eval_batch_size=4,
    )  # fmt: skip
    trainer.train()
    paths = sorted((tmp_path / "completions").glob("*.parquet"))
    assert len(paths) == 2
    told = 0
    for path in paths:
        table = pd.read_parquet(path)
        assert {"step", "prompt", "completion", "reward", "feedback", "teacher_prompt", "again", "advantage"} <= set(
            table
        )
        assert len(table) == 16
        for row in table.to_dict("records"):
            prompt, completion = text_of(row["prompt"]), text_of(row["completion"])
            assert row["again"] == tag(prompt, completion)
            assert row["reward"] == pytest.approx(len(completion) / 100)
            if row["feedback"] is None or row["feedback"] != row["feedback"]:
                assert row["teacher_prompt"] is None or row["teacher_prompt"] != row["teacher_prompt"]
            else:
                told += 1
                assert row["feedback"] == tag(prompt, completion)
                assert row["feedback"] in row["teacher_prompt"] and prompt in row["teacher_prompt"]
                assert row["teacher_prompt"].endswith("<|assistant|>") == chat
    assert told == 16


def test_the_table_without_distillation_is_grpos(tmp_path):
    trainer = tiny.trainer(
        tmp_path,
        tiny.telling(),
        distillation_weight=0.0,
        log_completions=True,
        num_completions_to_print=0,
        max_steps=1,
    )
    trainer.train()
    table = pd.read_parquet(next((tmp_path / "completions").glob("*.parquet")))
    assert "feedback" in table and "teacher_prompt" not in table  # what a reward function logs stays a column
