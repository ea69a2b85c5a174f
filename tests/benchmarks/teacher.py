"""The teacher's pass over rows that share a prefix, against one row at a time: time and largest difference.

python tests/benchmarks/teacher.py [--out FOLDER]
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

import measure  # noqa: E402
import models  # noqa: E402
import torch  # noqa: E402

from sdpo_trl.batches import take_rows, trim_padding  # noqa: E402
from sdpo_trl.teacher import evaluation_mode  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    measure.prepare()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = models.ours(folder, models.smollm(), beta=0.0)
        runner = trainer._teacher_pass
        everything = torch.arange(8)
        for length in (64, 256):
            batch = models.batch(prompt=32, teacher_prompt=512, length=length, shared=True)
            plan = runner._plan(batch, everything)

            def alone(batch=batch):
                parts = [trim_padding(take_rows(batch, torch.tensor([row]))) for row in range(8)]
                return torch.cat([runner._plain_hidden(trainer.model, part, torch.tensor([0])) for part in parts])

            def together(batch=batch):
                return runner._plain_hidden(trainer.model, batch, everything)

            def shared(batch=batch, plan=plan):
                return runner._shared_hidden(trainer.model, batch, everything, plan)

            with evaluation_mode(trainer.model):
                times = measure.interleave({"shared": shared, "one by one": alone, "batch": together}, options.rounds)
                difference = (shared() - alone()).abs().max().item() / alone().abs().max().item()
            rows.append({
                "answer tokens": length, "prefix": 512, "shared_s": times["shared"],
                "/one by one": times["shared"] / times["one by one"], "/batch": times["shared"] / times["batch"],
                "largest relative difference": difference,
            })  # fmt: skip
    measure.publish("teacher", rows, options.out)


if __name__ == "__main__":
    main()
