"""Convolutional networks with GroupNorm, which normalises within one example, and an MLP."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from dpivon.errors import bad, check_whole
from dpivon.models.standardised import StandardisedConv2d


def _check_groups(groups: int, widths: Sequence[int]) -> int:
    groups = check_whole("groups", groups, "Use 8", at_least=1)
    for width in widths:
        if width < 1 or width % groups:
            raise bad("widths", tuple(widths), f"{width} is not a multiple of groups={groups}", "Change either")
    return groups


def conv_block(inputs: int, outputs: int, groups: int) -> nn.Sequential:
    """3×3 convolution, GroupNorm, ReLU, 2×2 max-pooling: half the side length."""
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(inputs, outputs, kernel_size=3, padding=1),
            norm=nn.GroupNorm(groups, outputs),
            relu=nn.ReLU(),
            pool=nn.MaxPool2d(2),
        )
    )


class PaperCNN(nn.Module):
    """The CIFAR-10 network of the DP-IVON-Gradsq paper: three convolutional blocks and two linear layers.

    With the defaults it has 357,258 parameters: 896 + 64 + 18,496 + 128 + 73,856 + 256 in the blocks,
    262,272 + 1,290 in the head.

    Args:
        in_channels: channels of the image.
        classes: how many logits come out.
        widths: output channels, one block each.
        hidden: units of the hidden linear layer.
        groups: groups of every GroupNorm; each width must be a multiple.
        image_size: side length of the square image; each block halves it.
    """

    def __init__(
        self,
        in_channels: int = 3,
        classes: int = 10,
        widths: Sequence[int] = (32, 64, 128),
        hidden: int = 128,
        groups: int = 8,
        image_size: int = 32,
    ) -> None:
        super().__init__()
        groups = _check_groups(groups, widths)
        side = image_size // 2 ** len(widths)
        if side < 1:
            problem = f"{len(widths)} blocks halve it to nothing"
            raise bad("image_size", image_size, problem, f"Use at least {2 ** len(widths)}, or fewer widths")
        channels = [in_channels, *widths]
        blocks = {
            f"block{i}": conv_block(inputs, outputs, groups)
            for i, (inputs, outputs) in enumerate(pairwise(channels), start=1)
        }
        self.features = nn.Sequential(OrderedDict(blocks))
        self.head = nn.Sequential(
            OrderedDict(
                flatten=nn.Flatten(),
                hidden=nn.Linear(channels[-1] * side**2, hidden),
                relu=nn.ReLU(),
                logits=nn.Linear(hidden, classes),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, classes] of images [B, in_channels, image_size, image_size]."""
        logits: Tensor = self.head(self.features(x))
        return logits


class SmallCNN(PaperCNN):
    """The same idea for 8×8 grey digits: two blocks of 16 and 32 channels, 9,354 parameters with the defaults."""

    def __init__(
        self,
        in_channels: int = 1,
        classes: int = 10,
        widths: Sequence[int] = (16, 32),
        hidden: int = 32,
        groups: int = 4,
        image_size: int = 8,
    ) -> None:
        super().__init__(in_channels, classes, widths, hidden, groups, image_size)


class CompactCNN(nn.Module):
    """Five convolutions and a linear layer for private training from scratch, 279,882 parameters with the defaults.

    Channels as in Tramèr and Boneh (2021), one stage per resolution: 32 at 32×32, twice 64 at 16×16, twice 128 at 8×8. Each
    convolution is followed by ReLU and then GroupNorm (De et al., 2022), and has a skip where it keeps its width. The mean over
    positions takes the place of a hidden layer, since noise grows with the number of weights.

    Args:
        in_channels: channels of the image.
        classes: logits that come out.
        widths: channels per stage; between stages 2×2 max-pooling halves the image.
        depths: convolutions in each stage; all but the first have a skip.
        groups: of every GroupNorm; each width must be a multiple.
        standardised: with True the convolutions' weights are standardised.
    """

    def __init__(
        self,
        in_channels: int = 3,
        classes: int = 10,
        widths: Sequence[int] = (32, 64, 128),
        depths: Sequence[int] = (1, 2, 2),
        groups: int = 16,
        standardised: bool = False,
    ) -> None:
        super().__init__()
        if len(depths) != len(widths) or any(depth < 1 for depth in depths):
            raise bad(
                "depths", tuple(depths), f"does not fit widths={tuple(widths)}", "Give one number per stage, at least 1"
            )
        groups = _check_groups(groups, widths)
        conv = StandardisedConv2d if standardised else nn.Conv2d
        stages: OrderedDict[str, nn.Module] = OrderedDict()
        for i, ((before, width), depth) in enumerate(
            zip(pairwise([in_channels, *widths]), depths, strict=True), start=1
        ):
            if i > 1:
                stages[f"pool{i}"] = nn.MaxPool2d(2)
            stages[f"stage{i}"] = nn.Sequential(
                Convolved(before, width, groups, conv),
                *(Skipped(width, groups, conv) for _ in range(depth - 1)),
            )
        self.features = nn.Sequential(stages)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, classes] of images [B, in_channels, height, width]."""
        logits: Tensor = self.head(self.features(x).mean((2, 3)))
        return logits


class Convolved(nn.Sequential):
    """3×3 convolution, ReLU, GroupNorm."""

    def __init__(self, before: int, width: int, groups: int, conv: type[nn.Conv2d]) -> None:
        super().__init__(
            OrderedDict(
                conv=conv(before, width, kernel_size=3, padding=1), relu=nn.ReLU(), norm=nn.GroupNorm(groups, width)
            )
        )


class Skipped(nn.Module):
    """x + Convolved(x)."""

    def __init__(self, width: int, groups: int, conv: type[nn.Conv2d]) -> None:
        super().__init__()
        self.inner = Convolved(width, width, groups, conv)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(x)
        return y


class MLP(nn.Module):
    """x → (Linear → ReLU) for each hidden width → Linear. Inputs of any shape [B, …] are flattened first.

    Args:
        inputs: numbers in one example, all dimensions multiplied.
        outputs: logits or means that come out.
        hidden: widths of the hidden layers; none makes it a linear model.
    """

    def __init__(self, inputs: int, outputs: int, hidden: Sequence[int] = (64,)) -> None:
        super().__init__()
        fix = "Pass how many units the layer has"
        widths = [check_whole("inputs", inputs, fix, at_least=1)]
        widths += [check_whole("hidden", width, fix, at_least=1) for width in hidden]
        layers: list[tuple[str, nn.Module]] = [("flatten", nn.Flatten())]
        for i, (before, after) in enumerate(pairwise(widths), start=1):
            layers += [(f"hidden{i}", nn.Linear(before, after)), (f"relu{i}", nn.ReLU())]
        layers.append(("outputs", nn.Linear(widths[-1], check_whole("outputs", outputs, fix, at_least=1))))
        self.layers = nn.Sequential(OrderedDict(layers))

    def forward(self, x: Tensor) -> Tensor:
        """[B, …] → [B, outputs]."""
        y: Tensor = self.layers(x)
        return y


class TableMLP(nn.Module):
    """x → 3x → (Linear → Tanh) for each hidden width → Linear, for columns that were scaled to [−1, 1].

    Columns with declared ranges have a standard deviation near 1/4, hence the 3. Without hidden layers it begins at zero.

    Args:
        inputs: columns.
        outputs: logits or means that come out.
        hidden: widths of the hidden layers; none makes it a linear model.
    """

    SCALE = 3.0

    def __init__(self, inputs: int, outputs: int, hidden: Sequence[int] = ()) -> None:
        super().__init__()
        fix = "Pass how many units the layer has"
        widths = [check_whole("inputs", inputs, fix, at_least=1)]
        widths += [check_whole("hidden", width, fix, at_least=1) for width in hidden]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.Tanh()]
        last = nn.Linear(widths[-1], check_whole("outputs", outputs, fix, at_least=1))
        if not layers:
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
        self.layers = nn.Sequential(*layers, last)

    def forward(self, x: Tensor) -> Tensor:
        """[B, columns] → [B, outputs]."""
        y: Tensor = self.layers(self.SCALE * x)
        return y


class OrdinalMLP(TableMLP):
    """Log-probabilities of ordered classes from one score s of a :class:`TableMLP`: P(y ≤ k) = σ(t_k − s), t increasing.

    It has one output to learn instead of one per class, and so less noise. Classes begin equally likely at s = 0.

    Args:
        inputs: columns.
        outputs: classes, in their order.
        hidden: widths of the hidden layers.
    """

    def __init__(self, inputs: int, outputs: int, hidden: Sequence[int] = ()) -> None:
        super().__init__(inputs, 1, hidden)
        self.cuts = nn.Linear(
            1, check_whole("outputs", outputs, "Use two ordered classes or more", at_least=2) - 1, False
        )
        even = torch.logit(torch.arange(1, outputs) / outputs)
        with torch.no_grad():
            self.cuts.weight.copy_(torch.cat([even[:1], even.diff().expm1().log()]).unsqueeze(1))

    def forward(self, x: Tensor) -> Tensor:
        """[B, columns] → [B, classes]: log(σ(a) − σ(b)) = log σ(a) + log σ(−b) + log(1 − exp(b − a))."""
        score = super().forward(x)
        raw = self.cuts(torch.ones_like(score))
        gaps = nn.functional.softplus(raw[:, 1:])
        cuts = torch.cat([raw[:, :1], gaps], 1).cumsum(1)
        below, above = nn.functional.logsigmoid(cuts - score), nn.functional.logsigmoid(score - cuts)
        inner = below[:, 1:] + above[:, :-1] + torch.log(-torch.expm1(-gaps))
        return torch.cat([below[:, :1], inner, above[:, -1:]], 1)
