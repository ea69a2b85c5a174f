"""Adapters beyond the plain one: on a 4-bit base (QLoRA), and beside others in one model."""

import copy
import importlib.util
import re

import pytest
import tiny
import torch
import torch.nn.functional as F
from huggingface_hub import ModelCard
from peft import AdaptionPromptConfig, PeftModel, PrefixTuningConfig, PromptEncoderConfig, get_peft_model
from safetensors import safe_open
from torch import nn
from transformers import BitsAndBytesConfig

from sdpo_trl.adapters import show_bias
from sdpo_trl.weight_sync import MergedView

KINDS = {
    "live": {},
    "base": {},
    "ema": {"teacher_update_rate": 0.3},
    "snapshot": {"teacher_sync_steps": 2},
    "trust_region": {"teacher_mix": 0.3},
}
ANSWERS = ["ab$", "abc$", "x", "hello$", "abcde$", "a$", "xyz", "qrs$"]
has_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed (extra `qlora`)"
)


class Packed(nn.Linear):
    """A linear layer like bitsandbytes' `Linear4bit`: a frozen uint8 weight, two values a byte, dequantized to use."""

    def __init__(self, plain):
        super().__init__(plain.in_features, plain.out_features, bias=False, device="meta")
        weight = plain.weight.detach()
        scale = weight.abs().max() / 7
        self.register_buffer("scale", scale)
        levels = (weight / scale).round().clamp(-7, 7).to(torch.int8) + 8
        packed = (levels[:, ::2] * 16 + levels[:, 1::2]).to(torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def plain(self):
        levels = torch.stack([self.weight >> 4, self.weight & 15], dim=-1).flatten(1).float()
        return (levels - 8) * self.scale

    def forward(self, x):
        return F.linear(x, self.plain().to(x.dtype))


def packed():
    """The tiny model with packed layers, and its twin with the values that they stand for."""
    model, twin = tiny.build_model(), tiny.build_model()
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, Packed(layer))
            twin.get_submodule(name).weight.data = model.get_submodule(name).plain()
    for p in model.parameters():
        p.requires_grad_(False)
    model.is_loaded_in_4bit = True
    return model, twin


def make(folder, kind, model, **options):
    return tiny.trainer(
        folder, tiny.telling(), model=model, teacher_model_kind=kind, trainer_rollout_func=tiny.scripted(ANSWERS),
        **{"learning_rate": 0.05, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, **KINDS[kind], **options},
    )  # fmt: skip


def frozen(model):
    return {n: (p.data.clone(), dict(vars(p))) for n, p in model.named_parameters() if not p.requires_grad}


def assert_frozen(model, before):
    for name, p in model.named_parameters():
        if not p.requires_grad:
            assert torch.equal(p.data, before[name][0]) and vars(p) == before[name][1], name


def check_training(folder, kind, build, **options):
    """Four steps: only the adapter moves, its teacher is right, the checkpoint continues exactly, the export is it."""
    trainer = make(folder / "straight", kind, build(), **options)
    before, start = frozen(trainer.model), tiny.trained(trainer.model)
    assert start and all("lora_" in name and p.dtype == torch.bfloat16 for name, p in start.items())  # TRL's QLoRA
    assert any(p.dtype == torch.uint8 for p, _ in before.values())
    stores = trainer._stores
    for store in stores.values():
        assert store._values.keys() == start.keys()
    trainer.train()
    assert all(row["loss"] > 0 for row in tiny.training_logs(trainer))
    assert_frozen(trainer.model, before)
    end = tiny.trained(trainer.model)
    assert any(not torch.equal(end[name], value) for name, value in start.items())
    for key, store in stores.items():
        moved = any(not torch.equal(value.to(start[name].dtype), start[name]) for name, value in store._values.items())
        assert moved == (key == "teacher")
        dtype = torch.float32 if kind == "ema" else torch.bfloat16
        assert {value.dtype for value in store._values.values()} == {dtype}
    resumed = make(folder / "resumed", kind, build(), **options)
    resumed.train(resume_from_checkpoint=str(folder / "straight" / "checkpoint-2"))
    tiny.assert_equal(tiny.trained(resumed.model), end)
    for key, store in stores.items():
        tiny.assert_equal(resumed._stores[key]._values, store._values)
    trainer.save_model(str(folder / "export"))
    with safe_open(folder / "export" / "adapter_model.safetensors", framework="pt") as file:
        assert len(file.keys()) == len(end)
    return trainer


@pytest.mark.parametrize("kind", KINDS)
def test_qlora_with_a_stub_of_a_packed_base(tmp_path, kind):
    trainer = check_training(tmp_path, kind, lambda: packed()[0], trainer_peft_config=tiny.lora())
    assert isinstance(trainer.model.base_model.model.model.layers[0].self_attn.q_proj.base_layer, Packed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_base_gives_the_loss_of_the_values_that_it_stands_for(tmp_path, kind):
    found = []
    for model in packed():
        model.is_loaded_in_4bit = True  # TRL then casts both adapters
        trainer = make(tmp_path, kind, model, trainer_peft_config=tiny.lora())
        tiny.shift(trainer.model, 0.1)
        inputs = tiny.micro_batches(trainer)[0]
        found.append(tiny.gradient(trainer, inputs))
    (loss, slope), (truth, expected) = found
    assert loss == pytest.approx(truth, rel=1e-5) and loss > 1e-3
    tiny.assert_near(slope, {name: expected[name] for name in slope}, 1e-2)  # bfloat16


def bits_and_bytes(folder, **options):
    """The tiny model, loaded in 4 bit by transformers; layers of at least one block of 64."""
    tiny.build_model(hidden_size=64, intermediate_size=128, num_key_value_heads=4).save_pretrained(folder / "base")
    tiny.build_tokenizer().save_pretrained(folder / "base")
    return {
        "trainer_peft_config": tiny.lora(**options),
        "trainer_quantization_config": BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        ),
    }


@has_bitsandbytes
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_qlora_with_bitsandbytes_on_a_cpu(tmp_path, kind):
    options = bits_and_bytes(tmp_path)
    trainer = check_training(tmp_path, kind, lambda: str(tmp_path / "base"), **options)
    assert type(trainer.model.base_model.model.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"


@has_bitsandbytes
@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_qlora_with_bitsandbytes_on_a_gpu(tmp_path, kind):
    options = {**bits_and_bytes(tmp_path), "use_cpu": False, "bf16": True}
    trainer = check_training(tmp_path, kind, lambda: str(tmp_path / "base"), **options)
    assert trainer.model.device.type == "cuda"


@has_bitsandbytes
@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True])
def test_a_4_bit_base_is_sent_merged_and_stays_as_it_was(tmp_path, dora):
    """PEFT's merge into 4 bit and back rounds twice; here the base is not touched."""
    options = bits_and_bytes(tmp_path, use_dora=dora)
    trainer = make(tmp_path, "live", str(tmp_path / "base"), **options)
    tiny.shift(trainer.model, 0.3)
    before = frozen(trainer.model)
    sent = dict(MergedView(trainer.model).named_parameters())
    assert_frozen(trainer.model, before)
    merged = dict(copy.deepcopy(trainer.model).merge_and_unload().named_parameters())
    assert sent.keys() == merged.keys()
    for name, value in merged.items():
        assert torch.equal(sent[name], value), name
    name = "model.layers.0.self_attn.q_proj.weight"
    assert sent[name].dtype == torch.uint8 and not torch.equal(sent[name], before_of(before, name))


def before_of(before, name):
    return next(
        value for key, (value, _) in before.items() if key.endswith(name.replace(".weight", ".base_layer.weight"))
    )


# Several adapters in one model


def with_others():
    """Three adapters; the one called `mine` is active, all change the outputs."""
    model = get_peft_model(tiny.build_model(), tiny.lora(), adapter_name="other")
    model.add_adapter("mine", tiny.lora(r=2, target_modules=["q_proj", "o_proj"]))
    model.add_adapter("third", tiny.lora())
    generator = torch.Generator().manual_seed(4)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = 0.3 * torch.randn(p.shape, generator=generator)
    model.set_adapter("mine")
    return model


@pytest.mark.parametrize("kind", ["ema", "trust_region"])
def test_only_the_active_adapter_trains_teaches_and_is_exported(tmp_path, kind):
    trainer = make(tmp_path / "run", kind, with_others(), beta=0.1)
    others = {n: p.clone() for n, p in trainer.model.named_parameters() if "mine" not in n}
    start = tiny.trained(trainer.model)
    assert start and all(".mine." in name for name in start)
    initial = trainer._stores["initial_policy"]
    trainer.train()
    for name, p in trainer.model.named_parameters():
        if name in others:
            assert torch.equal(p, others[name]) and not p.requires_grad, name
    assert trainer.model.active_adapters == ["mine"]
    tiny.assert_equal(initial._values, start)  # the reference is the adapter as it was handed over, not the bare base
    assert all(store._values.keys() == start.keys() for store in trainer._stores.values())
    trainer.save_model(str(tmp_path / "export"))
    weights = sorted(
        path.relative_to(tmp_path / "export").as_posix() for path in tmp_path.glob("export/**/*.safetensors")
    )
    assert weights == ["mine/adapter_model.safetensors"]
    again = PeftModel.from_pretrained(tiny.build_model(), tmp_path / "export" / "mine", is_trainable=True)
    loaded = {name.replace(".default.", ".mine."): value for name, value in tiny.trained(again).items()}
    tiny.assert_equal(loaded, tiny.trained(trainer.model))
    resumed = make(tmp_path / "resumed", kind, with_others(), beta=0.1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    tiny.assert_equal(tiny.trained(resumed.model), tiny.trained(trainer.model))


@pytest.mark.parametrize("kind", KINDS)
def test_the_others_change_no_loss(tmp_path, kind):
    """The same as a model that has this adapter alone."""
    alone = with_others()
    for name in ("other", "third"):
        alone.delete_adapter(name)
    found = []
    for model in (with_others(), alone):
        trainer = make(tmp_path, kind, model, beta=0.1)
        tiny.shift(trainer.model, 0.1)
        found.append(tiny.gradient(trainer, tiny.micro_batches(trainer)[0]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    tiny.assert_near(found[0][1], found[1][1], 1e-6)


def test_several_active_adapters_are_resumed_together(tmp_path):
    """transformers goes on with the first one alone, and freezes the others."""

    def both():
        model = with_others()
        model.base_model.set_adapter(["mine", "other"])
        return model

    trainer = make(tmp_path / "run", "ema", both())
    trainer.train()
    resumed = make(tmp_path / "resumed", "ema", both())
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    end = tiny.trained(trainer.model)
    assert {name.split(".")[-2] for name in end} == {"mine", "other"}
    tiny.assert_equal(tiny.trained(resumed.model), end)
    tiny.assert_equal(resumed._stores["teacher"]._values, trainer._stores["teacher"]._values)


@pytest.mark.parametrize("name", ["default", "mine", "its own"])
def test_the_card_loads_an_adapter_of_any_name(tmp_path, monkeypatch, name):
    """PEFT writes one that is not called `default` to a folder of its name."""
    monkeypatch.chdir(tmp_path)
    tiny.build_model().save_pretrained("base")
    tiny.build_tokenizer().save_pretrained("base")
    base = tiny.build_model().from_pretrained("base")
    model = get_peft_model(base, tiny.lora(), adapter_name=name)
    tiny.shift(model, 0.3)
    trainer = make(tmp_path / "run", "live", model)
    trainer.save_model("export")
    text = ModelCard.load("export/README.md").text
    names = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], names)
    generator = names["generator"]
    ids = torch.tensor([[8, 9, 3, 11]])
    with torch.no_grad():
        assert torch.allclose(generator.model(ids).logits, trainer.model.eval()(ids).logits, atol=1e-5)
    assert names["output"]["generated_text"] is not None


# What else an adapter may be


def test_tokens_of_tied_embeddings_train_and_come_back(tmp_path):
    """The output head, too, is then a wrapper of PEFT's."""
    options = {"num_iterations": 2, "beta": 0.1, "distillation_weight": 0.5}
    tokens = {"trainable_token_indices": {"embed_tokens": list(range(70, 104))}}

    def build():
        return get_peft_model(tiny.build_model(tie_word_embeddings=True), tiny.lora(**tokens))

    trainer = make(tmp_path / "run", "ema", build(), **options)
    start = tiny.trained(trainer.model)
    trainer.train()
    moved = {name for name, p in tiny.trained(trainer.model).items() if not torch.equal(p, start[name])}
    assert any("trainable_tokens_delta" in name for name in moved)
    resumed = make(tmp_path / "resumed", "ema", build(), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    tiny.assert_equal(tiny.trained(resumed.model), tiny.trained(trainer.model))


def test_a_head_with_trained_tokens_gives_the_loss_of_plain_weights(tmp_path):
    tokens = {"trainable_token_indices": {"embed_tokens": list(range(70, 104))}}
    model = get_peft_model(tiny.build_model(tie_word_embeddings=True), tiny.lora(**tokens))
    tiny.shift(model, 0.1)
    plain = copy.deepcopy(model).merge_and_unload()
    losses = []
    for student in (model, plain.requires_grad_(True)):
        trainer = make(tmp_path, "live", student)
        losses.append(tiny.gradient(trainer, tiny.micro_batches(trainer)[0])[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0] > 1e-3


def test_a_head_with_trained_tokens_is_refused_where_parameters_are_shared():
    model = get_peft_model(
        tiny.build_model(tie_word_embeddings=True), tiny.lora(trainable_token_indices={"embed_tokens": [7]})
    )
    with pytest.raises(NotImplementedError, match=r"under FSDP2 or ZeRO-3.*tie_word_embeddings=False"):
        show_bias(model.get_base_model(), sharded=True)
    show_bias(get_peft_model(tiny.build_model(), tiny.lora()).get_base_model(), sharded=True)


def test_weights_that_change_at_a_token_share_no_prefix(tmp_path):
    """An untrained aLoRA changes nothing yet, so comparing once could not have told."""
    model = get_peft_model(tiny.build_model(), tiny.lora(alora_invocation_tokens=[8]))
    assert not make(tmp_path, "ema", model)._teacher_pass._shares
    assert make(tmp_path, "ema", get_peft_model(tiny.build_model(), tiny.lora()))._teacher_pass._shares


def merged_already():
    model = tiny.trained_adapter()
    model.merge_adapter()
    return model


def partly_unfrozen():
    model = tiny.trained_adapter()
    model.base_model.model.model.norm.weight.requires_grad_(True)
    return model


def with_another_ones_biases():
    model = get_peft_model(tiny.build_model(attention_bias=True), tiny.lora(bias="lora_only"), adapter_name="other")
    model.add_adapter("mine", tiny.lora())
    model.set_adapter("mine")
    return model


REFUSED = {
    "merged": (merged_already, r"is merged into its base.*unmerge_adapter"),
    "norm": (partly_unfrozen, r"norm\.weight' trains \(1 such weights\).*neither a checkpoint.*`modules_to_save`"),
    "biases": (with_another_ones_biases, r"q_proj\.base_layer\.bias' trains \(4 such weights\)"),
    "random": (tiny.lora(init_lora_weights="pissa_niter_4"), r"another one each time.*init_lora_weights='pissa'"),
    "frozen": (tiny.lora(inference_mode=True), r"Nothing in the model trains: leave `inference_mode=False`"),
    "prompts": (AdaptionPromptConfig(adapter_layers=2, adapter_len=4, task_type="CAUSAL_LM"), "Adaption prompts"),
}


@pytest.mark.parametrize("kind", ["live", "ema"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_train_or_not_come_back_is_refused(tmp_path, case, kind):
    adapter, message = REFUSED[case]
    model, config = (adapter(), None) if callable(adapter) else (tiny.build_model(), adapter)
    with pytest.raises(ValueError, match=message):
        make(tmp_path, kind, model, trainer_peft_config=config)


@pytest.mark.parametrize(
    "config",
    [
        PromptEncoderConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        PrefixTuningConfig(num_virtual_tokens=3, prefix_projection=True, task_type="CAUSAL_LM"),
    ],
    ids=["p-tuning", "prefix projection"],
)
def test_prompts_written_by_a_network_are_exported_and_not_resumed(tmp_path, config):
    trainer = make(tmp_path, "ema", tiny.build_model(), trainer_peft_config=config)
    trainer.train()
    trainer.save_model(str(tmp_path / "export"))
    ids = torch.tensor([[8, 9, 3, 11]])
    again = PeftModel.from_pretrained(tiny.build_model(), tmp_path / "export")
    with torch.no_grad():
        assert torch.allclose(again(ids).logits, trainer.model.eval()(ids).logits, atol=1e-5)
    again = make(tmp_path, "ema", tiny.build_model(), trainer_peft_config=config)
    with pytest.raises(ValueError, match=r"cannot be resumed: PEFT saves the prompts that 'prompt_encoder"):
        again.train(resume_from_checkpoint=True)
