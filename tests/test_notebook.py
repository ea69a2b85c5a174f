"""The notebook: committed without outputs, and executed from its first cell to its last by a kernel of its own."""

import re
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from safetensors import safe_open

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOK = EXAMPLES / "notebook.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """`(notebook, folder)` after all cells ran, in order, in a folder that holds the modules of the task alone."""
    folder = tmp_path_factory.mktemp("notebook")
    for module in ("letters.py", "tiny_llama.py"):
        shutil.copy(EXAMPLES / module, folder)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    return notebook, folder


def cell(notebook, name):
    return next(cell for cell in notebook.cells if cell.id == name)


def printed(notebook, name):
    return "".join(o.text for o in cell(notebook, name).outputs if o.output_type == "stream" and o.name == "stdout")


def test_it_is_committed_clean():
    text = NOTEBOOK.read_text(encoding="utf-8")
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# ")
    for part in notebook.cells:
        assert dict(part.metadata) == {} and part.source.strip()
        if part.cell_type == "code":
            assert part.outputs == [] and part.execution_count is None
    assert text == nbformat.writes(notebook) + "\n"  # as Jupyter writes it: nothing to reformat in a diff


def test_the_rule_is_three_lines():
    lines = cell(nbformat.read(NOTEBOOK, as_version=4), "rule").source.splitlines()
    assert len(lines[lines.index("class OwnTestsFirst(SDPOTrainer):") :]) == 3


def test_every_cell_runs_and_the_student_learns(executed):
    notebook, _ = executed
    assert all(part.execution_count for part in notebook.cells if part.cell_type == "code")
    assert printed(notebook, "reward").startswith("feedback ['f(2)=")
    before, after = map(float, re.search(r"trained names +([\d.]+) +([\d.]+)", printed(notebook, "after")).groups())
    assert before < 0.1 and after > 0.4


def test_it_shows_the_heat_map(executed):
    notebook, folder = executed
    (shown,) = [o for o in cell(notebook, "look").outputs if o.output_type == "execute_result"]
    assert shown.data["text/html"].startswith("<iframe") and "f(2)=" in shown.data["text/html"]
    pages = sorted(path.name for path in (folder / "runs" / "notebook" / "heatmaps").glob("*.html"))
    assert pages == ["step_000001.html", "step_000021.html", "step_000041.html"]
    assert (folder / "runs" / "notebook" / "heatmap.html").stat().st_size > 5_000


def test_the_adapter_is_loaded_back_with_peft(executed):
    notebook, folder = executed
    assert "same logits" in printed(notebook, "save")
    with safe_open(folder / "runs" / "notebook" / "adapter_model.safetensors", "pt") as adapter:
        names = list(adapter.keys())
    assert names and all("lora_" in name and "teacher" not in name for name in names)
