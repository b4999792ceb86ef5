"""Forecasts while TRL trains: one line more for GRPOTrainer, which teaches a tiny model to repeat a word."""

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from scalerl.integrations import ForecastCallback

WORDS = ["<pad>", "<eos>", *(f"w{n}" for n in range(14))]
words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
set_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
)
rows = Dataset.from_list([{"prompt": word, "answer": word} for word in WORDS[2:]])


def accuracy_reward(completions: list[str], answer: list[str], **kwargs: object) -> list[float | None]:
    """1 for the word that was asked for, else 0."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


settings = GRPOConfig(
    **{"output_dir": "out", "max_steps": 30, "save_strategy": "no", "report_to": [], "disable_tqdm": True},
    **{"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True},
    **{"per_device_train_batch_size": 224, "num_generations": 16, "max_completion_length": 1},
    **{"per_device_eval_batch_size": 224, "learning_rate": 1e-2, "use_cpu": True, "bf16": False},
)
callback = ForecastCallback(target=0.7)  # at the end of the training
trainer = GRPOTrainer(
    model,
    accuracy_reward,
    settings,
    train_dataset=rows,
    eval_dataset=rows,
    processing_class=tokenizer,
    callbacks=[callback],
)
trainer.train()
