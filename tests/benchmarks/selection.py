"""`select_feedback` at 1e3 to 1e7 attempts, groups of 8 in random order.

python tests/benchmarks/selection.py [--out FOLDER]
"""

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import measure  # noqa: E402
import torch  # noqa: E402

from sdpo_trl import select_feedback  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    options = parser.parse_args()
    measure.prepare()
    rows = []
    for count in (10**3, 10**4, 10**5, 10**6, 10**7):
        questions = torch.randint(-(2**62), 2**62, (count // 8 + 1,)).repeat_interleave(8)[torch.randperm(count)]
        success, rich = torch.rand(count) < 0.3, torch.rand(count) < 0.5
        times = measure.interleave(
            {
                "own": lambda q=questions, s=success, r=rich: select_feedback(q, s, r),
                "other": lambda q=questions, s=success, r=rich: select_feedback(q, s, r, exclude_self=True),
            },
            3,
        )
        rows.append({"attempts": count, "seconds": times["own"], "seconds, exclude_self": times["other"]})
    measure.publish("selection", rows, options.out)


if __name__ == "__main__":
    main()
