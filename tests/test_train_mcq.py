"""examples/train_mcq.py: its reward and feedback by hand, and one whole run on a tiny model."""

import json
from pathlib import Path

import pandas as pd
import pytest
import tiny
import torch
from peft import PeftModel
from train_mcq import load_questions, main, read_letter, right_letter
from transformers import AutoModelForCausalLM

QUESTIONS = [
    ("Which is \\frac{1}{2} of $x^{2}$ for x = 2?\n\nA: 1\nB: 2\nC: 3\nD: 4", "B"),
    ("Which SMILES is ethanol?\n\nA: CCO\nB: C(=O)[O-]\nC: {C}\nD: N#N", "A"),
]
SYSTEMS = ["Answer with <answer>LETTER</answer>.\n", None, "None", "Be {brief}: $\\alpha$."]


def write_rows(path: Path) -> list[dict]:
    rows = [
        {"idx": i, "prompt": f"{i}. {QUESTIONS[i % 2][0]}", "system": SYSTEMS[i % 4], "answer": QUESTIONS[i % 2][1]}
        for i in range(8)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return rows


@pytest.mark.parametrize(
    "text, letter",
    [
        ("<answer>A</answer>", "A"),
        ("<reasoning>\nA or B? {x}\n</reasoning>\n<answer>\nC\n</answer>\n", "C"),
        ("It is B, so <answer> D </answer>, not B.", "D"),
    ],
)
def test_a_well_formed_answer_gives_its_letter_and_no_feedback(text, letter):
    assert read_letter(text) == (letter, None)


@pytest.mark.parametrize(
    "text, problem",
    [
        ("", "There is no <answer> tag."),
        ("The answer is A.", "There is no <answer> tag."),
        ("A</answer>", "There is no <answer> tag."),
        ("<answer>A</answer> or <answer>B</answer>", "There is more than one <answer> tag."),
        ("<answer>A</answer></answer>", "There is more than one <answer> tag."),
        ("<answer>A", "The <answer> tag is not closed"),
        ("</answer>A<answer>", "The <answer> tag is not closed"),
        ("<answer>\n</answer>", "The <answer> tag holds nothing."),
        ("<answer>A: 1</answer>", "The <answer> tag holds more than a letter."),
        ("<answer>E</answer>", "The <answer> tag holds none of A, B, C and D."),
        ("<answer>a</answer>", "The <answer> tag holds none of A, B, C and D."),
    ],
)
def test_a_malformed_answer_gives_the_reason(text, problem):
    letter, feedback = read_letter(text)
    assert letter is None
    assert feedback.startswith(problem)


def test_the_reward_logs_feedback_that_does_not_depend_on_the_right_answer():
    texts = ["<answer>A</answer>", "<answer>B</answer>", "A", "<answer>AB</answer>"]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    logged = {}

    def reward(answer):
        extra, metrics = {}, {}
        values = right_letter(completions, [answer] * 4, extra.__setitem__, metrics.__setitem__, prompts=[])
        logged[answer] = extra["feedback"]
        assert metrics == {"well_formed": 0.5}
        return values

    assert [reward(answer) for answer in "ABC"] == [[1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 0, 0]]
    assert logged["A"] == logged["B"] == logged["C"]
    assert logged["A"][:2] == [None, None]  # right and wrong letters alike
    assert all(isinstance(text, str) for text in logged["A"][2:])


def test_rows_become_chats_with_unchanged_texts_and_a_system_turn_where_there_is_one(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl")
    data = load_questions(str(tmp_path / "rows.jsonl"), None, "train")
    assert data.column_names == ["prompt", "answer"]
    for row, chat in zip(rows, data, strict=True):
        turns = [("system", row["system"])] if row["system"] not in (None, "None") else []
        assert [(turn["role"], turn["content"]) for turn in chat["prompt"]] == [*turns, ("user", row["prompt"])]
        assert chat["answer"] == row["answer"]
    assert len(load_questions(str(tmp_path / "rows.jsonl"), None, "train[:3]")) == 3


def test_an_answer_that_no_letter_can_match_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "What?", "answer": "forty"}) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="must be A, B, C or D, got 'forty'"):
        load_questions(str(tmp_path / "rows.jsonl"), None, "train")


def test_a_run_without_a_model_says_so(tmp_path):
    with pytest.raises(ValueError, match="--model_name_or_path"):
        main(f"--dataset_name rows.jsonl --output_dir {tmp_path} --use_cpu True --bf16 False".split())


def test_main_trains_saves_and_the_adapter_loads_again(tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl")
    base, out = tmp_path / "base", tmp_path / "out"
    tiny.build_model(tie_word_embeddings=False).save_pretrained(base)
    tiny.build_tokenizer(pad_is_eos=True).save_pretrained(base)
    trainer = main(
        f"--model_name_or_path {base} --dataset_name {tmp_path / 'rows.jsonl'} --output_dir {out} --use_peft "
        "--lora_r 4 --lora_dropout 0 --distillation_mode topk_logits --distillation_topk 8 --use_cpu True "
        "--bf16 False --gradient_checkpointing False --per_device_train_batch_size 4 --num_generations 4 "
        "--max_completion_length 6 --max_steps 2 --learning_rate 1e-2 --logging_steps 1 --save_strategy no "
        "--report_to none --disable_tqdm True --log_completions True --num_completions_to_print 0 "
        "--eval_strategy steps --eval_steps 2 --per_device_eval_batch_size 4 --dataset_test_split train[:2]".split()
    )
    assert [entry["eval_well_formed"] for entry in trainer.state.log_history if "eval_well_formed" in entry] == [0.0]
    logs = [entry for entry in trainer.state.log_history if "sdpo/divergence" in entry]
    assert len(logs) == 2
    # Six random characters hold no tag, so every answer is distilled from its feedback.
    assert all(entry["sdpo/feedback_share"] == entry["sdpo/distilled_share"] == 1.0 for entry in logs)
    assert all(entry["well_formed"] == 0.0 and entry["sdpo/divergence"] > 0 for entry in logs)

    table = pd.concat(pd.read_parquet(path) for path in sorted((out / "completions").glob("*.parquet")))
    assert table["feedback"].str.startswith("There is no <answer> tag.").all()
    assert all(sum(row["prompt"] in text for row in rows) == 1 for text in table["teacher_prompt"])

    ids = trainer.processing_class("task {x}: \\frac{1}{2}=", return_tensors="pt").input_ids
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out).eval()
    with torch.no_grad():
        trained = trainer.model.eval()(input_ids=ids).logits
        with again.disable_adapter():
            before = again(input_ids=ids).logits
        torch.testing.assert_close(again(input_ids=ids).logits, trained, rtol=1e-5, atol=1e-5)
    assert (trained - before).abs().max() > 1e-3
