"""A LightningModule trained privately: one callback more. Needs ``pip install 'dpivon[lightning]'``."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from dpivon import IVON, predict
from dpivon.integrations.lightning import PrivateTraining
from dpivon.models import SmallCNN


class Digits(pl.LightningModule):
    def __init__(self, examples: int) -> None:
        super().__init__()
        self.net, self.examples = SmallCNN(), examples

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)  # logging it would show private data: the callback would warn

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return IVON(self.parameters(), lr=1.0, ess=self.examples)


def main() -> float:
    pl.seed_everything(0, verbose=False)  # seeds the first weights; batches and noise have generators of their own
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    module = Digits(examples=1400)
    private = PrivateTraining(target_epsilon=8.0, delta=1e-4, max_grad_norm=1.0)
    trainer = pl.Trainer(
        max_epochs=8, accelerator="cpu", callbacks=[private], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=200))
    accuracy = float((predict(module, private.posterior(), x[1400:]).label == y[1400:]).float().mean())
    print(f"epsilon = {private.epsilon:.2f}, accuracy {accuracy:.2f}")
    return accuracy


if __name__ == "__main__":
    main()
