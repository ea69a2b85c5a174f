"""The matrix of matrix.py: a quick core of it in the normal run, all of it with `-m slow`."""

import matrix
import pytest
import torch
from benchmarks import scaling
from test_scaling import tiny_sizes

pytestmark = pytest.mark.distributed

CORE = ["ddp-lora-ema", "fsdp2-full-ema", "fsdp2-lora-ema", "fsdp2-full-trust_region"]


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    folder = tmp_path_factory.mktemp("core")
    return folder, matrix.run(folder, CORE, timeout=120)


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    folder = tmp_path_factory.mktemp("matrix")
    return folder, matrix.run(folder, matrix.CELLS, timeout=3600)


def assert_passes(run, cell):
    folder, broken = run
    if cell.startswith("zero") and not matrix.has_deepspeed():
        pytest.skip(matrix.SKIPPED)
    assert cell not in broken, broken[cell][-6000:]
    assert matrix.failures(folder, cell) == []


@pytest.mark.parametrize("cell", CORE)
def test_a_core_of_the_matrix(core, cell):
    assert_passes(core, cell)


@pytest.mark.parametrize("cell", CORE)
def test_a_teachers_part_has_the_size_that_the_documentation_says(core, cell):
    folder, _ = core
    backend, way, kind = cell.split("-")
    each = scaling.Bytes(frozen=4, weight=4)
    expected = scaling.kept(kind, tiny_sizes(way == "lora"), each, {"fsdp2": "zero3"}.get(backend, backend), gpus=2)
    for rank in range(2):
        result = torch.load(folder / cell / f"result-{rank}.pt", weights_only=False)
        assert sum(result["straight"]["bytes"].values()) == expected


@pytest.mark.slow
@pytest.mark.parametrize("cell", matrix.CELLS)
def test_the_whole_matrix(everything, cell):
    assert_passes(everything, cell)


def test_without_deepspeed_its_cells_are_skipped_with_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix, "has_deepspeed", lambda: False)
    with pytest.raises(pytest.skip.Exception, match="deepspeed is not installed"):
        assert_passes((tmp_path, {}), "zero3-full-ema")
