"""A Hugging Face transformer fine-tuned privately with LoRA: a posterior over the adapters and the head, nothing downloaded.

The GPT-2 is made on the spot from a small configuration, with random weights, and frozen; ``peft`` adds the adapters. The
task is made up too: does a sequence hold more low than high tokens? Needs ``pip install 'dpivon[huggingface]'``.
"""

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2ForSequenceClassification

from dpivon import IVON, PrivacyEngine, predict

DELTA, EPOCHS, LENGTH, VOCABULARY = 1e-4, 8, 11, 25


def make_sequences(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(1, VOCABULARY, (count, LENGTH))
    return tokens, ((tokens <= VOCABULARY // 2).float().mean(1) > 0.5).long()  # half of them are


def make_model() -> torch.nn.Module:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, num_labels=2,
        pad_token_id=0, bos_token_id=0, eos_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    lora = LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=16, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    return get_peft_model(GPT2ForSequenceClassification(config), lora)


def main() -> float:
    torch.manual_seed(0)
    x, y = make_sequences(2400)
    train_set, test_x, test_y = TensorDataset(x[:2000], y[:2000]), x[2000:], y[2000:]
    model = make_model()
    adapters = [p for p in model.parameters() if p.requires_grad]
    engine = PrivacyEngine(generator=torch.default_generator)  # to be repeated, on made-up data; leave it out on yours
    private_model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=IVON(adapters, lr=1.0, ess=len(train_set)),
        data_loader=DataLoader(train_set, batch_size=200),
        target_epsilon=8.0,
        target_delta=DELTA,
        epochs=EPOCHS,
        max_grad_norm=1.0,
    )
    loss_fn = torch.nn.CrossEntropyLoss()
    engine.check(lambda model, batch: loss_fn(model(input_ids=batch[0]).logits, batch[1]))
    for _ in range(EPOCHS):
        for tokens, labels in loader:
            optimizer.zero_grad()
            with optimizer.sampled_params(train=True):
                loss_fn(private_model(input_ids=tokens).logits, labels).backward()
            optimizer.step()

    total = sum(p.numel() for p in model.parameters())
    print(
        f"trained {sum(p.numel() for p in adapters)} of {total} parameters, epsilon = {engine.get_epsilon(DELTA):.2f}"
    )
    prediction = predict(model, optimizer.posterior(), [{"input_ids": test_x}], samples=8)
    accuracy = float((prediction.label == test_y).float().mean())
    print(f"accuracy {accuracy:.2f}, mean mutual information {prediction.mutual_information.mean():.4f}")
    return accuracy


if __name__ == "__main__":
    main()
