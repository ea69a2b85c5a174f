"""examples/train_real.py: its rows and grader by hand; SmolLM2-135M-Instruct itself behind the marker `real`.

    pip install 'sdpo-trl[gguf,test]'
    pytest -m real tests/test_train_real.py -s     # 20 minutes on two idle cores; prints the table

`$SDPO_SMOLLM2` names a folder to keep the model in, or where examples/get_smollm2.py has put it.
"""

import json
import math
import os
from pathlib import Path

import pytest
import tiny
import torch
import train_real


@pytest.mark.parametrize("task", train_real.TASKS.values(), ids=train_real.TASKS)
def test_rows_are_balanced_and_held_out_ones_are_apart(task):
    trained, held_out = task.rows()
    assert (len(trained), len(held_out)) == (24, 16)
    for part in (trained, held_out):
        assert sum(row["answer"] == task.words[0] for row in part) == len(part) // 2
    texts = [row["prompt"][0]["content"] for row in trained + held_out]
    assert len(set(texts)) == 40


def test_words_are_asked_about_twice_and_are_held_out_whole():
    trained, held_out = train_real.TASKS["yes_no"].rows()
    answers = {row["prompt"][0]["content"]: row["answer"] for row in trained + held_out}
    assert answers['Is "dog" an animal? Answer Yes or No.'] == "Yes"
    assert answers['Is "dog" a fruit? Answer Yes or No.'] == "No"
    assert answers['Is "copper" an animal? Answer Yes or No.'] == "No"
    words = [sorted(row["prompt"][0]["content"].split('"')[1] for row in part) for part in (trained, held_out)]
    assert not set(words[0]) & set(words[1])
    assert all(part[::2] == part[1::2] for part in words)


def test_the_grader_is_strict_and_says_what_is_right():
    task = train_real.TASKS["reviews"]
    answers = ["Positive", "Negative", "positive", "Positive.", "It is Positive", ""]
    completions = [[{"role": "assistant", "content": text}] for text in answers]
    extra, metrics = {}, {}
    rewards = task.grade(completions, ["Positive"] * 6, extra.__setitem__, metrics.__setitem__, prompts=[])
    assert rewards == [1.0, 0, 0, 0, 0, 0]
    assert metrics["valid"] == pytest.approx(2 / 6)
    assert extra["feedback"][0] is None
    assert set(extra["feedback"][1:]) == {task.told("Positive")}
    assert task.told("Negative") == "Answer with one word only, Positive or Negative. The right answer is: Negative"


def test_shares_are_exact_probabilities():
    """Against every answer's probability, token by token."""
    model, tokenizer = tiny.build_model(), tiny.build_tokenizer()
    trained = model.training
    task = train_real.TASKS["reviews"]
    row = task.rows()[0][0]
    asked = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
    expected = {}
    for word in task.words:
        ids, total = tokenizer(asked).input_ids, 0.0
        for token in [*tokenizer(word).input_ids, tokenizer.eos_token_id]:
            with torch.no_grad():
                total += model(torch.tensor([ids])).logits[0, -1].double().log_softmax(0)[token].item()
            ids = [*ids, token]
        expected[word] = math.exp(total)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.round", lambda value, digits=None: value)
        measured = train_real.measure(model, tokenizer, task, [row])
    assert measured["valid"] == pytest.approx(sum(expected.values()), rel=1e-3)
    assert measured["right"] == pytest.approx(expected[row["answer"]], rel=1e-3)
    assert model.training == trained


def test_hinted_shares_read_the_feedback(monkeypatch):
    model, tokenizer = tiny.build_model(), tiny.build_tokenizer()
    seen = []
    plain = tokenizer.apply_chat_template
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda p, **k: seen.append(p) or plain(p, **k))
    task = train_real.TASKS["yes_no"]
    row = task.rows()[1][0]
    train_real.measure(model, tokenizer, task, [row], hinted=True)
    text = seen[0][-1]["content"]
    assert text.startswith(task.told(row["answer"])) and text.endswith(row["prompt"][0]["content"])


def test_a_run_compares_both_methods(tmp_path, capsys):
    """The whole script with an untaught model, which never finds a right answer."""
    folder = tmp_path / "model"
    tiny.build_model().save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)
    line = "--task yes_no --steps 4 --threads 1 --grpo_learning_rates 1e-2 --sdpo_learning_rates 1e-2"
    results = train_real.main(["--model", str(folder), "--out", str(tmp_path / "out"), *line.split()])
    assert results == json.loads((tmp_path / "out" / "results.json").read_text())
    sdpo, grpo = results["runs"]
    assert [run["rollouts"] for run in (sdpo, grpo)] == [64, 64] and grpo["rewarded"] == 0
    assert [point["rollouts"] for point in sdpo["curve"]] == [64]
    assert "| GRPO, learning rate 0.01 | 0 of 64 | 0.000 |" in capsys.readouterr().out


@pytest.mark.real
def test_sdpo_teaches_smollm2_the_format(tmp_path):
    """
    GRPO is measured beside it and not compared: a rollout is right in one of two hundred, so it is chance whether and
    when its 192 rollouts hold the first one, from which on it soon knows the format too.
    """
    pytest.importorskip("gguf", reason="needs the extra `gguf`")
    from get_smollm2 import get_smollm2

    folder = get_smollm2(Path(os.environ.get("SDPO_SMOLLM2", tmp_path / "smollm2")))
    results = train_real.main(["--model", str(folder), "--out", str(tmp_path / "out")])
    before = results["before"]["held_out"]
    best = {
        kind: max((run["held_out"] for run in results["runs"] if run["method"] == kind), key=lambda r: r["right"])
        for kind in ("sdpo", "grpo")
    }
    print(before, best)
    assert results["before"]["with_feedback"]["valid"] > 5 * before["valid"]  # there is something to distil
    assert best["sdpo"]["valid"] > before["valid"] + 0.1
    assert best["sdpo"]["right"] > before["right"] + 0.05
    assert all(run["rollouts"] == 192 for run in results["runs"])
