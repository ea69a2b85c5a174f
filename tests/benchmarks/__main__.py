"""All benchmarks, one after the other: `python tests/benchmarks [--quick] [--out FOLDER]`. The machine must be idle.

`--quick` (about 15 minutes) measures what docs/speed.md quotes of the loss and the step; in full it takes hours.
"""

import argparse
import subprocess
import sys
from pathlib import Path

QUICK = {"loss": ["--quick"], "step": ["--lengths", "64", "--shared"], "teacher": [], "selection": []}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", default="runs/benchmarks")
    options = parser.parse_args()
    for name, arguments in QUICK.items():
        script = Path(__file__).with_name(f"{name}.py")
        given = [*(arguments if options.quick else []), "--out", options.out]
        subprocess.run([sys.executable, str(script), *given], check=True)


if __name__ == "__main__":
    main()
