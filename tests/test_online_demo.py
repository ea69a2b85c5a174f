"""The example `online_session.py`: its table is what it says, and (slow) the habit is unlearned and the rest holds."""

import functools
import json
import math

import desk
import online_session
import pytest
import torch


def test_the_table_of_the_demo_is_exact(tmp_path, monkeypatch, capsys):
    """With a model that has learned next to nothing; each number against the plain model's own logits."""
    monkeypatch.setattr(desk, "warm_start", functools.partial(desk.warm_start, steps=3))
    measures = []

    class Measure(online_session.Measure):
        def __init__(self, session, *counts):
            measures.append(session)
            super().__init__(session, *counts)

    monkeypatch.setattr(online_session, "Measure", Measure)
    result = online_session.main(["--output_dir", str(tmp_path), "--corrections", "1"])
    assert json.loads((tmp_path / "results.json").read_text()) == result["log"]
    assert [row["corrections"] for row in result["log"]] == [0, 1] and len(result["denied"]) == 1
    assert (tmp_path / "session" / "session.json").is_file() and "| after 1 |" in capsys.readouterr().out
    tokenizer = desk.build_tokenizer()
    model = measures[0].trainer.model.eval()

    def log_probability(request, tool):
        text = tokenizer.apply_chat_template(request.messages, tokenize=False, add_generation_prompt=True)
        answer = f"{desk._answer(request, tool)}<|end|>"
        ids = torch.tensor([tokenizer(text + answer)["input_ids"]])
        own = len(tokenizer(answer)["input_ids"])
        with torch.no_grad():
            scores = model(input_ids=ids).logits.log_softmax(-1)[0, -own - 1 : -1]
        return scores.gather(-1, ids[0, -own:, None]).sum().item()

    last = result["log"][-1]
    assert last["same_log"] == pytest.approx(log_probability(online_session.SAME, "edit_line"), abs=1e-3)
    others = [log_probability(request, "edit_line") for request in online_session.PARAPHRASES]
    assert last["paraphrases_log"] == pytest.approx(sum(others) / len(others), abs=1e-3)
    assert last["unrelated_moved"] > 0 and result["log"][0]["unrelated_moved"] == 0


@pytest.mark.parametrize("path", ["notes.txt", "gone.txt"])
def test_the_desk_s_tools(path):
    work = desk.Desk()
    if path == "gone.txt":
        with pytest.raises(ValueError, match=r"there is no gone\.txt"):
            work.edit_line(path, 1, "x")
        assert work.write_file(path, "a\nb") == "written" and work.read_file(path) == "a\nb"
        return
    assert work.edit_line(path, 3, "x") == "changed" and work.files[path][2] == "x" and len(work.files[path]) == 9
    with pytest.raises(ValueError, match="9 lines"):
        work.edit_line(path, 10, "x")
    assert work.find_word("x") == path and path in work.list_files()


def test_requests_of_the_table_are_apart():
    edits = [online_session.SAME, *online_session.PARAPHRASES]
    texts = [*(request.text for request in edits), *(str(messages) for messages, _ in online_session.UNRELATED)]
    assert len(set(texts)) == len(texts) == 1 + 15 + 24


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_habit_is_unlearned_and_the_rest_holds(tmp_path, warmed, seed):
    result = online_session.main(["--output_dir", str(tmp_path), "--seed", str(seed)])
    log = result["log"]
    assert log[0]["same"] < 0.2 and log[0]["paraphrases"] < 0.2
    assert len(result["denied"]) <= 5 and log[-1]["same"] > 0.8 and log[-1]["paraphrases"] > 0.75
    assert log[-1]["unrelated_moved"] < 0.05
    assert math.isclose(log[0]["unrelated_right"], 1.0, abs_tol=0.05) and log[-1]["unrelated_right"] > 0.8


@pytest.fixture(scope="module")
def _weights():
    tokenizer = desk.build_tokenizer()
    model = desk.build_model(tokenizer)
    desk.warm_start(model, tokenizer)
    return model.state_dict()


@pytest.fixture
def warmed(monkeypatch, _weights):
    """One warm start for all seeds."""

    def warm_start(model, tokenizer, *args, **options):
        model.load_state_dict(_weights)
        return 0.0

    monkeypatch.setattr(desk, "warm_start", warm_start)
