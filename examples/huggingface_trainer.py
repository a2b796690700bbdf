"""A stock GPT-2 fine-tuned privately with LoRA through ``Trainer``: a posterior over the adapters, nothing downloaded.

The model has random weights and the text is made up: it counts. On yours, load the model with ``from_pretrained`` and give
your dataset. Needs ``pip install 'dpivon[huggingface]'``.
"""

import math

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from dpivon import IVON
from dpivon.integrations.huggingface import PrivateTrainer, token_uncertainty

WORDS, LENGTH = 16, 12


def make_texts(count: int) -> list[dict[str, torch.Tensor]]:
    texts = (torch.randint(WORDS, (count, 1)) + torch.arange(LENGTH)) % WORDS
    return [{"input_ids": text, "labels": text} for text in texts]


def main() -> float:
    torch.manual_seed(0)
    train_set, test_set = make_texts(2000), make_texts(200)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    lora = LoraConfig(
        task_type="CAUSAL_LM", r=8, target_modules="all-linear", modules_to_save=["lm_head"], fan_in_fan_out=True
    )
    model = get_peft_model(GPT2LMHeadModel(config), lora)
    adapters = [p for p in model.parameters() if p.requires_grad]
    trainer = PrivateTrainer(
        model,
        TrainingArguments("gpt2-private", per_device_train_batch_size=100, gradient_accumulation_steps=2, max_steps=40,
                          max_grad_norm=1.0, logging_steps=20, report_to=[], disable_tqdm=True, use_cpu=True),
        train_dataset=train_set, eval_dataset=test_set, target_epsilon=8.0, delta=1e-4,
        optimizers=(IVON(adapters, lr=1.0, ess=len(train_set)), None),
    )  # fmt: skip
    before = math.exp(trainer.evaluate()["eval_loss"])
    trainer.train()
    perplexity = math.exp(trainer.evaluate()["eval_loss"])
    trainer.save_model("gpt2-private")  # the adapters, and posterior.safetensors beside them
    print(f"epsilon = {trainer.epsilon:.2f}, perplexity {perplexity:.2f}, before {before:.2f}")

    texts = torch.stack([text["input_ids"] for text in test_set])
    prompts = {"input_ids": texts[:, :4], "attention_mask": torch.ones_like(texts[:, :4])}
    answers = model.generate(**prompts, max_new_tokens=LENGTH - 4, do_sample=False, eos_token_id=None)
    accuracy = float((answers[:, 4:] == texts[:, 4:]).float().mean())
    _, information = token_uncertainty(model, trainer.posterior(), {"input_ids": answers})
    print(f"generated words: accuracy {accuracy:.2f}, mutual information per word {information[:, 3:-1].mean():.4f}")
    return perplexity


if __name__ == "__main__":
    main()
