"""Two processes (gloo): the same gradient as one, equal replicas, paired rows, and no process that waits for ever."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import distributed_worker
import pytest
import tiny
import torch

pytestmark = pytest.mark.distributed

WORKER = Path(__file__).with_name("distributed_worker.py")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs all scenarios once; gives what each process saw in one of them."""
    folder = tmp_path_factory.mktemp("two")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    command = [*torchrun, str(WORKER), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            code = process.wait(timeout=240)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun takes its processes with it
            process.wait(timeout=30)
            code = "hung"

    def results(name):
        paths = [folder / f"{name}-{rank}.pt" for rank in range(2)]
        if not all(path.is_file() for path in paths):
            pytest.fail(f"exit status {code}, no result of {name}:\n{(folder / 'output').read_text()[-6000:]}")
        return [torch.load(path, weights_only=False) for path in paths]

    return results


def test_a_process_with_nothing_to_learn_does_not_block_the_other(run):
    for finished in run("all_fail"):
        assert [name for name, *_ in finished] == ["ema", "trust_region", "blend", "stale", "external"]
        for name, steps, losses in finished:
            assert steps == 4, name
            assert losses[2:] == [0.0, 0.0], name
            assert all(loss > 0 for loss in losses[:2]), name


def test_several_turns_on_one_process_do_not_block_the_other(run):
    for one, other in zip(*run("agents"), strict=True):
        tiny.assert_equal(one[0], other[0])
        for row in one[1][:2]:
            assert row["loss"] > 0 and row["sdpo/turns"] == (3 + 2 + 1 + 1) / 4
            assert row["sdpo/tool_success/add"] == 1.0 and row["sdpo/divergence/turn_3"] is None
        assert [row.keys() for row in one[1]] == [row.keys() for row in other[1]]


def test_two_processes_take_up_the_order_of_the_prompts(run):
    for (asked, weights), (again, resumed) in run("continued"):
        assert len(asked) == 8 and again == asked[6:]
        tiny.assert_equal(resumed, weights)
    first, second = (runs[0][0] for runs in run("continued"))
    assert sorted({prompts[0] for prompts in [*first[:4], *second[:4]]}) == sorted(tiny.prompts(8)["prompt"])


def test_both_processes_choose_the_same_problems_and_merge_as_many_rounds(run):
    for group, one, other in zip((4, 8), *run("problems"), strict=True):
        tiny.assert_equal(one[1], other[1])
        assert one[2] == other[2] and set(one[2]["solved"]) == {json.dumps(text) for text in tiny.prompts(2)["prompt"]}
        assert one[3] == other[3] and len(one[0]) == len(other[0])
        assert sum(int(row["problems/rounds"]) for row in one[3]) == len(one[0]) > 8
        tried = [list(dict.fromkeys(a + b)) for a, b in zip(one[0], other[0], strict=True)]
        assert all(len(numbers) == 8 // group for numbers in tried)
        assert [sum(n in numbers for numbers in tried) for n in (0, 1)] == [1, 1]  # solved once
        assert all(row["loss"] > 0 for row in one[3])


def test_images_on_one_process_do_not_block_the_other(run):
    for kinds in run("images_on_one_process"):
        assert len(kinds) == 2
        for steps in kinds:
            assert len(steps) == 2 and all(math.isfinite(loss) and loss > 0 for loss, _ in steps)


@pytest.mark.parametrize("case", distributed_worker.GRADIENT_CASES)
def test_two_processes_with_four_equal_one_with_eight(run, tmp_path, case):
    expected, expected_log = distributed_worker.first_gradient(tmp_path, 1, **distributed_worker.GRADIENT_CASES[case])
    for result in run("gradients"):
        grads, log = result[case]
        tiny.assert_near(grads, expected)
        assert log == pytest.approx(expected_log, rel=1e-4, abs=1e-6)


def test_the_main_process_alone_makes_heat_maps_and_changes_nothing(run):
    main, other = run("watched")
    for result in (main, other):
        tiny.assert_equal(result["with"], result["without"])
    assert sorted(main["pages"]) == ["index.jsonl", "step_000001.html", "step_000002.html"] and other["pages"] == {}
    assert all('class="t s ' in page for name, page in main["pages"].items() if name.endswith(".html"))


@pytest.mark.parametrize("student", ["full", "lora"])
def test_replicas_stay_equal_on_different_data(run, student):
    first, second = (result[student] for result in run("replicas"))
    assert any(not torch.equal(a, b) for a, b in zip(first["rollouts"], second["rollouts"], strict=True))
    assert any(not torch.equal(value, first["before"][name]) for name, value in first["student"].items())
    tiny.assert_equal(first["student"], second["student"])
    assert first["stores"].keys() == second["stores"].keys()
    for name in first["stores"]:
        tiny.assert_equal(first["stores"][name], second["stores"][name])
    assert first["keys"] == second["keys"]
    assert any("sdpo/divergence" in keys for keys in first["keys"])


def test_feedback_stays_with_its_row(run):
    rows = [row for rank in run("pairs") for row in rank]
    assert len(rows) == 2 * 2 * 2 * 4
    for prompt, completion, teacher_prompt in rows:
        assert f"<{prompt}|{completion}>" in teacher_prompt
        assert teacher_prompt.startswith(prompt)
    for rank in run("pairs"):
        assert len({prompt for prompt, *_ in rank}) > 1


def test_a_group_over_both_processes_gets_the_others_success(run):
    first, second = run("demonstration")
    assert [text.startswith(start) for (text, *_), start in zip(sorted(first["rows"]), ("bad", "lose"), strict=True)]
    assert {available for _, available, _ in first["rows"]} == {True}
    assert all("Correct solution:\n\nwin\n" in hint for _, _, hint in first["rows"])
    by_answer = {text.replace("<pad>", "").removesuffix("<eos>"): (a, hint) for text, a, hint in second["rows"]}
    assert by_answer["no"][0] and "win" in by_answer["no"][1]
    assert not by_answer["win"][0]  # the only success is not its own demonstration
    for result in (first, second):
        metrics = result["metrics"]
        assert metrics["sdpo/success_share"] == 0.25
        assert metrics["sdpo/success_group_share"] == 1.0
        assert metrics["sdpo/demonstration_share"] == 0.75
        assert metrics["sdpo/lone_success_share"] == 0.25
        assert not any(math.isnan(value) for value in metrics.values())


def test_with_every_control_on_the_processes_stay_alike(run):
    first, second = run("controls")
    tiny.assert_equal(first["student"], second["student"])
    tiny.assert_equal(first["teacher"], second["teacher"])
    assert first["memory"] == second["memory"]
    assert first["memory"]["success_buffer"]["answers"] and first["memory"]["gap_size"]["value"] > 0
    assert first["evaluated"] == second["evaluated"] == 2
