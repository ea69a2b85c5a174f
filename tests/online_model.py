"""A tiny chat model with a habit, on disk: it overwrites a file where it should change a line, and can be told so."""

import json
from pathlib import Path

import tiny
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from sdpo_trl.online.tools import WorkspaceTools
from sdpo_trl.reprompt import Hint, Templates, reprompt_text

ASKED = "Change the second line of notes.txt to TWO."
CORRECTION = "Do not overwrite the file. Edit its second line."
HABIT = {"name": "write_file", "arguments": {"path": "notes.txt", "text": "TWO\n"}}
WANTED = {"name": "edit_lines", "arguments": {"path": "notes.txt", "first": 2, "last": 2, "text": "TWO"}}
DONE = "Done."


def asked(*turns: dict) -> list[dict]:
    return [{"role": "user", "content": ASKED}, *turns]


def told() -> list[dict]:
    """What the teacher reads: the conversation, and the correction behind it."""
    words = reprompt_text("", Hint(None, CORRECTION), Templates())
    return asked({"role": "user", "content": words})


def called(call: dict) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte pairs that may be as long as the texts, but for the parts of a call. Tools are described by their names."""
    special = ["<pad>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
    core = Tokenizer(models.BPE())
    parts = Regex(r'"(write_file|edit_lines)", |"notes\.txt", |"(first|last|text)": |[0-9], |"TWO')
    pieces = [pre_tokenizers.Split(parts, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    core.pre_tokenizer = pre_tokenizers.Sequence(pieces)
    core.decoder = decoders.ByteLevel()
    options = {"special_tokens": special, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    core.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=600, show_progress=False, **options))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=special[2:],
        padding_side="left", clean_up_tokenization_spaces=False,
    )  # fmt: skip
    names = "{% for tool in tools %}{{ tool['function']['name'] }} {% endfor %}"
    tokenizer.chat_template = tiny.TOOL_TEMPLATE.replace("{{ tools | tojson }}", names)
    tokenizer.response_template = tiny.RESPONSE_TEMPLATE
    return tokenizer


def lessons(tokenizer: PreTrainedTokenizerFast, schemas: list[dict]) -> list[tuple[list[int], list[int]]]:
    """
    `(prompt, answer)` ids: the habit, what it does when it is corrected, the right arguments of whatever tool it has
    named, and an end after a tool's reply.
    """

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def pair(messages: list[dict], answer: str, given: str = "") -> tuple[list[int], list[int]]:
        prompt = tokenizer.apply_chat_template(messages, tools=schemas, add_generation_prompt=True, tokenize=False)
        whole = [*ids(answer), tokenizer.eos_token_id]
        split = len(ids(given)) if given else 0
        return [*ids(prompt), *whole[:split]], whole[split:]

    def text(call: dict) -> str:
        return f"<tool_call>{json.dumps(call)}</tool_call>"

    made = [pair(asked(), text(HABIT)), pair(told(), text(WANTED))]
    for messages, call in [(asked(), WANTED), (told(), HABIT)]:
        made.append(pair(messages, text(call), text(call).partition('"arguments"')[0]))
    for call, said in [
        (HABIT, "Replaced all of notes.txt: 4 bytes."),
        (WANTED, "Edited notes.txt: it has 3 lines now."),
    ]:
        made.append(pair(asked(called(call), {"role": "tool", "name": call["name"], "content": said}), DONE))
    return made


def save_model(folder: Path, work: Path, steps: int = 160) -> PreTrainedModel:
    """
    Train it on its four lessons and save it with its tokenizer.

    Args:
        folder (`Path`): For the model.
        work (`Path`): Any folder, for the tools' descriptions.
        steps (`int`): Of training.
    """
    tools = WorkspaceTools(work)
    schemas = [get_json_schema(tool) for tool in [*tools.functions(), tools.shell]]
    texts = [f"<tool_call>{json.dumps(call)}</tool_call>" for call in (HABIT, WANTED)]
    tokenizer = tokenizer_of([*texts, ASKED, CORRECTION, DONE, " ".join(s["function"]["name"] for s in schemas)])
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, pad_token_id=0,
            eos_token_id=1, bos_token_id=None, tie_word_embeddings=True,
        )
    )  # fmt: skip
    model.generation_config.eos_token_id = 1
    variants = [lessons(tokenizer, schemas), lessons(tokenizer, schemas[:-1])]  # with a shell, and without
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        loss = torch.zeros(())
        for prompt, answer in variants[step % 2]:
            ids = torch.tensor([[*prompt, *answer]])
            logits = model(ids, logits_to_keep=len(answer) + 1).logits[0, :-1]
            loss = loss + torch.nn.functional.cross_entropy(logits, torch.tensor(answer))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
