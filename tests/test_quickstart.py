"""The quickstart's task and options, and a run of seconds that learns."""

import letters
import pytest
import quickstart
import tiny


def test_programs_are_parsed_and_run():
    assert letters.grade("x+3", "x+3") == (1.0, None)
    assert letters.grade("x*2", "x+3") == (0.0, "f(2)=5 f(3)=6")
    assert letters.grade("__import__('os')", "x+3") == (0.0, "f(2)=5 f(3)=6")
    assert len({letters.run_tests(program) for program in letters.PROGRAMS}) == 36  # feedback tells all apart
    with pytest.raises(ValueError, match="36 programs"):
        letters.grade("x+3", "x/3")


@pytest.mark.parametrize("seed", range(5))
def test_unseen_names_are_made_of_trained_letters(seed):
    trained, unseen, known = letters.all_tasks(seed)
    assert (len(trained), len(unseen), len(known)) == (24, 12, 36)
    names = [{task.name for task in tasks} for tasks in (trained, unseen, known)]
    assert not names[0] & names[1] and not (names[0] | names[1]) & names[2]
    for place in (0, 1):
        assert {task.name[place] for task in unseen} <= {task.name[place] for task in trained}


def test_the_short_options(tmp_path):
    _, args, model = quickstart.parse(
        ["--teacher=ema", "--alpha", "0.5", "--mode", "topk_logits", "--distillation_topk", "10", "--use_peft",
         "--max_steps=7", "--output_dir", str(tmp_path)]
    )  # fmt: skip
    assert (args.teacher_model_kind, args.distillation_alpha, args.distillation_mode) == ("ema", 0.5, "topk_logits")
    assert args.max_steps == 7 and model.use_peft
    assert args.feedback_template == letters.FEEDBACK_TEMPLATE
    _, args, _ = quickstart.parse(["--include_environment_feedback", "false", "--output_dir", str(tmp_path)])
    assert not args.include_environment_feedback


def test_a_short_run_learns_what_its_teacher_knows(tmp_path):
    """Forty steps towards a fixed teacher: its preferences are taken over."""
    trainer = tiny.trainer(
        tmp_path, tiny.telling(), trainer_teacher_model=tiny.build_model(seed=5), distillation_alpha=0.0,
        learning_rate=1e-2, max_steps=40,
    )  # fmt: skip
    trainer.train()
    logs = tiny.training_logs(trainer)
    assert logs[-1]["sdpo/divergence"] < 0.5 * logs[0]["sdpo/divergence"]
