"""Heat maps and reports in a real browser: what they show under pointer, keys and touch; nothing injected runs."""

import shutil
import time

import pytest
import tiny
from test_report import nasty_heatmap, rescorer

from sdpo_trl.report import Heatmap, RolloutView, TokenHeatmapCallback
from sdpo_trl.report.page import candidate_text
from sdpo_trl.report.run_page import run_report

pytestmark = pytest.mark.browser

FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (`pip install selenium`)")
    binary, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or chromedriver is None:
        pytest.skip("chromium or its driver is not installed (`apt-get install chromium chromium-driver`)")
    options = selenium.ChromeOptions()
    options.binary_location = binary
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = selenium.Chrome(options=options, service=selenium.ChromeService(chromedriver))
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def heatmap() -> Heatmap:
    answers = ["the first answer, of some words", "another"]
    typed = rescorer().heatmap("2+3=", feedback="it is 5", answer=answers)
    # One token is a tool's.
    first = typed.rollouts[0]
    observed = tuple(type(t)(t.id, t.text, "context") if i == 3 else t for i, t in enumerate(first.tokens))
    return Heatmap(
        typed.title, typed.prompt, (RolloutView(**{**vars(first), "tokens": observed}), typed.rollouts[1]),
        typed.settings,
    )  # fmt: skip


@pytest.fixture
def page(driver, heatmap, tmp_path):
    driver.set_window_size(1400, 900)
    driver.get(heatmap.save(tmp_path / "map.html").as_uri())
    return driver


def run(driver, script, *arguments):
    return driver.execute_script(script, *arguments)


def settle(driver):
    """Wait for two animation frames."""
    driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


def panel(driver) -> dict[str, str]:
    settle(driver)
    return run(
        driver,
        "const text = (id) => document.getElementById(id).textContent;"
        "return {token: text('p-text'), place: text('p-place'), verdict: text('p-verdict'),"
        " divergence: text('p-divergence'), ratio: text('p-ratio'), student: text('p-student'),"
        " teacher: text('p-teacher'), scored: !document.getElementById('p-scored').hidden};",
    )


def number(text: str) -> float:
    return float(text.replace("\N{MINUS SIGN}", "-").replace("+", ""))


def assert_shows(driver, heatmap, rollout: int, index: int) -> None:
    """The panel's numbers are the record's."""
    tokens = heatmap.rollouts[rollout].tokens
    token, shown = tokens[index], panel(driver)
    assert shown["token"] == candidate_text(token.text)
    assert shown["place"] == f"token {index + 1} of {len(tokens)}, id {token.id}"
    if token.values is None:
        assert not shown["scored"] and "Written by a tool" in shown["verdict"]
        return
    values = token.values
    assert number(shown["divergence"]) == pytest.approx(values.divergence, rel=1e-3, abs=6e-5)
    assert number(shown["ratio"]) == pytest.approx(values.log_ratio, rel=1e-3, abs=6e-5)
    assert ("raises" if values.log_ratio > 0 else "lowers") in shown["verdict"]
    sides = (
        ("student", values.student_log_prob, values.student_entropy, values.student_top),
        ("teacher", values.teacher_log_prob, values.teacher_entropy, values.teacher_top),
    )
    for side, log_prob, entropy, top in sides:
        caption, rows = run(
            driver,
            "const t = document.getElementById('p-' + arguments[0]);"
            "const rows = [...t.tBodies[0].rows].map((row) => [...row.cells].map((cell) => cell.textContent));"
            "return [t.caption.textContent, rows]",
            side,
        )
        said = caption.split("log p ")[1].split(" · entropy ")
        assert [number(x) for x in said] == pytest.approx([log_prob, entropy], abs=6e-4)
        assert [name for name, _ in rows] == [candidate_text(c.text) for c in top]
        shares = [number(share.removesuffix(" %")) / 100 for _, share in rows]
        assert shares == pytest.approx([c.probability for c in top], rel=0.06, abs=1e-6)


def press(driver, key):
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(driver).send_keys(key).perform()


def spans(driver, rollout=0):
    from selenium.webdriver.common.by import By

    return driver.find_elements(By.CSS_SELECTOR, f'.answer[data-rollout="{rollout}"] .t')


def test_hovering_shows_the_computed_values(page, heatmap):
    from selenium.webdriver.common.action_chains import ActionChains

    assert "Point at" in run(page, "return document.querySelector('.panel .empty').textContent")
    for rollout, index in ((0, 0), (0, 3), (0, 7), (1, 2)):
        ActionChains(page).move_to_element(spans(page, rollout)[index]).perform()
        assert_shows(page, heatmap, rollout, index)


def test_keyboard_alone_reaches_every_token(page, heatmap):
    from selenium.webdriver.common.keys import Keys

    seen = []
    for _ in range(30):
        press(page, Keys.TAB)
        seen.append(run(page, "return document.activeElement.closest('.answer')?.dataset.rollout ?? ''"))
        if seen[-1] == "0":
            break
    assert seen[-1] == "0" and len(seen) < 30
    assert_shows(page, heatmap, 0, 0)
    for index in range(1, 6):
        press(page, Keys.ARROW_RIGHT)
        assert_shows(page, heatmap, 0, index)
    press(page, Keys.ARROW_LEFT)
    assert_shows(page, heatmap, 0, 4)
    press(page, Keys.END)
    assert_shows(page, heatmap, 0, len(heatmap.rollouts[0].tokens) - 1)
    press(page, Keys.HOME)
    assert_shows(page, heatmap, 0, 0)
    press(page, Keys.END)
    # One stop per answer: the next ones are the list of strongest tokens, which lead back into the answer.
    press(page, Keys.TAB)
    index = int(run(page, "return document.activeElement.dataset.token"))
    press(page, Keys.ENTER)
    assert_shows(page, heatmap, 0, index)
    strongest = max(
        (abs(t.values.log_ratio), i) for i, t in enumerate(heatmap.rollouts[0].tokens) if t.values is not None
    )
    assert index == strongest[1]


def test_arrows_move_between_lines(driver, heatmap, tmp_path):
    from selenium.webdriver.common.keys import Keys

    driver.set_window_size(500, 800)
    driver.get(heatmap.save(tmp_path / "map.html").as_uri())
    run(driver, "document.querySelector('.answer').style.width = '9rem'; arguments[0].focus()", spans(driver)[2])
    tops = [run(driver, "return document.activeElement.getBoundingClientRect().top + scrollY")]
    lefts = [run(driver, "return document.activeElement.getBoundingClientRect().left")]
    for key in (Keys.ARROW_DOWN, Keys.ARROW_UP):
        press(driver, key)
        tops.append(run(driver, "return document.activeElement.getBoundingClientRect().top + scrollY"))
        lefts.append(run(driver, "return document.activeElement.getBoundingClientRect().left"))
    assert tops[1] > tops[0] and tops[2] == tops[0] and lefts[1] == pytest.approx(lefts[0], abs=2)


def test_a_tap_pins_and_the_switch_recolours(page, heatmap):
    from selenium.webdriver.common.by import By

    index = max(
        range(len(heatmap.rollouts[1].tokens)), key=lambda i: abs(heatmap.rollouts[1].tokens[i].values.log_ratio)
    )
    span = spans(page, 1)[index]
    span.click()
    assert_shows(page, heatmap, 1, index)
    by_ratio = span.value_of_css_property("background-color")
    line = span.value_of_css_property("text-decoration")
    page.find_element(By.ID, "by-divergence").click()
    by_divergence = span.value_of_css_property("background-color")
    assert by_ratio != by_divergence and "underline" in line
    assert_shows(page, heatmap, 1, index)  # still pinned
    grey = spans(page, 0)[3].value_of_css_property("background-color")
    red, green, blue = (int(x) for x in grey.removeprefix("rgba(").removeprefix("rgb(").split(",")[:3])
    assert max(red, green, blue) - min(red, green, blue) < 8


def test_dark_mode_and_narrow_screens(driver, heatmap, tmp_path):
    def media(scheme):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    path = heatmap.save(tmp_path / "map.html").as_uri()
    colours = {}
    for scheme in ("light", "dark"):
        media(scheme)
        driver.set_window_size(1400, 900)
        driver.get(path)
        colours[scheme] = run(driver, "return getComputedStyle(document.body).backgroundColor")
        for width in (360, 700, 1400):
            size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            wide, screen = run(driver, "return [document.documentElement.scrollWidth, innerWidth]")
            assert wide <= screen == width
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    media("")
    assert colours["light"] != colours["dark"]


def test_nothing_injected_runs(driver, tmp_path):
    driver.get_log("browser")
    driver.get(nasty_heatmap().save(tmp_path / "nasty.html").as_uri())
    spans(driver)[0].click()
    settle(driver)
    time.sleep(0.2)
    assert run(driver, "return window.hacked === undefined && document.scripts.length === 2")
    assert run(driver, "return document.querySelectorAll('img, svg, iframe, object, link').length") == 0
    assert "diverged" in panel(driver)["verdict"]  # its log-ratio is not a number
    assert panel(driver)["token"] == "<script>window.hacked·=·1</script>"
    assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []
    # The policy holds also if escaping did not.
    opening = '<body data-by="ratio">'
    injected = f"{opening}<script>window.hacked = 2</script><img src=x onerror='window.hacked = 3'>"
    page = nasty_heatmap().html()
    assert opening in page
    page = page.replace(opening, injected)
    broken = tmp_path / "broken.html"
    broken.write_text(page, encoding="utf-8")
    driver.get(broken.as_uri())
    time.sleep(0.2)
    assert run(driver, "return window.hacked === undefined")
    refused = [entry["message"] for entry in driver.get_log("browser")]
    assert any("Content Security Policy" in message for message in refused)


def test_a_notebook_shows_it_in_its_frame(driver, heatmap, tmp_path):
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><meta charset=utf-8>{heatmap._repr_html_()}", encoding="utf-8")
    driver.set_window_size(1400, 900)
    driver.get(path.as_uri())
    driver.switch_to.frame(0)
    spans(driver)[1].click()
    assert_shows(driver, heatmap, 0, 1)
    driver.switch_to.default_content()


def test_2000_tokens_do_not_lag(driver, tmp_path):
    scored = rescorer().heatmap("a", feedback="b", answer="word " * 40).rollouts[0].tokens
    views = tuple(RolloutView(f"Rollout {i}", scored * 10) for i in range(2))
    driver.set_window_size(1400, 900)
    start = time.perf_counter()
    driver.get(Heatmap("long", "p", views).save(tmp_path / "long.html").as_uri())
    settle(driver)
    loading = time.perf_counter() - start
    took = driver.execute_async_script(
        """
        const done = arguments[0], list = [...document.querySelector('.answer').children], times = [];
        const next = (i) => {
          if (i === 40) return done(times);
          const start = performance.now();
          const span = list[i * 50];
          span.dispatchEvent(new PointerEvent('pointerover', { bubbles: true, pointerType: 'mouse' }));
          span.focus();
          span.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowDown', bubbles: true, cancelable: true }));
          requestAnimationFrame(() => {
            document.body.offsetHeight;
            times.push(performance.now() - start);
            next(i + 1);
          });
        };
        next(0);
        """
    )
    print(f"loaded in {loading:.2f} s; a step takes {sorted(took)[20]:.1f} ms (median), {max(took):.1f} ms (most)")
    assert len(spans(driver)) == 2000 and loading < 10
    assert sorted(took)[len(took) // 2] < 100  # 17, one frame, where nothing else runs


# The report of a run


@pytest.fixture(scope="module")
def run_page(tmp_path_factory):
    """A short run with evaluations, its history and its report."""
    pytest.importorskip("matplotlib", reason="the report draws with matplotlib (extra `viz`)")
    folder = tmp_path_factory.mktemp("run")
    trainer = tiny.trainer(
        folder, tiny.telling(reward=tiny.even_length), max_steps=5, log_completions=True, num_completions_to_print=0,
        eval_strategy="steps", eval_steps=2, trainer_eval_dataset=tiny.prompts(2), per_device_eval_batch_size=4,
        trainer_callbacks=[TokenHeatmapCallback(every=2)],
    )  # fmt: skip
    trainer.train()
    return run_report(folder), trainer.state.log_history


@pytest.fixture
def report(driver, run_page):
    driver.set_window_size(1400, 900)
    driver.get(run_page[0].as_uri())
    return driver


def chart_of(driver, title: str) -> int:
    titles = run(driver, "return [...document.querySelectorAll('figcaption > b')].map((b) => b.textContent)")
    return titles.index(title)


def shown_in(driver, chart: int) -> tuple[int, dict[str, str]]:
    return tuple(run(
        driver,
        "const f = document.querySelectorAll('.chart')[arguments[0]];"
        "const lines = [...f.querySelectorAll('.lines li')].map((li) => {"
        "  const value = li.querySelector('b').textContent;"
        "  return [li.textContent.trim().slice(0, -value.length).trim(), value]; });"
        "return [Number(f.querySelector('.at b').textContent), Object.fromEntries(lines)]",
        chart,
    ))  # fmt: skip


NAMES = {
    "Reward": {"training": "reward", "evaluation": "eval_reward"},
    "Divergence from the teacher": {"training": "sdpo/divergence", "evaluation": "eval_sdpo/divergence"},
    "Entropy of the next token": {"student": "sdpo/student_entropy", "teacher": "sdpo/teacher_entropy"},
    "Gradient": {"before it is clipped": "grad_norm"},
    "Time of a step": {"generation": "sdpo/time/generation", "student": "sdpo/time/student"},
}


def assert_logged(driver, history, title: str, step: int) -> None:
    at, lines = shown_in(driver, chart_of(driver, title))
    assert at == step
    for label, name in NAMES[title].items():
        values = [row[name] for row in history if row["step"] == step and name in row]
        assert (lines[label] == "\N{EN DASH}") == (not values)
        if values:
            assert number(lines[label]) == pytest.approx(values[0], rel=6e-3)


def test_a_pointer_and_the_keys_read_the_logged_values(report, run_page):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    plots = report.find_elements(By.CLASS_NAME, "plot")
    for title in NAMES:
        plot = plots[chart_of(report, title)]
        run(report, "arguments[0].focus()", plot)
        press(report, Keys.HOME)
        assert_logged(report, run_page[1], title, 1)
        for step in (2, 3):
            press(report, Keys.ARROW_RIGHT)
            assert_logged(report, run_page[1], title, step)
        press(report, Keys.END)
        assert_logged(report, run_page[1], title, 5)
        press(report, Keys.ARROW_RIGHT)
        assert_logged(report, run_page[1], title, 5)
    # Where the pointer is over a step, in the drawn picture: the cursor stands on it.
    chart = chart_of(report, "Gradient")
    frame = run(report, "return document.querySelectorAll('.plot svg')[arguments[0]].getBoundingClientRect()", chart)
    line = run(report, "return JSON.parse(document.getElementById('data').textContent)[arguments[0]]", chart)
    (left, right), (first, last) = line["box"], line["limits"]
    for step in (2, 4):
        x = frame["width"] * (left + (right - left) * (step - first) / (last - first))
        ActionChains(report).move_to_element_with_offset(plots[chart], round(x - frame["width"] / 2), 0).perform()
        assert_logged(report, run_page[1], "Gradient", step)
        cursor = run(
            report, "return document.querySelectorAll('.cursor')[arguments[0]].getBoundingClientRect()", chart
        )
        assert cursor["x"] + cursor["width"] / 2 == pytest.approx(frame["x"] + x, abs=1.5)


def test_lines_are_drawn_where_their_values_are(report, run_page):
    """The drawn path of the gradient's line, measured in the browser, rises and falls as the logged values do."""
    points = run(
        report,
        "const f = document.querySelectorAll('.chart')[arguments[0]];"
        "const path = f.querySelector('.plot path.s0');"
        "return path.getAttribute('d').trim().split(/\\s*[ML]\\s*/).filter(Boolean)"
        "  .map((p) => p.trim().split(/\\s+/).map(Number))",
        chart_of(report, "Gradient"),
    )
    values = [row["grad_norm"] for row in run_page[1] if "grad_norm" in row]
    heights = [-y for _, y in points]
    assert len(points) == len(values)
    scale = (max(heights) - min(heights)) / (max(values) - min(values))
    for height, value in zip(heights, values, strict=True):
        assert height - min(heights) == pytest.approx(scale * (value - min(values)), abs=0.02 * scale * max(values))


@pytest.mark.parametrize("dark", [False, True])
def test_colours_come_from_the_page_and_nothing_is_blocked(report, dark):
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    report.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    settle(report)
    stroke, ground = run(
        report,
        "return [getComputedStyle(document.querySelector('.plot path.s0')).stroke,"
        " getComputedStyle(document.querySelector('.chart')).backgroundColor]",
    )
    report.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert (stroke, ground) == (
        ("rgb(116, 179, 242)", "rgb(26, 30, 37)") if dark else ("rgb(31, 95, 168)", "rgb(255, 255, 255)")
    )
    assert not [entry for entry in report.get_log("browser") if "favicon" not in entry["message"]]


def test_a_narrow_screen_needs_no_sideways_scrolling(driver, run_page):
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 360, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    )
    driver.get(run_page[0].as_uri())
    width = run(driver, "return document.documentElement.scrollWidth")
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert width <= 360


def test_a_link_leads_to_the_rollouts_heat_map(report):
    from selenium.webdriver.common.by import By

    report.find_element(By.CSS_SELECTOR, ".rollout a").click()
    assert "token heat map" in report.title and "#name-" in report.current_url
