"""A small convolutional network for private training from scratch, after what has helped most in the literature."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from dpivon.errors import bad, check_whole
from dpivon.models.standardised import StandardisedConv2d


class CompactCNN(nn.Module):
    """Five convolutions and a linear layer, 279,882 parameters with the defaults.

    32 channels at 32×32, twice 64 at 16×16, twice 128 at 8×8, the mean over positions, logits. What was chosen, and why:

    - *Activation before normalisation*: convolution, ReLU, GroupNorm. Moving the norm behind the activation is worth about
      six points at ε = 8 (De et al., 2022). GroupNorm mixes no examples.
    - *The widths of Tramèr and Boneh (2021)*: 32, 64, 128. Their network convolves twice at 32×32 too; here it is once, since
      the second costs a quarter of all operations and doubles the largest activations. Low resolution does not keep a
      network from the accuracies that privacy allows: scattering features of 8×8 positions reach 69 % at ε = 3.
    - *A skip around every convolution that keeps its width.* It costs nothing, and a private run has few steps.
    - *Averaging over positions in place of a hidden layer* of 262,272 weights, nearly half of the usual small network: noise
      grows with the number of weights, and what a picture shows may be anywhere after a crop.
    - *Weights are not standardised* unless asked for: pulling gradients back example by example costs a small network more
      time than its convolutions.

    None of this is shown to pay: on CIFAR-10 at ε = 3 and 7.5 it is 3.5 to 6 points behind :class:`PaperCNN`, with two views a
    picture and one seed ("Small networks with views" in docs/strong-privacy.md).

    Args:
        in_channels: channels of the picture.
        classes: logits that come out.
        widths: channels, one stage each; between stages 2×2 max-pooling halves the picture.
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
        groups = check_whole("groups", groups, "Use 16", at_least=1)
        if len(depths) != len(widths) or any(depth < 1 for depth in depths):
            raise bad(
                "depths", tuple(depths), f"does not fit widths={tuple(widths)}", "Give one number a stage, at least 1"
            )
        for width in widths:
            if width < 1 or width % groups:
                raise bad("widths", tuple(widths), f"{width} is not a multiple of groups={groups}", "Change either")
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
        """Logits [B, classes] of pictures [B, in_channels, height, width]."""
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
    """The same beside the identity."""

    def __init__(self, width: int, groups: int, conv: type[nn.Conv2d]) -> None:
        super().__init__()
        self.inner = Convolved(width, width, groups, conv)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(x)
        return y
