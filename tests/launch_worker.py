"""
A training script for test_launch.py: two steps of a tiny model, under whatever `accelerate launch` has set up.

`accelerate launch --config_file FILE ... tests/launch_worker.py FOLDER`; each process writes how it ran. Without GPUs,
FSDP and DeepSpeed are told that they may run on CPUs, as in matrix_worker.py.
"""

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import tiny  # noqa: E402
import torch  # noqa: E402
from matrix_worker import shard_on_the_cpu  # noqa: E402


def main(folder: Path) -> None:
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    if not torch.cuda.is_available():
        shard_on_the_cpu()
        if deepspeed:
            import deepspeed as engine

            engine.init_distributed("gloo")
    options = {"bf16": os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16", "use_cpu": not deepspeed}
    trainer = tiny.trainer(folder / "run", tiny.telling(), per_device_train_batch_size=4, **options)
    trainer.train()
    trainer.save_model(str(folder / "model"))
    state = trainer.accelerator.state
    seen = {
        "type": state.distributed_type.value,
        "processes": trainer.accelerator.num_processes,
        "stage": state.deepspeed_plugin.zero_stage if state.deepspeed_plugin else None,
        "fsdp": trainer.accelerator.is_fsdp2,
        "precision": trainer.accelerator.mixed_precision,
        "losses": [row["loss"] for row in tiny.training_logs(trainer)],
    }
    (folder / f"seen-{trainer.accelerator.process_index}.json").write_text(json.dumps(seen))
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
