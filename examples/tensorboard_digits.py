"""ε, σ and diagnostics of a private run in TensorBoard: ``tensorboard --logdir runs``. With ``--mlflow`` in MLflow instead.

Needs ``pip install 'dpivon[tensorboard]'`` or ``pip install 'dpivon[mlflow]'``.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from dpivon import IVON, PrivacyEngine, predict
from dpivon.integrations.tracking import mlflow_log, tensorboard_log
from dpivon.models import SmallCNN

DELTA, EPOCHS = 1e-4, 5


def main(mlflow: bool = False) -> float:
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    model = SmallCNN()
    engine = PrivacyEngine(generator=torch.default_generator)  # to be repeated, on public data; leave it out on yours
    private_model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=IVON(model.parameters(), lr=1.0, ess=1400),
        data_loader=DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=200),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    engine.check(torch.nn.functional.cross_entropy)
    log = (
        mlflow_log(optimizer, engine, delta=DELTA)
        if mlflow
        else tensorboard_log(optimizer, engine, "runs", delta=DELTA)
    )
    with log:
        for _ in range(EPOCHS):
            for images, labels in loader:
                optimizer.zero_grad()
                with optimizer.sampled_params(train=True):
                    torch.nn.functional.cross_entropy(private_model(images), labels).backward()
                optimizer.step()
                log.observe()
        prediction = predict(model, optimizer.posterior(), x[1400:])
        accuracy = float((prediction.label == y[1400:]).float().mean())
        log.public("test_accuracy", accuracy)
    print(f"epsilon = {engine.get_epsilon(DELTA):.2f}, accuracy {accuracy:.2f}")
    return accuracy


if __name__ == "__main__":
    main(mlflow="--mlflow" in sys.argv)
