"""SDPO on multiple-choice questions (paper, section 3), with any chat model of the Hub or of a local folder.

    accelerate launch --config_file accelerate_configs/ddp.yaml examples/train_mcq.py \\
        --model_name_or_path Qwen/Qwen3-8B --dataset_name questions.jsonl --output_dir out --use_peft \\
        --distillation_mode topk_logits --distillation_topk 100 --learning_rate 1e-5 --num_generations 8 \\
        --max_completion_length 8192 --chat_template_kwargs '{"enable_thinking": false}'

Each row has `prompt` (text), `answer` (its letter) and perhaps `system` (text; null or "None" is no system turn). The
reward is 1 for the right letter in the answer tag. The feedback says what was wrong with the format, never the answer:
what the letter should have been, the teacher learns only from a sibling that was right. More options: SDPOConfig and
trl.ModelConfig. A small model to try it on: `examples/get_smollm2.py`.
"""

from dataclasses import dataclass, field

from datasets import Dataset, load_dataset
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from sdpo_trl import SDPOConfig, SDPOTrainer

LETTERS = ("A", "B", "C", "D")
ASK = "Write the letter of your choice, A, B, C or D, once and alone between <answer> and </answer>."


@dataclass
class DataArguments:
    dataset_name: str = field(metadata={"help": "A Hub id, or a local .json or .jsonl file (its one split is train)."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub dataset."})
    dataset_train_split: str = field(default="train", metadata={"help": "Rows to train on, such as train[:100]."})
    dataset_test_split: str = field(default="test", metadata={"help": "Rows to evaluate, read if eval_strategy is."})


def load_questions(name: str, config: str | None, split: str) -> Dataset:
    """Chat prompts and answers, `{"prompt": [messages], "answer": letter}`; the texts pass through unchanged."""
    source = {"path": "json", "data_files": name} if name.endswith((".json", ".jsonl")) else {"path": name}
    rows = load_dataset(**source, name=config, split=split)
    return rows.map(to_chat, remove_columns=rows.column_names)


def to_chat(row: dict) -> dict:
    if row["answer"] not in LETTERS:
        raise ValueError(f"`answer` must be A, B, C or D, got {row['answer']!r} in the row {row['prompt'][:60]!r}.")
    system = row.get("system")
    turns = [] if system in (None, "None") else [{"role": "system", "content": system}]
    return {"prompt": [*turns, {"role": "user", "content": row["prompt"]}], "answer": row["answer"]}


def read_letter(text: str) -> tuple[str | None, str | None]:
    """The letter in the answer tag, or what is wrong with the format; the other one is `None`."""
    if "<answer>" not in text:
        return None, f"There is no <answer> tag. {ASK}"
    if text.count("<answer>") > 1 or text.count("</answer>") > 1:
        return None, f"There is more than one <answer> tag. {ASK}"
    content, end, _ = text.partition("<answer>")[2].partition("</answer>")
    if not end:
        return None, f"The <answer> tag is not closed by </answer> after it. {ASK}"
    letter = content.strip()
    if len(letter) != 1:
        return None, f"The <answer> tag holds {'more than a letter' if letter else 'nothing'}. {ASK}"
    return (letter, None) if letter in LETTERS else (None, f"The <answer> tag holds none of A, B, C and D. {ASK}")


def right_letter(completions, answer, log_extra, log_metric, **columns) -> list[float]:
    """The reward, with the feedback beside it."""
    read = [read_letter(completion[-1]["content"]) for completion in completions]
    log_extra("feedback", [problem for _, problem in read])
    log_metric("well_formed", sum(letter is not None for letter, _ in read) / len(read))
    return [float(letter == right) for (letter, _), right in zip(read, answer, strict=True)]


def main(argv: list[str] | None = None) -> SDPOTrainer:
    data, args, model = TrlParser((DataArguments, SDPOConfig, ModelConfig)).parse_args_and_config(argv)
    if model.model_name_or_path is None:
        raise ValueError("Name the model: `--model_name_or_path` is a Hub id or a folder.")
    args.model_init_kwargs = {
        "revision": model.model_revision,
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
        **(args.model_init_kwargs or {}),
    }
    source = (data.dataset_name, data.dataset_config)
    trainer = SDPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=right_letter,
        args=args,
        train_dataset=load_questions(*source, data.dataset_train_split),
        eval_dataset=load_questions(*source, data.dataset_test_split) if args.eval_strategy != "no" else None,
        peft_config=get_peft_config(model),
        quantization_config=get_quantization_config(model),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=data.dataset_name)
    trainer.accelerator.end_training()
    return trainer


if __name__ == "__main__":
    main()
