"""What is refused, kept in host memory, or taken later; that sharded parameters work is shown by test_matrix.py."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType

from sdpo_trl.shards import check_sharding
from sdpo_trl.store import WeightStore

CONFIGS = Path(__file__).parent.parent / "accelerate_configs"


def state(fsdp=None, **zero):
    """What Accelerate knows: FSDP of a version, or DeepSpeed with these options, or neither."""
    if fsdp is not None:
        plugin = SimpleNamespace(fsdp_version=fsdp)
        return SimpleNamespace(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin, deepspeed_plugin=None)
    if not zero:
        return SimpleNamespace(distributed_type=DistributedType.MULTI_GPU, deepspeed_plugin=None)
    plugin = SimpleNamespace(zero_stage=zero["stage"], deepspeed_config={"zero_optimization": zero})
    return SimpleNamespace(distributed_type=DistributedType.DEEPSPEED, deepspeed_plugin=plugin)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fsdp": 2},
        {"stage": 2},
        {"stage": 3},
        {"stage": 3, "offload_param": {"device": "cpu"}, "zero_hpz_partition_size": 1},
    ],
    ids=str,
)
def test_what_runs(options):
    check_sharding(state(**options))


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"fsdp": 1}, "fsdp_version: 2"),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, "offloaded to the CPU"),
        ({"stage": 3, "zero_hpz_partition_size": 8}, "zero_hpz_partition_size"),
        ({"stage": 3, "zero_quantized_weights": True}, "zero_quantized_weights"),
        ({"stage": 3, "zero_quantized_nontrainable_weights": True}, "zero_quantized_nontrainable_weights"),
    ],
    ids=str,
)
def test_what_is_refused_says_what_to_do(options, advice):
    with pytest.raises(NotImplementedError, match=advice):
        check_sharding(state(**options))


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_accelerate_reads_the_configurations(name):
    config = load_config_from_file(str(CONFIGS / name))
    expected = {"fsdp2": "FSDP", "multi_node": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "ddp": "MULTI_GPU"}
    assert config.distributed_type == expected.get(name.removesuffix(".yaml"), "NO")
    text = (CONFIGS / name).read_text()
    assert text.startswith("# ") and f"--config_file accelerate_configs/{name}" in text
    if config.distributed_type == "FSDP":
        assert config.fsdp_config["fsdp_version"] == 2
        assert config.fsdp_config["fsdp_state_dict_type"] == "FULL_STATE_DICT"
    if config.distributed_type == "DEEPSPEED":
        assert config.deepspeed_config["zero_stage"] == int(name[4])


def test_it_is_refused_when_the_trainer_is_made(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("sdpo_trl.trainer.check_sharding", seen.append)
    trainer = tiny.trainer(tmp_path)
    assert seen == [trainer.accelerator.state]


def test_values_may_be_taken_later():
    model = tiny.build_model()
    store = WeightStore(model, deferred=True)
    assert not store._values
    tiny.shift(model)
    expected = tiny.trained(model)
    with store.applied():
        pass
    tiny.shift(model)
    tiny.assert_equal(dict(store.whole()), expected)


@pytest.mark.parametrize("kind", ["base", "ema", "snapshot", "trust_region"])
def test_offloading_changes_no_number(tmp_path, kind):
    extra = {"teacher_sync_steps": 1} if kind == "snapshot" else {}
    runs = []
    for offload in (False, True):
        trainer = tiny.trainer(
            tmp_path, tiny.telling(), teacher_model_kind=kind, teacher_offload=offload, beta=0.1, **extra
        )
        assert all(store._offload == offload for store in trainer._stores.values())
        trainer.train()
        runs.append(trainer)
    tiny.assert_equal(tiny.trained(runs[1].model), tiny.trained(runs[0].model))
    for name, store in runs[0]._stores.items():
        tiny.assert_equal(dict(runs[1]._stores[name].whole()), dict(store.whole()))
    assert tiny.training_logs(runs[1]) == tiny.training_logs(runs[0])


@pytest.mark.gpu
def test_offloaded_values_stay_in_host_memory():
    model = tiny.build_model().cuda()
    store = WeightStore(model, high_precision=True, offload=True)
    own = tiny.trained(model)
    tiny.shift(model)
    store.move(0.5)
    assert {value.device.type for value in store._values.values()} == {"cpu"}
    with store.applied():
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach().cpu(), store._values[name])
            assert not torch.equal(parameter, own[name]) and parameter.is_cuda


def test_offloading_needs_a_teacher_with_values(tmp_path):
    with pytest.raises(ValueError, match="`teacher_offload=True` has no effect"):
        tiny.config(tmp_path, teacher_model_kind="live", teacher_offload=True)
    tiny.config(tmp_path, teacher_model_kind="live", teacher_offload=True, beta=0.1)
    with pytest.raises(ValueError, match="`teacher_offload` has no effect"):
        tiny.trainer(tmp_path, teacher_offload=True, trainer_teacher_model=tiny.build_model(seed=7))


def test_a_file_with_tensors_of_other_shapes_is_refused(tmp_path):
    WeightStore(tiny.build_model()).save(tmp_path / "sdpo_teacher.safetensors")
    with pytest.raises(ValueError, match=r"other tensors.*first 'lm_head\.weight'|other tensors.*embed_tokens"):
        WeightStore(tiny.build_model(vocab_size=128)).load(tmp_path / "sdpo_teacher.safetensors")
