"""The report of a run: what it reads from whole, broken and running folders, and what stands on its page."""

import html
import json
import os
import re
import shutil
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import psutil
import pytest
import tiny
from test_report import NASTY

from sdpo_trl.report import TokenHeatmapCallback
from sdpo_trl.report.__main__ import main
from sdpo_trl.report.charts import Chart, Series, draw, smooth, smoothing
from sdpo_trl.report.curves import MOST_POINTS, charts, thin
from sdpo_trl.report.rollouts import choose, read_pages, total_reward
from sdpo_trl.report.run import RunRecord, duration, read_run
from sdpo_trl.report.run_page import run_report
from sdpo_trl.run_log import RUN_LOG, RunLog

pytest.importorskip("matplotlib", reason="the report draws with matplotlib (extra `viz`)")


class Page(HTMLParser):
    """What a browser would make of it: the texts by tag, links, and elements that could act."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts, self.links, self.scripts, self.attributes = [], [], [], []
        self._open = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._open.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag == "a":
            self.links.append(dict(attrs)["href"])

    def handle_endtag(self, tag):
        if tag in self._open:
            while self._open.pop() != tag:
                pass

    def handle_data(self, data):
        (self.scripts if self._open and self._open[-1] in ("script", "style") else self.texts).append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))


def curves_of(page: str) -> dict[str, list]:
    """The charts' lines by title, as the page's script reads them."""
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])
    titles = map(html.unescape, re.findall(r"<figcaption[^>]*><b>(.*?)</b>", page))
    return {title: chart["lines"] for title, chart in zip(titles, data, strict=True)}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, list[dict]]:
    """A run with evaluations, warnings, tables and heat maps, and what its trainer remembers."""
    folder = tmp_path_factory.mktemp("run") / "first run"
    trainer = tiny.trainer(
        folder, tiny.telling(reward=tiny.even_length), max_steps=6, log_completions=True, num_completions_to_print=0,
        diagnostics_warning_interval=2, eval_strategy="steps", eval_steps=3, data=tiny.prompts(8, chat=True),
        trainer_eval_dataset=tiny.prompts(4, chat=True), save_strategy="steps", save_steps=4, logging_steps=1,
        trainer_callbacks=[TokenHeatmapCallback(every=3, rollouts=2)],
    )  # fmt: skip
    trainer.train()
    return folder, trainer.state.log_history


def copied(run, folder: Path) -> Path:
    return Path(shutil.copytree(run[0], folder / "copy"))


def record(kind, step=0, at=1000.0, **more):
    return json.dumps({"kind": kind, "time": at, "step": step, **more})


def written(folder: Path, *lines: str, end: str = "\n") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / RUN_LOG).write_text("\n".join(lines) + end, encoding="utf-8")
    return folder


# Reading


def test_what_is_read_is_what_the_trainer_logged(run):
    folder, history = run
    read = read_run(folder)
    assert read.state == "finished" and "Finished at step 6 of 6" in read.said and not read.notes
    for name in ("loss", "reward", "sdpo/divergence", "eval_reward", "eval_sdpo/teacher_success_share"):
        assert read.series(name) == [(row["step"], row[name]) for row in history if name in row]
    assert read.settings["learning_rate"] == (1e-3, 1e-6) and "output_dir" not in read.settings
    assert any("cut at `max_completion_length`" in text for _, text in read.warnings)
    assert {step for step, _ in read.warnings} <= set(range(7))


def test_a_run_that_goes_on_and_one_that_was_killed_are_told_apart(tmp_path):
    session = {"process": os.getpid(), "settings": {}, "model": "m"}
    now = time.time()
    lines = [
        record("session", at=now, **session), record("begin", at=now, max_steps=9),
        record("log", 3, now, values={"loss": 1.0}),
    ]  # fmt: skip
    going = read_run(written(tmp_path / "a", *lines), now + 65)
    assert going.state == "running" and going.said == "Running: step 3 of 9, last heard of 1 min 5 s ago."
    dead = next(pid for pid in range(4_000_000, 3_000_000, -1) if not psutil.pid_exists(pid))
    lines[0] = record("session", at=now, **{**session, "process": dead})
    killed = read_run(written(tmp_path / "b", *lines), now + 3 * 3600)
    assert killed.state == "stopped" and "step 3 of 9, last heard of 3 h 0 min ago" in killed.said
    # A process that has the number of one that ended is another one.
    lines[0] = record("session", at=now - 1e7, **session)
    assert read_run(written(tmp_path / "c", *lines)).state == "stopped"
    failed = read_run(written(tmp_path / "d", *lines, record("error", 3, error="RewardError", text="no <b>luck</b>")))
    assert failed.state == "failed" and failed.said == "Ended at step 3 of 9 with RewardError: no <b>luck</b>"


def test_broken_lines_are_passed_over_and_counted(tmp_path):
    good = [record("session"), record("begin"), record("log", 1, values={"loss": 1.0, "x": "nan", "y": None, "z": []})]
    bad = ["{", "[1]", '{"kind": "log"}', '{"kind": 3, "time": 1, "step": 1}', "\x00\x00", record("log", 2)[:20]]
    read = read_run(written(tmp_path, *good, *bad, record("log", 2, values={"loss": 0.5}), '{"kind": "lo', end=""))
    assert read.series("loss") == [(1, 1.0), (2, 0.5)] and read.series("x") == []
    assert read.notes[0] == f"{RUN_LOG}: 7 lines, first 4 of 11 cannot be read and is passed over."
    assert read.notes[1:] == ("Not finite at some steps, and left out of the curves there: x (first at step 1).",)
    (tmp_path / RUN_LOG).write_bytes(b"\xff\xfe" + (tmp_path / RUN_LOG).read_bytes())
    assert read_run(tmp_path).series("loss") == [(1, 1.0), (2, 0.5)]


def test_a_resumed_run_replaces_what_came_after_its_checkpoint(tmp_path):
    def log(step, loss):
        return record("log", step, values={"loss": loss})

    first = [record("session"), record("begin"), log(1, 1.0), log(2, 2.0), record("warning", 1, text="a"),
             record("warning", 2, text="b")]  # fmt: skip
    read = read_run(written(tmp_path, *first, record("session", 1), record("begin", 1), log(2, 20.0), log(3, 30.0)))
    assert read.series("loss") == [(1, 1.0), (2, 20.0), (3, 30.0)] and read.warnings == ((1, "a"),)
    assert read.facts["Resumed at step"] == "1"
    anew = [record("log", 0, values={"eval_loss": 7.0}), record("session"), record("begin"), log(1, 5.0)]
    read = read_run(written(tmp_path, *first, record("end", 2), *anew))
    assert read.series("loss") == [(1, 5.0)] and read.series("eval_loss") == [(0, 7.0)] and not read.warnings
    assert read.notes == ("An earlier run in this folder is left out: training began anew.",)


def test_a_resumed_run_keeps_what_was_logged_before_its_first_step(tmp_path):
    def eval_log(step, reward):
        return record("log", step, values={"eval_reward": reward})

    lines = [
        record("session", at=900.0),
        record("begin"),
        eval_log(0, 0.1),
        record("warning", text="said at each start"),
    ]
    lines += [eval_log(2, 0.2), eval_log(4, 0.3), record("session"), eval_log(0, 0.7), record("begin", 2)]
    read = read_run(written(tmp_path, *lines, eval_log(4, 0.4)))
    # The evaluation of what was loaded later knew no step.
    assert read.series("eval_reward") == [(0, 0.1), (2, 0.2), (4, 0.4)]
    assert not read.warnings and read.facts["Time"] == "1 min 40 s"


@pytest.mark.parametrize("end", [[record("end", 4)], []], ids=["ended", "killed"])
def test_a_later_evaluation_by_another_trainer_is_no_step_of_the_run(tmp_path, end):
    lines = [record("session"), record("begin"), record("log", 4, values={"eval_reward": 0.5}), *end]
    read = read_run(written(tmp_path, *lines, record("log", 0, values={"eval_reward": 0.1})))
    assert read.series("eval_reward") == [(4, 0.5)]
    assert read.notes == (
        "An evaluation by a trainer of its own is left out: of which step its model was is not known.",
    )
    alone = read_run(written(tmp_path / "alone", record("log", 0, values={"eval_reward": 0.1})))
    assert alone.series("eval_reward") == [(0, 0.1)] and not alone.notes


def test_a_session_after_half_a_line_is_read(tmp_path):
    log = RunLog(tmp_path / RUN_LOG, lambda: 2, lambda: True)
    first = [record("session"), record("begin"), *(record("log", i, values={"loss": float(i)}) for i in (1, 2, 3))]
    written(tmp_path, *first, record("log", 4)[:20], end="")  # killed while it wrote
    with log.recording():
        log.write("begin")
        log.write("log", values={"loss": 20.0})
    read = read_run(tmp_path)
    assert read.series("loss") == [(1, 1.0), (2, 2.0), (2, 20.0)] and read.state == "finished"
    assert read.notes == (f"{RUN_LOG}: line 6 of 11 cannot be read and is passed over.",)


def test_each_evaluation_set_has_its_own_curves(tmp_path):
    sets = {"a": tiny.prompts(4), "b": tiny.prompts(8).select(range(4, 8))}
    trainer = tiny.trainer(
        tmp_path / "run", tiny.telling(reward=tiny.even_length), eval_strategy="steps", eval_steps=1,
        trainer_eval_dataset=sets,
    )  # fmt: skip
    trainer.train()
    read = read_run(tmp_path / "run")
    assert read.evaluations == ("eval_a", "eval_b")
    lines = curves_of(run_report(tmp_path / "run").read_text(encoding="utf-8"))
    for name in sets:
        logged = [row for row in trainer.state.log_history if f"eval_{name}_runtime" in row]
        assert read.series(f"eval_{name}_loss") == [(row["step"], row[f"eval_{name}_loss"]) for row in logged]
        assert read.series(f"eval_{name}_reward") == [(row["step"], row["eval_reward"]) for row in logged]
    shown = [[value for _, value in line] for line in lines["Reward"][1:]]
    assert shown == [pytest.approx([v for _, v in read.series(f"eval_{n}_reward")], rel=1e-5) for n in sets]
    text = Page((tmp_path / "run" / "report.html").read_text(encoding="utf-8")).text
    assert "evaluation (a)" in text and "Success in evaluation (b)" in text


@pytest.mark.parametrize("line", [
    '{"kind": "log", "time": NaN, "step": 2, "values": {"loss": 1}}',
    '{"kind": "log", "time": 1e999, "step": 2, "values": {"loss": 1}}',
    '{"kind": "log", "time": -1e300, "step": 2, "values": {"loss": 1}}',
    '{"kind": "log", "time": 1, "step": -2, "values": {"loss": 1}}',
    f'{{"kind": "log", "time": 1, "step": 1{"0" * 30}, "values": {{"loss": 1}}}}',
    f'{{"kind": "log", "time": 1, "step": 2, "values": {{"loss": 1{"0" * 400}}}}}',
    '{"kind": "log", "time": 1, "step": 2, "values": {"loss": 1e308, "sdpo/time/step": "nan"}}',
    '{"kind": "log", "time": 1, "step": 2, "values": {"sdpo/time/step": 1}}',
    '{"kind": "session", "time": 1, "step": 1, "rewards": 5, "reward_weights": [null], "settings": [], "versions": 3}',
    '{"kind": "session", "time": 1, "step": 1, "rewards": ["a", ["b"]], "reward_weights": ["x", 1], "process": []}',
])  # fmt: skip
def test_records_that_no_trainer_wrote_break_nothing(tmp_path, line):
    good = [record("session"), record("begin"), record("log", 1, values={"loss": -1e308}), line]
    page = run_report(written(tmp_path, *good, record("log", 3, values={"loss": 0.5}))).read_text(encoding="utf-8")
    assert curves_of(page)["Loss"][0][-1] == [3, 0.5]
    assert "Not finite at some steps, and left out of the curves there: loss (first at step 1)" in Page(page).text


def test_a_page_that_cannot_be_written_is_explained(tmp_path, capsys):
    folder = written(tmp_path / "run", record("session"), record("log", 1, values={"loss": 1.0}))
    (folder / "report.html").mkdir()
    for more in ([], ["--out", str(folder / RUN_LOG / "page.html")]):
        with pytest.raises(SystemExit):
            main([str(folder), *more])
        assert "cannot be written to" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == [RUN_LOG, "report.html"]


def test_many_warnings_are_marked_where_they_came(tmp_path, monkeypatch):
    marked = []
    monkeypatch.setattr(
        "sdpo_trl.report.run_page.draw", lambda chart, marks: marked.append(marks) or draw(chart, marks)
    )
    lines = [record("log", i, values={"loss": 1.0 / i}) for i in range(1, 501)]
    warnings = [record("warning", i, text="hm") for i in range(1, 501)]
    run_report(written(tmp_path, record("session"), *lines, *warnings))
    assert len(marked[0]) == 30 and marked[0][0] == 1 and marked[0][-1] == 500
    assert max(b - a for a, b in zip(marked[0], marked[0][1:], strict=False)) < 20


def test_every_line_has_a_colour_that_the_page_knows(tmp_path):
    values = {f"rewards/f{i}/mean": i / 20 for i in range(20)}
    folder = written(tmp_path, record("session"), *(record("log", i, values=values) for i in (1, 2)))
    page = run_report(folder).read_text(encoding="utf-8")
    style = re.search(r"<style>(.*?)</style>", page, re.S)[1]
    used = set(re.findall(r'class="([sf]\d+)"', page))
    assert len(used) == 8 and all(f".{name} {{" in style for name in used)


def test_without_the_run_log_the_latest_whole_checkpoint_is_read(run, tmp_path):
    folder = copied(run, tmp_path)
    (folder / RUN_LOG).unlink()
    (folder / "checkpoint-9").mkdir()
    (folder / "checkpoint-9" / "trainer_state.json").write_text('{"global_step": 9, "log_hist')
    read = read_run(folder)
    assert read.state == "unknown" and read.series("loss")[-1][0] == 6
    assert (
        "checkpoint-9/trainer_state.json cannot be read" in read.notes[0] and "checkpoint at step 6" in read.notes[1]
    )
    assert "numbers are those of a checkpoint" in Page(run_report(folder).read_text(encoding="utf-8")).text


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    with pytest.raises(FileNotFoundError, match=f"holds neither a `{RUN_LOG}`"):
        read_run(tmp_path)
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        read_run(tmp_path / "none")
    with pytest.raises(SystemExit) as caught:
        main([str(tmp_path / "none")])
    assert caught.value.code == 2 and "There is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "0 s"), (59.4, "59 s"), (61, "1 min 1 s"), (7300, "2 h 1 min"), (9e5, "10 days 10 h")]
)
def test_durations_in_words(seconds, words):
    assert duration(seconds) == words


# Rollouts


def test_the_best_and_the_worst_rollouts_have_their_heat_maps(run):
    folder, _ = run
    notes: list[str] = []
    best, worst = choose(folder, {"reward_with_feedback": 1.0}, notes)
    assert not notes and len(best) == len(worst) == 3
    assert {choice.reward for choice in best} == {1.0} and {choice.reward for choice in worst} == {0.0}
    pages = read_pages(folder)
    assert [page.step for page in pages] == [1, 4] and all(len(page.rows) == 2 for page in pages)
    linked = {0.0: 0, 1.0: 0}
    for page in pages:
        text = (folder / "heatmaps" / page.file).read_text(encoding="utf-8")
        for place, row in enumerate(page.rows):
            linked[total_reward(row.rewards, {})] += 1
            section = text.split(f'id="name-{place}"')[1].split("</section>")[0]
            answer = Page(section.split('class="answer"')[1])
            assert "".join(answer.texts).replace("·", " ").startswith('" role') or row.completion[:1] in answer.text
    for group, reward in ((best, 1.0), (worst, 0.0)):
        assert sum(choice.link is not None for choice in group) == min(3, linked[reward])


def test_rewards_are_weighed_as_in_training():
    assert total_reward({"a": 1.0, "b": 0.5}, {"a": 2.0, "b": -1.0}) == 1.5
    assert total_reward({"a": float("nan"), "b": 0.5, "length": 99.0}, {"a": 2.0, "b": 1.0}) == 0.5
    assert total_reward({"a": None, "b": float("nan")}, {}) is None


def test_among_equals_other_prompts_come_first(tmp_path):
    (tmp_path / "completions").mkdir()
    frame = pd.DataFrame({
        "step": 4, "prompt": ["p", "p", "p", "q", "r"], "completion": list("abcde"), "r": [1.0, 1.0, 1.0, 1.0, 0.0],
        "advantage": 0.0,
    })  # fmt: skip
    frame.to_parquet(tmp_path / "completions" / "completions_00004.parquet")
    best, worst = choose(tmp_path, {}, [])
    assert [choice.row.prompt for choice in best] == ["p", "q", "p"] and worst[0].row.completion == "e"
    assert choose(tmp_path, {}, [], until=3) == ([], [])


def test_a_table_that_is_cut_off_is_passed_over_with_a_word(run, tmp_path):
    folder = copied(run, tmp_path)
    tables = sorted((folder / "completions").iterdir())
    tables[0].write_bytes(tables[0].read_bytes()[:200])
    tables[1].write_bytes(b"")
    pd.DataFrame({"x": [1]}).to_parquet(tables[2])
    text = Page(run_report(folder).read_text(encoding="utf-8")).text
    for table in tables[:3]:
        assert f"completions/{table.name} cannot be read and is passed over" in text
    assert "Best rollouts" in text
    index = folder / "heatmaps" / "index.jsonl"
    index.write_text(index.read_text() + '{"step": 5, "file": "../../etc/passwd", "rollouts": []}\n{"step"')
    assert [page.step for page in read_pages(folder)] == [1, 4]


# The page


def test_the_page_shows_the_logged_values(run):
    folder, history = run
    page = run_report(folder).read_text(encoding="utf-8")
    curves = curves_of(page)

    def logged(name):
        return [[row["step"], row[name]] for row in history if name in row]

    for title, names in {
        "Reward": ("reward", "eval_reward"),
        "Success": ("sdpo/success_share", "sdpo/success_group_share", "eval_sdpo/success_share",
                    "eval_sdpo/teacher_success_share"),
        "Divergence from the teacher": ("sdpo/divergence", "eval_sdpo/divergence"),
        "Gap of the sampled token": ("sdpo/teacher_student_gap", "sdpo/gap_size"),
        "Entropy of the next token": ("sdpo/student_entropy", "sdpo/teacher_entropy"),
        "What the teachers are told": ("sdpo/hinted_share", "sdpo/demonstration_share", "sdpo/feedback_share",
                                       "sdpo/distilled_share"),
        "Length of answers": ("completions/mean_length", "completions/max_length", "completions/min_length"),
        "Distance of the teacher's weights": ("sdpo/teacher_distance",),
        "Gradient": ("grad_norm",),
    }.items():  # fmt: skip
        assert len(curves[title]) == len(names)
        for line, name in zip(curves[title], names, strict=True):
            assert [step for step, _ in line] == [step for step, _ in logged(name)]
            assert [v for _, v in line] == pytest.approx([v for _, v in logged(name)], rel=1e-5, abs=1e-12)
    for step in range(6):  # the parts of a step's time, stacked, are the step's
        parts = sum(line[step][1] for line in curves["Time of a step"])
        assert parts == pytest.approx(logged("sdpo/time/step")[step][1], rel=1e-4)
    text = Page(page).text
    assert "learning_rate 0.001 1e-06" in text and "✓ finished" in text
    assert "cut at `max_completion_length`" in text


def test_links_lead_to_pages_that_are_there(run, tmp_path):
    folder = copied(run, tmp_path)
    for out in (folder / "report.html", tmp_path / "elsewhere" / "deep" / "page.html"):
        links = Page(run_report(folder, out).read_text(encoding="utf-8")).links
        assert len(links) >= 3
        for link in links:
            file, _, anchor = link.partition("#")
            target = out.parent / file.replace("%20", " ")
            assert target.is_file() and (not anchor or f'id="{anchor}"' in target.read_text(encoding="utf-8"))


def test_nothing_that_was_written_can_act_on_the_page(run, tmp_path):
    folder = copied(run, tmp_path)
    for path in (folder / "completions").iterdir():
        path.unlink()
    valid = [text.encode("utf-8", "replace").decode() for text in NASTY]
    count = len(valid)
    pd.DataFrame({
        "step": 6, "prompt": valid, "completion": valid[::-1], "feedback": valid, "teacher_prompt": valid,
        "reward_with_feedback": [float(i) for i in range(count)], valid[0]: 1.0, "advantage": 0.0,
    }).to_parquet(folder / "completions" / "completions_00006.parquet")  # fmt: skip
    lines = [record("session", settings={valid[1]: [valid[2], valid[3]]}, model=valid[2], rewards=[valid[0]])]
    lines += [record("begin"), *(record("warning", 1, text=text) for text in NASTY)]
    for step in (1, 2):
        numbers = {f"rewards/{valid[i]}/mean": 1.0 for i in range(3)}
        lines.append(record("log", step, values={**numbers, "loss": 1.0, valid[4]: 2.0, "reward": 1e300 * step}))
    lines.append(record("error", 2, error=valid[1], text=valid[6]))
    written(folder, *lines)
    page = run_report(folder).read_text(encoding="utf-8")
    parsed = Page(page)
    plain = Page(run_report(run[0], tmp_path / "plain.html").read_text(encoding="utf-8"))
    assert {tag for tag, *_ in parsed.attributes} <= {tag for tag, *_ in plain.attributes}
    assert not [name for _, name, _ in parsed.attributes if name.startswith("on") or name == "style"]
    assert all(link.startswith(("./", "../", "/")) for link in parsed.links)
    assert page.count("<script") == 2 and page.count("</script") == 2
    assert "window.hacked" in parsed.text and "\u202e" not in page and "\x00" not in page
    assert not re.search(r"(?:src|href|url)\s*[=(]\s*[\"']?(?:https?:)?//", page.replace("http://www.w3.org", ""))


def test_a_page_needs_nothing_else(run):
    page = run_report(run[0]).read_text(encoding="utf-8")
    assert (
        "default-src 'none'" in html.unescape(page)
        and "<link" not in page
        and "<img" not in page
        and " style=" not in page
    )
    for svg in re.findall(r"<svg .*?</svg>", page, re.S):
        ids = re.findall(r' id="(\w+)"', svg)
        assert all(page.count(f' id="{name}"') == 1 for name in ids)
        assert all(f' id="{name}"' in svg for name in re.findall(r"url\(#(\w+)\)", svg))


def test_many_steps_stay_small_and_quick(tmp_path):
    steps = 20_000
    lines = [record("session", settings={}), record("begin", max_steps=steps)]
    names = ["loss", "reward", "sdpo/divergence", *(f"sdpo/time/{part}" for part in ("step", "student", "backward"))]
    lines += [
        record("log", i, values={name: i / (j + 1) for j, name in enumerate(names)}) for i in range(1, steps + 1)
    ]
    start = time.process_time()
    out = run_report(written(tmp_path, *lines))
    assert time.process_time() - start < 15
    assert out.stat().st_size < 1e6
    loss = curves_of(out.read_text(encoding="utf-8"))["Loss"][0]
    assert len(loss) == MOST_POINTS and loss[0] == [1, 1.0] and loss[-1] == [steps, float(steps)]


def test_a_run_without_a_log_yet_has_a_page(tmp_path):
    page = Page(run_report(written(tmp_path, record("session", settings={"beta": [0.1, 0.0]}))).read_text())
    assert "beta 0.1 0.0" in page.text and "Curves" not in page.text


def test_the_command_writes_it_and_scores_what_has_no_heat_map(run, tmp_path, capsys, monkeypatch):
    folder = copied(run, tmp_path)
    assert main([str(folder)]) == folder / "report.html"
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    index = folder / "heatmaps" / "index.jsonl"
    index.unlink()
    monkeypatch.chdir(tmp_path)
    out = main([str(folder), "--model", str(folder / "checkpoint-4"), "--out", "scored.html"])
    links = Page(out.read_text(encoding="utf-8")).links
    assert len(links) == 6
    for link in links:
        heatmap = (tmp_path / link).read_text(encoding="utf-8")
        assert "Jensen-Shannon" in heatmap and 'class="t s' in heatmap
    for wrong in ([str(folder), "--prompt", "x"], [], ["--prompt", "x"]):
        with pytest.raises(SystemExit):
            main(wrong)


# Curves


def test_means_over_neighbours():
    assert smooth([1, 2, 9], 1) == [1, 2, 9] and smooth([0, 3, 9, 0], 3) == [1.5, 4, 4, 4.5]
    assert smoothing(59) == 1 and smoothing(60) == 5 and smoothing(301) % 2 == 1


def test_thinning_keeps_the_ends_and_the_order():
    points = [(i, float(i)) for i in range(1234)]
    kept = thin(points, 100)
    assert len(kept) == 100 and kept[0] == points[0] and kept[-1] == points[-1] and list(kept) == sorted(set(kept))
    assert thin(points[:5], 100) == tuple(points[:5])


def test_odd_curves_are_drawn():
    for points in ([(3, 1.0)], [(1, 0.0), (2, 0.0)], [(1, 1e300), (2, -1e300)], [(1, 1e-300), (1, 2e-300)]):
        picture = draw(Chart("one", "", (Series("a", tuple(points)),)), [1])
        assert picture.svg.startswith("<svg") and "style" not in picture.svg
        assert 0 < picture.box[0] < picture.box[1] <= 1 and picture.limits[0] < picture.limits[1]
    stacked = Chart("two", "", (Series("a", ((1, 1.0),)), Series("b", ((1, 2.0),))), stacked=True)
    assert 'class="f0' in draw(stacked).svg and 'class="f1' in draw(stacked).svg


def test_without_matplotlib_it_says_what_to_install(monkeypatch, run, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        main([str(run[0])])
    assert 'pip install "sdpo-trl[viz]"' in capsys.readouterr().err


def test_what_is_always_zero_and_optional_has_no_line():
    logs = tuple((i, {"completions/clipped_ratio": 0.0, "sdpo/ratio_clipped_share": 0.0}) for i in range(3))
    (chart,) = charts(RunRecord("r", "finished", "", logs))
    assert [line.label for line in chart.series] == ["answers at the limit"]
