"""
The client side of test_hub.py, in processes of their own: `HF_ENDPOINT` is read when huggingface_hub is imported.

`python hub_worker.py push FOLDER` trains `org/tiny-base` with an adapter, in full and in a session, and pushes all of
them; `load FOLDER` loads them back from the Hub, and runs the snippet of each card.
"""

import re
import sys
from pathlib import Path

import talk
import tiny
import torch
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from sdpo_trl.online import OnlineSession

IDS = torch.tensor([[10, 20, 30, 40, 50]])


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def push(folder):
    tokenizer = AutoTokenizer.from_pretrained("org/tiny-base", padding_side="left")
    shared = {
        "model": "org/tiny-base",
        "trainer_processing_class": tokenizer,
        "save_strategy": "steps",
        "save_steps": 2,
        "learning_rate": 1e-2,
        "beta": 0.1,
    }
    adapter = tiny.trainer(
        folder / "adapter", tiny.telling(), trainer_peft_config=tiny.lora(), push_to_hub=True,
        hub_model_id="me/adapter", log_completions=True, log_completions_hub_repo="me/tables",
        num_completions_to_print=0, teacher_update_rate=0.2, hub_token="hf_secret", **shared,
    )  # fmt: skip
    adapter.train()
    adapter.push_to_hub(commit_message="The adapter", dataset_name="org/tasks")
    full = tiny.trainer(
        folder / "full", tiny.telling(), teacher_model_kind="trust_region", hub_model_id="me/full", **shared
    )
    full.train()
    full.push_to_hub()  # without `push_to_hub=True`
    options = talk.options(folder / "online", max_completion_length=8)
    with OnlineSession(
        "org/tiny-base", tokenizer, options, peft_config=tiny.lora(), journal=folder / "online" / "journal.jsonl"
    ) as session:
        session.say("secret words")
        session.respond()
        session.deny("secret correction")
        session.learn()
        session.push_to_hub("me/online", commit_message="A session")
        online = logits(session.trainer.model)
    torch.save({"adapter": logits(adapter.model), "full": logits(full.model), "online": online}, folder / "pushed.pt")


def run_snippet(name):
    """The first block of Python in the card; returns what it printed and generated."""
    text = ModelCard.load(name).text
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    names = {}
    exec(compile(code, f"the card of {name}", "exec"), names)
    return names["output"]["generated_text"]


def load(folder):
    base = AutoModelForCausalLM.from_pretrained("org/tiny-base")
    loaded = {
        "base": logits(base),
        "adapter": logits(PeftModel.from_pretrained(base, "me/adapter")),
        "adapter, at once": logits(AutoPeftModelForCausalLM.from_pretrained("me/adapter")),
        "online": logits(AutoPeftModelForCausalLM.from_pretrained("me/online")),
        "full": logits(AutoModelForCausalLM.from_pretrained("me/full")),
        "tokens": AutoTokenizer.from_pretrained("me/adapter")("task 1")["input_ids"],
        "said": {name: run_snippet(name) for name in ("me/adapter", "me/full")},
    }
    torch.save(loaded, folder / "loaded.pt")


if __name__ == "__main__":
    {"push": push, "load": load}[sys.argv[1]](Path(sys.argv[2]))
