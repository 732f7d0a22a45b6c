"""A small BERT, made from its configuration, with Hugging Face's Trainer."""

import argparse
import hashlib
import json

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--patience", type=int, default=50)
options = parser.parse_args()

set_seed(1)
config = BertConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=16,
)
model = BertForSequenceClassification(config)
words = torch.randint(0, 64, (460, 12))
rows = [{"input_ids": row, "labels": int(row[:4].sum() > row[4:8].sum())} for row in words]


def accuracy(predictions):
    found = predictions.predictions.argmax(1) == predictions.label_ids
    return {"accuracy": float(found.mean())}


trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="trained",
        use_cpu=True,
        ddp_backend="gloo",
        disable_tqdm=True,
        report_to=[],
        num_train_epochs=options.epochs,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        warmup_steps=5,
        logging_steps=3,
        eval_strategy="steps",
        eval_steps=6,
        save_strategy="steps",
        save_steps=12,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
    ),
    train_dataset=rows[:400],
    eval_dataset=rows[400:],
    compute_metrics=accuracy,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=options.patience)],
)
trainer.train()
TIMES = ("runtime", "per_second")
history = [
    {name: value for name, value in entry.items() if not name.endswith(TIMES)}
    for entry in trainer.state.log_history
]
digest = hashlib.sha256(json.dumps(history).encode())
for value in model.state_dict().values():
    digest.update(value.numpy().tobytes())
if trainer.is_world_process_zero():
    losses = [entry["loss"] for entry in history if "loss" in entry]
    print(f"{len(losses)} losses, the last is {losses[-1]:.4f}")
    print(f"weights and history {digest.hexdigest()[:12]}", flush=True)
