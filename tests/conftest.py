import os
import sys
from pathlib import Path

# Before anything imports a Hugging Face library.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples")]

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(autouse=True)
def _deterministic():
    """The same random numbers in every test, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def habit(tmp_path_factory):
    """The folder of a tiny chat model that overwrites a file where it should change a line."""
    import online_model

    folder = tmp_path_factory.mktemp("model")
    online_model.save_model(folder / "habit", folder)
    return folder / "habit"
