"""A subclass' own rule about what the teacher of each rollout is told."""

import pytest
import tiny

from sdpo_trl import SDPOTrainer
from sdpo_trl.reprompt import Hint

# Two prompts, four answers each: a group with one success, and one without.
ANSWERS = ["ok$", "no$", "ba$", "ca$", "da$", "ea$", "fa$", "ga$"]


def graded(completions, log_extra, **columns):
    log_extra("feedback", [None if text == "ok" else f"you wrote {text}" for text in completions])
    return [float(text == "ok") for text in completions]


def run(folder, monkeypatch, rule=SDPOTrainer, **options):
    """The teachers' prompts by answer, as a table shows them, and the logs of a step."""
    monkeypatch.setattr(tiny, "SDPOTrainer", rule)
    options = {"max_steps": 1, "log_completions": True, "num_generations": 4, **options}
    trainer = tiny.trainer(folder, graded, trainer_rollout_func=tiny.scripted(ANSWERS), **options)
    told = {}
    rows = trainer._teacher_rows

    def watched(output, inputs):
        made = rows(output, inputs)
        told.update(zip(trainer._rollouts.completions, trainer._logs["extra"]["teacher_prompt"], strict=False))
        return made

    trainer._teacher_rows = watched
    trainer.train()
    return told, tiny.training_logs(trainer)[0]


class OwnTestsFirst(SDPOTrainer):
    def choose_hints(self, hints, rollouts, success):
        return [Hint(feedback=text) if text else hint for hint, text in zip(hints, rollouts.feedback, strict=True)]


class Unchanged(SDPOTrainer):
    def choose_hints(self, hints, rollouts, success):
        assert success == [text == "ok" for text in rollouts.completions]
        return tuple(hints)


def test_the_teacher_is_told_what_the_subclass_chose(tmp_path, monkeypatch):
    default, default_logs = run(tmp_path / "a", monkeypatch)
    assert "Correct solution" in default["no"] and "you wrote" not in default["no"]
    told, logs = run(tmp_path / "b", monkeypatch, OwnTestsFirst)
    for text in ANSWERS[1:]:
        answer = text.removesuffix("$")
        assert f"you wrote {answer}" in told[answer] and "Correct solution" not in told[answer]
    assert told["ok"] is None
    shares = ("sdpo/demonstration_share", "sdpo/hinted_share", "sdpo/distilled_share", "sdpo/lone_success_share")
    assert [default_logs[name] for name in shares] == pytest.approx([3 / 8, 7 / 8, 7 / 8, 1 / 8])
    assert [logs[name] for name in shares] == pytest.approx([0, 7 / 8, 7 / 8, 1 / 8])


def test_the_rule_of_the_options_is_the_default(tmp_path, monkeypatch):
    assert run(tmp_path / "a", monkeypatch)[0] == run(tmp_path / "b", monkeypatch, Unchanged)[0]


def test_a_hint_without_a_text_is_none(tmp_path, monkeypatch):
    class Nothing(SDPOTrainer):
        def choose_hints(self, hints, rollouts, success):
            return [Hint(feedback="  "), Hint(), None, *hints[3:]]

    told, logs = run(tmp_path, monkeypatch, Nothing)
    assert [told["ok"], told["no"], told["ba"]] == [None] * 3 and told["ca"] is not None
    assert logs["sdpo/hinted_share"] == pytest.approx(5 / 8)


def test_the_gates_come_after_it(tmp_path, monkeypatch):
    class Everybody(SDPOTrainer):
        def choose_hints(self, hints, rollouts, success):
            return [Hint(feedback="look again")] * len(hints)

    told, logs = run(tmp_path, monkeypatch, Everybody, distillation_routing="failed", distillation_weight=0.5)
    assert told["ok"] is None and "look again" in told["no"]
    assert (logs["sdpo/hinted_share"], logs["sdpo/distilled_share"]) == pytest.approx((1.0, 7 / 8))


def test_blank_texts_are_none_and_halves_of_characters_are_written_out(tmp_path, monkeypatch):
    class Careless(SDPOTrainer):
        def choose_hints(self, hints, rollouts, success):
            blank = (
                Hint(solution=" ", feedback="read again"),
                Hint(solution="", feedback="\n"),
                Hint(feedback="a\ud800b"),
            )
            return [blank[row % 3] for row in range(8)]

    told, logs = run(tmp_path, monkeypatch, Careless)
    assert "read again" in told["ok"] and "Correct solution" not in told["ok"]
    assert told["no"] is None and "a\\ud800b" in told["ba"]
    shares = ("sdpo/demonstration_share", "sdpo/hinted_share")
    assert [logs[name] for name in shares] == pytest.approx([0, 5 / 8])


@pytest.mark.parametrize(
    ("chosen", "error", "message"),
    [
        (None, TypeError, "`choose_hints` must return a list with one `Hint` or `None` per rollout, got None"),
        ([None], ValueError, "8 were sampled, 1 returned"),
        (["a text"] * 8, TypeError, "returned 'a text' for rollout 0.*`Hint\\(feedback=text\\)`"),
        ([None, Hint(feedback=["a", "b"])] * 4, TypeError, "`feedback` of rollout 1 is a list.*Give one text"),
        ([None, Hint(solution=3)] * 4, TypeError, "`solution` of rollout 1 is a int"),
        ([Hint(turns=((0, None),))] * 8, TypeError, "text on a turn of rollout 0 is a NoneType"),
        ([Hint(turns=((3, "late"),))] * 8, ValueError, "row 0 is for turn 3, and that rollout has turns 0 to 0"),
    ],
    ids=["nothing", "too few", "a text", "a list", "a number", "a turn without text", "a later turn"],
)
def test_anything_else_is_refused(tmp_path, monkeypatch, chosen, error, message):
    class Broken(SDPOTrainer):
        def choose_hints(self, hints, rollouts, success):
            return chosen

    with pytest.raises(error, match=message):
        run(tmp_path, monkeypatch, Broken)


@pytest.mark.parametrize(
    ("hint", "error", "message"),
    [
        (Hint(turns=((1.0, "x"),)), ValueError, "rollout 0 with the turn 1.0. Turns are whole numbers"),
        (Hint(turns=(("1", "x"),)), ValueError, "rollout 0 with the turn '1'"),
        (Hint(turns=((-1, "x"),)), ValueError, "rollout 0 with the turn -1"),
        (Hint(turns=None, feedback="x"), TypeError, "rollout 0 whose `turns` are a NoneType"),
        (Hint(feedback="x", hinted=1), TypeError, "rollout 0 whose `hinted` are a int"),
        (Hint(turns=("ab",)), TypeError, "whose `turns` hold 'ab'. Give pairs"),
        (Hint(feedback="x", hinted=(True,)), ValueError, "with the turn True"),
        (Hint(feedback="x", hinted=()), ValueError, "hints no turn"),
        (Hint(feedback="x", hinted=(7,)), ValueError, "about turn 7, and that rollout has turns 0 to 0"),
    ],
    ids=str,
)
def test_turns_that_are_none_are_refused(tmp_path, monkeypatch, hint, error, message):
    class Broken(SDPOTrainer):
        def choose_hints(self, hints, rollouts, success):
            return [hint] * len(hints)

    with pytest.raises(error, match=message):
        run(tmp_path, monkeypatch, Broken, distillation_span="hinted_turn")
