"""What an optimizer's parameters are called in a posterior."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from dpivon.errors import bad
from dpivon.posterior import unwrap


def parameter_names(optimizer: Optimizer, model: nn.Module | None) -> dict[Tensor, str]:
    """As in ``model``, or as in ``named_parameters()`` if the optimizer was made from them, otherwise by position."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if model is not None:
        names: dict[Tensor, str] = {p: name for name, p in unwrap(model).named_parameters()}
        missing = [i for i, p in enumerate(params) if p.requires_grad and p not in names]
        if missing:
            raise bad(
                "model",
                type(model).__name__,
                f"does not contain the optimizer's parameter number {missing[0]}",
                "Pass the model whose parameters the optimizer was given",
            )
        return names
    if all("param_names" in group for group in optimizer.param_groups):
        return {
            p: name
            for group in optimizer.param_groups
            for p, name in zip(group["params"], group["param_names"], strict=True)
        }
    trained = [p for p in params if p.requires_grad]
    return {p: str(i) for i, p in enumerate(trained)}
