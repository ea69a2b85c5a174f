"""The documentation is true where that can be checked: names, options, defaults, warnings, links, and the site."""

import ast
import dataclasses
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import yaml

import sdpo_trl
from sdpo_trl import SDPOConfig, health
from sdpo_trl.agent_metrics import ROLLOUT_METRICS
from sdpo_trl.metrics import BATCH_METRICS, TOKEN_METRICS

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
from trl import GRPOConfig
from trl.experimental.sdpo import SDPOConfig as TRLConfig

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def page(name):
    return (DOCS / name).read_text(encoding="utf-8")


def defaults(config):
    return {
        f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        for f in dataclasses.fields(config)
    }


# Options

OURS, TRLS, GRPOS = defaults(SDPOConfig), defaults(TRLConfig), defaults(GRPOConfig)
TEMPLATES = ("reprompt_template", "solution_template", "feedback_template")


def option_rows():
    """`name: (default, paper, TRL, last)`; each cell as it stands."""
    rows = {}
    for line in page("options.md").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            name = cells[0].strip("`")
            assert name not in rows, f"`{name}` has two rows"
            rows[name] = cells[1:]
    return rows


def same(cell, value):
    """Whether the first code of a cell is `value`, in Python's notation, and text as it is."""
    code = re.match(r"`([^`]*)`", cell)
    if code is None:
        return False
    return code[1] == value if isinstance(value, str) else ast.literal_eval(code[1]) == value


def test_the_table_of_options_has_every_option_with_its_default_and_trls():
    rows = option_rows()
    assert not OURS.keys() - GRPOS.keys() - rows.keys(), "options without a row in docs/options.md"
    assert not rows.keys() - OURS.keys(), "rows of docs/options.md for options that do not exist"
    for name, (default, _, trl, _) in rows.items():
        if name in TEMPLATES:
            assert default == trl == "Table 2" and OURS[name] == TRLS[name]
            continue
        assert same(default, OURS[name]), f"`{name}` defaults to {OURS[name]!r}; docs/options.md says {default}"
        if name in TRLS:
            assert same(trl, TRLS[name]), f"TRL's `{name}` defaults to {TRLS[name]!r}; docs/options.md says {trl}"
        else:
            assert "`" not in trl, f"TRL's SDPOConfig has no `{name}`"


def test_what_it_says_about_whom_a_default_follows():
    for name, (default, paper, trl, follows) in option_rows().items():
        if name in TRLS and name not in TEMPLATES and re.fullmatch(r"[PRT, ]+", follows):
            assert ("T" in follows) == (OURS[name] == TRLS[name]), name
        if re.fullmatch(r"[\d.e-]+", paper) and re.fullmatch(r"[PRT, ]+", follows):
            assert ("P" in follows) == (float(paper) == float(OURS[name])), (name, default, trl)


def test_options_that_differ_from_trl_are_all_in_the_table():
    assert {name for name in TRLS if name in OURS and OURS[name] != TRLS[name]} <= option_rows().keys()


# Logs


def test_every_metric_is_explained():
    text = page("logs.md")
    for name in (*BATCH_METRICS, *TOKEN_METRICS, "distillation_weight", "teacher_distance", "gain"):
        assert f"`sdpo/{name}`" in text, f"`sdpo/{name}` is not in docs/logs.md"
    assert all(f"`sdpo/{name}`" in page("agents.md") for name in ROLLOUT_METRICS)


# Warnings


def sections(text):
    """Text below each third-level heading, by heading."""
    parts = re.split(r"^#{2,3} (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def flat(text):
    return " ".join(re.sub(r"^> ?", "", text, flags=re.MULTILINE).split())


def remedies(message):
    """The options that a warning tells to change."""
    return [name for name in re.findall(r"`(\w+)", message) if name in OURS]


@pytest.mark.parametrize("name", [*health._MESSAGES, "teacher_falling"])
def test_every_health_warning_has_its_section_with_its_text_and_remedies(name):
    message = health._MESSAGES.get(name, health._TEACHER_FALLING)
    first = "losing the ability that it is taught with." if name == "teacher_falling" else message.split(". ")[0]
    own = [text for text in sections(page("troubleshooting.md")).values() if first in flat(text)]
    assert len(own) == 1, f"docs/troubleshooting.md has {len(own)} sections that quote {first!r}"
    missing = [option for option in remedies(message) if option not in own[0]]
    assert not missing, f"the section on {first!r} does not mention {missing}"
    assert "*Do*" in own[0] and "*Seen by*" in own[0]


def logged_texts():
    """`(file, its fixed parts)` of every text that the package warns with, outside of health.py."""
    for path in sorted((ROOT / "sdpo_trl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) in ("logger.warning", "warnings.warn")):
                continue
            text = node.args[0]
            parts = text.values if isinstance(text, ast.JoinedStr) else [text]
            fixed = [p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)]
            pieces = [piece for part in fixed for piece in re.split(r"%\w", part) if piece.strip()]
            if pieces:
                yield path.name, pieces


def test_every_other_warning_is_in_the_table():
    text = re.sub(r"[\"`]", "", flat(sections(page("troubleshooting.md"))["Other warnings"]))
    found = list(logged_texts())
    assert len(found) >= 12
    for file, pieces in found:
        words = [re.sub(r"[\"`]", "", piece).split() for piece in pieces]
        quoted = any(" ".join(part[i : i + 3]) in text for part in words for i in range(len(part) - 2))
        assert quoted, f"{file} warns {pieces}: add a row to the table of docs/troubleshooting.md"


# Links


def test_the_links_of_the_readme_lead_somewhere():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
    assert len(links) > 15
    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []


def test_a_newcomer_reads_the_readme_in_five_minutes():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 130 and len(text.split()) <= 1250
    assert text.count("<!-- test-command -->") == 1


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    first = set(re.findall(r"\]\(([\w/]+\.md)\)", page("index.md")))
    assert first == listed - {"index.md"}, "docs/index.md leads to every page"


# The site


def public_names():
    packages = [sdpo_trl]
    for found in pkgutil.iter_modules(sdpo_trl.__path__, "sdpo_trl."):
        if found.ispkg:
            packages.append(importlib.import_module(found.name))
    return [f"{package.__name__}.{name}" for package in packages for name in package.__all__]


def build(folder):
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built strictly in a folder of its own: a broken link ends it."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("docs", "sdpo_trl"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    built = build(folder)
    assert built.returncode == 0, (built.stdout + built.stderr)[-3000:]
    return folder / "site"


def inventory(site):
    """The names that pages document, from the file that other projects' sites link by."""
    header, _, packed = (site / "objects.inv").read_bytes().partition(b"using zlib.\n")
    assert header.startswith(b"# Sphinx inventory version 2")
    return {line.split(" ")[0]: line.split(" ")[3] for line in zlib.decompress(packed).decode().splitlines()}


def test_every_public_name_is_on_a_page(site):
    shown = inventory(site)
    missing = [name for name in public_names() if name not in shown]
    assert not missing, f"on no page of docs/reference: {missing}. Add `::: NAME` to one that mkdocs.yml lists."
    for name in public_names():
        file, _, anchor = shown[name].partition("#")
        assert f'id="{name if anchor == "$" else anchor}"' in (site / file).read_text(encoding="utf-8")


def test_every_option_is_described_on_the_page_of_options(site):
    text = (site / "reference" / "config.html").read_text(encoding="utf-8")
    for name in OURS.keys() - GRPOS.keys():
        assert re.search(rf'<a id="sdpo_trl\.[\w.]+\.{name}"></a><strong>[\w, ]*{name}', text), name


def test_docstrings_become_lists_and_links(site):
    text = (site / "reference" / "trainer.html").read_text(encoding="utf-8")
    article = text[text.index("<article") : text.index("</article")]
    assert "<strong>feedback_func</strong> (<code>Callable</code>, <em>optional</em>)" in article
    assert re.search(r'<a [^>]*href="config\.html#sdpo_trl\.SDPOConfig"[^>]*><code>SDPOConfig</code>', article)
    for file in (site / "reference").glob("*.html"):
        text = file.read_text(encoding="utf-8")
        shown = re.sub(r"<[^>]+>", "", text[text.index("<article") : text.index("</article")])
        left = re.search(r"\n\s*(Args|Raises|Returns|Parameters):\s*\n|\[`|&gt; Param|:::", shown)
        assert left is None, f"{file.name}: {shown[left.start() - 100 : left.end() + 100]}"


def test_what_a_function_returns_is_one_paragraph(site):
    text = (site / "reference" / "kernel.html").read_text(encoding="utf-8")
    returned = re.findall(r"<strong>Returns</strong></p>\s*<p>(.*?)</p>", text, re.DOTALL)
    assert [words.endswith("gradient.") for words in returned] == [True, True]


def test_every_module_says_what_it_is(site):
    text = (site / "reference" / "modules.html").read_text(encoding="utf-8")
    for found in pkgutil.walk_packages(sdpo_trl.__path__, "sdpo_trl."):
        assert f"<code>{found.name}</code>" in text, found.name


def test_the_site_fetches_nothing(site):
    for file in site.rglob("*.html"):
        text = file.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="(https?:[^"]+)"', text)
        assert [url for url in loaded if 'rel="canonical"' not in url] == [], file.name


def test_the_configuration_is_yaml_that_any_tool_reads():
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text())["docs_dir"] == "docs"


def test_the_site_is_refused_with_a_broken_link(site):
    logs = site.parent / "docs" / "logs.md"
    whole = logs.read_text()
    try:
        logs.write_text(f"{whole}\n[nowhere](nowhere.md) [there](options.md#nowhere) [name][sdpo_trl.Nothing]\n")
        built = build(site.parent)
    finally:
        logs.write_text(whole)
    assert built.returncode != 0
    for said in ("page does not exist", "anchor does not exist", "unresolved autoref", "3 issues"):
        assert said in built.stdout + built.stderr


def test_the_vllm_command_collects_its_own_tests_alone():
    """Other tests import what its environment does not have, and pytest runs nothing if one cannot be imported."""
    command = page("scaling.md").partition("<!-- vllm-command -->\n```bash\n")[2].partition("```")[0]
    file = re.search(r"-m vllm (\S+)\n", command)[1]
    text = (ROOT / file).read_text(encoding="utf-8")
    assert "pytest.mark.vllm" in text
    assert [line.strip() for line in command.splitlines()] == [
        line.strip() for line in text.splitlines() if ".venv-vllm" in line
    ]
    others = {"pyte", "nbformat", "nbclient", "rich", "prompt_toolkit", "matplotlib", "selenium"}
    imported = {name.split(".")[0] for name in re.findall(r"^(?:from|import) (\S+)", text, re.MULTILINE)}
    assert not imported & others
