"""Chat templates and vocabularies of real models: those in the source package of `llama-cpp-python`, and SmolLM2's.

    pip install 'sdpo-trl[gguf,test]'
    pytest -m real tests/test_real_templates.py

The package (77 MB) is downloaded from PyPI; `$SDPO_LLAMA_CPP` names a folder to keep it in. `$SDPO_SMOLLM2` is that of
`tests/test_real.py`.
"""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import test_template_check as cases
import tiny
from transformers import AutoTokenizer

from sdpo_trl.reprompt import Hint, Templates
from sdpo_trl.template_check import TemplateCheckError, check_templates

pytestmark = pytest.mark.real

PACKAGE = "llama-cpp-python==0.3.36"
# Templates that refuse two user turns in a row, or tools, or need functions: by their own words.
KNOWN = {
    # After a tool's reply this one's header opens and closes a block of thinking, after a user's turn it closes one.
    ("deepseek-ai-DeepSeek-V3.2", "tool turn"): "check of header",
}
VOCABULARIES = {  # a vocabulary, and the templates that are used with it; `None`: its own
    "qwen2": (None, "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B"),
    "llama-bpe": ("meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.3-70B-Instruct"),
    "phi-3": (None, "microsoft-Phi-3.5-mini-instruct"),
    "gpt-2": ("",),  # a base model: plain text
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = Path(os.environ.get("SDPO_LLAMA_CPP", tmp_path_factory.mktemp("llama")))
    found = list(folder.glob("*/vendor/llama.cpp/models"))
    if not found:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "-d", folder, PACKAGE],
            check=True, timeout=600,
        )  # fmt: skip
        with tarfile.open(next(folder.glob("llama_cpp_python*.tar.gz"))) as archive:
            wanted = [entry for entry in archive if "/vendor/llama.cpp/models/" in entry.name]
            archive.extractall(folder, wanted, filter="data")
        found = list(folder.glob("*/vendor/llama.cpp/models"))
    return found[0]


def template(models: Path, name: str) -> str:
    return (models / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


def test_the_templates_that_llama_cpp_ships(models):
    verdicts = {}
    for path in sorted((models / "templates").glob("*.jinja")):
        text = path.read_text(encoding="utf-8")
        for case, (prompt, _, options, tools) in cases.CASES.items():
            key = (path.stem, case)
            try:
                cases.renderer(text, options, tools)(prompt, True)
            except Exception:  # what the template says no to, the student cannot be asked either
                verdicts[key] = "refused"
                continue
            try:
                cases.check(text, case)
                verdicts[key] = "passed"
            except TemplateCheckError as error:
                verdicts[key] = str(error)
    failed = {key: text for key, text in verdicts.items() if text not in ("passed", "refused")}
    alternating = {key for key, text in failed.items() if "refuses the teacher's prompt" in text}
    # A user's turn behind another one, or behind a tool's reply.
    assert {case for _, case in alternating} <= {"append", "append to turns", "tool turn"}
    assert {key: KNOWN.get(key, "unknown") in text for key, text in failed.items() if key not in alternating} == (
        dict.fromkeys(KNOWN, True)
    )
    counts = [sum(text == what for text in verdicts.values()) for what in ("passed", "refused")]
    print(f"{len(verdicts)} cases: {counts[0]} passed, {counts[1]} refused by the template, {len(failed)} failed")
    assert counts[0] > 500


@pytest.mark.parametrize(("vocabulary", "name"), [(v, n) for v, names in VOCABULARIES.items() for n in names])
def test_real_tokens_of_the_teachers_prompt(models, tmp_path, vocabulary, name):
    pytest.importorskip("gguf", reason="needs the extra `gguf`")
    tokenizer = AutoTokenizer.from_pretrained(models, gguf_file=f"ggml-vocab-{vocabulary}.gguf", padding_side="left")
    if name:
        tokenizer.chat_template = template(models, name)
    assert_tokens(tokenizer, tmp_path, chat=name != "")


def test_smollm2s_tokens_of_the_teachers_prompt(tmp_path):
    pytest.importorskip("gguf", reason="needs the extra `gguf`")
    from get_smollm2 import get_smollm2

    folder = get_smollm2(Path(os.environ.get("SDPO_SMOLLM2", tmp_path / "smollm2")))
    assert_tokens(AutoTokenizer.from_pretrained(folder, padding_side="left"), tmp_path, chat=True)


def assert_tokens(tokenizer, folder: Path, chat: bool) -> None:
    """Through a real trainer: the ids that student and teacher read, in several kinds of conversations."""
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    data = tiny.prompts(chat=chat)
    trainer = tiny.trainer(
        folder, tiny.telling(), data=data, model=tiny.build_model(vocab_size=len(tokenizer), hidden_size=8),
        trainer_processing_class=tokenizer,
    )  # fmt: skip
    hint = Hint("It is \\frac{391}{1} = 391, {really}.", "f(2) = 7, but 5 was expected\n\tat line 3: `x < 4 && y`")
    for prompt in (cases.USER, cases.TURNS, cases.SYSTEM) if chat else (data[0]["prompt"],):
        ids, _, _ = trainer._tokenize_prompts([prompt])
        batch = {"prompt_ids": None, "completion_mask": None}
        built = trainer._prompt_builder.build([prompt], [hint], batch)
        told = built.tensors["teacher_prompt_ids"][0][built.tensors["teacher_prompt_mask"][0].bool()].tolist()
        read = tokenizer.decode(told)
        for text in (hint.solution, hint.feedback):
            assert text in read
        if chat:
            header = tokenizer.decode(ids[0]).rpartition(prompt[-1]["content"])[2]
            count = len(tokenizer(header, add_special_tokens=False)["input_ids"])
            assert count >= 2 and told[-count:] == list(ids[0])[-count:] and read.endswith(header)
            check_templates(trainer._prompt_builder._renderer({}, None), prompt, Templates())
