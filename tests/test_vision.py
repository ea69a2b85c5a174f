"""A tiny LLaVA with a processor built in code: what holds for text holds with images."""

import pytest
import tiny
import torch
from datasets import Dataset
from PIL import Image
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from sdpo_trl.report import TokenHeatmapCallback

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for b in m['content'] %}{% if b['type'] == 'image' %}<image>{% else %}{{ b['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def vision_trainer(folder, reward=None, images=True, placed=False, **options):
    tokenizer = tiny.build_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]}, replace_extra_special_tokens=False)
    tokenizer.chat_template = TEMPLATE
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}), tokenizer,
        patch_size=8, vision_feature_select_strategy="default", chat_template=TEMPLATE, image_token="<image>",
        num_additional_image_tokens=1,
    )  # fmt: skip
    torch.manual_seed(0)
    text = LlamaConfig(
        vocab_size=len(tokenizer) + 3, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024, pad_token_id=0, eos_token_id=1,
        bos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8,
        projection_dim=16,
    )  # fmt: skip
    model = LlavaForConditionalGeneration(LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=4, vision_feature_select_strategy="default", pad_token_id=0, attn_implementation="eager",
    ))  # fmt: skip
    rows = {"prompt": [[{"role": "user", "content": f"what {i}" + "x" * i}] for i in range(4)]}
    if images:  # "alternate": every other row has none
        pictures = [Image.new("RGB", (16, 16), ((i * 67) % 255, 31 * i, 20)) for i in range(4)]
        rows["images"] = [[] if images == "alternate" and i % 2 else [x] for i, x in enumerate(pictures)]
    if placed:  # where the image goes is said, as in TRL's documentation
        image = {"type": "image"}
        texts = [{"type": "text", "text": message["content"]} for (message,) in rows["prompt"]]
        rows["prompt"] = [[{"role": "user", "content": [text, image]}] for text in texts]
    data = Dataset.from_dict(rows)
    return tiny.trainer(
        folder, reward or tiny.telling(), model=model, data=data, trainer_processing_class=processor, **options
    )


def losses(trainer):
    trainer.train()
    return [(row["loss"], row["grad_norm"]) for row in tiny.training_logs(trainer)]


@pytest.mark.parametrize("kind", ["live", "ema", "trust_region"])
def test_fused_equals_reference_with_images(tmp_path, kind):
    runs = [
        losses(vision_trainer(tmp_path, teacher_model_kind=kind, distillation_impl=name))
        for name in ("fused", "reference")
    ]
    assert runs[0][0][0] > 0
    torch.testing.assert_close(torch.tensor(runs[0]), torch.tensor(runs[1]), rtol=1e-4, atol=1e-5)


def test_the_teacher_sees_the_image_and_the_feedback(tmp_path):
    trainer = vision_trainer(tmp_path)
    (batch, *_) = tiny.micro_batches(trainer)
    image = trainer._tokenizer.convert_tokens_to_ids("<image>")
    counts = (batch["teacher_prompt_ids"] == image).sum(1)
    assert counts.tolist() == (batch["prompt_ids"] == image).sum(1).tolist() and counts.min() == 4
    assert "wrong, try again" in trainer._tokenizer.decode(batch["teacher_prompt_ids"][0])


@pytest.mark.parametrize("placement", ["last_user", "append"])
def test_prompts_that_say_where_their_image_goes(tmp_path, placement):
    trainer = vision_trainer(tmp_path, placed=True, reprompt_placement=placement)
    (batch, *_) = tiny.micro_batches(trainer)
    image = trainer._tokenizer.convert_tokens_to_ids("<image>")
    assert (batch["teacher_prompt_ids"] == image).sum(1).tolist() == [4] * 8


def test_long_feedback_is_cut_with_images_too(tmp_path):
    trainer = vision_trainer(tmp_path, tiny.telling("wrong " * 80), max_reprompt_len=250, max_steps=1)
    trainer.train()
    assert tiny.training_logs(trainer)[0]["sdpo/shortened_share"] == 1.0


def test_rows_without_feedback_change_nothing_with_images(tmp_path):
    def half(completions, log_extra, **columns):
        log_extra("feedback", ["hm" if i % 2 else None for i in range(len(completions))])
        return [0.0] * len(completions)

    whole = losses(vision_trainer(tmp_path, half, max_steps=1))
    parts = losses(
        vision_trainer(tmp_path, half, max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    )
    torch.testing.assert_close(torch.tensor(whole), torch.tensor(parts), rtol=1e-4, atol=1e-5)


def test_a_text_only_batch_of_a_vision_model(tmp_path):
    assert losses(vision_trainer(tmp_path, images=False))[0][0] > 0


def test_a_heat_map_of_rollouts_with_images(tmp_path):
    runs = []
    for folder, callbacks in (("with", [TokenHeatmapCallback(every=1, rollouts=2)]), ("without", [])):
        runs.append(losses(vision_trainer(tmp_path / folder, trainer_callbacks=callbacks)))
    assert runs[0] == runs[1]
    page = (tmp_path / "with" / "heatmaps" / "step_000001.html").read_text(encoding="utf-8")
    assert page.count('class="answer"') == 2 and "&lt;image&gt;" in page and 'class="t s ' in page
