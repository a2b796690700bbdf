"""Small transformers: a vision transformer and a text encoder, from stock PyTorch layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _encoder(width: int, heads: int, depth: int, dropout: float) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


class VisionTransformer(nn.Module):
    """ViT (Dosovitskiy et al., 2021) for small images.

    Args:
        image_size: height and width; a multiple of ``patch``.
        patch: height and width of a patch.
        width: of the tokens.
        heads: of the attention.
        depth: encoder layers.
        classes: logits that come out.
        in_channels: of the images.
        dropout: share of units dropped in training.
    """

    def __init__(
        self,
        image_size: int = 32,
        patch: int = 4,
        width: int = 128,
        heads: int = 4,
        depth: int = 4,
        classes: int = 10,
        in_channels: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(in_channels, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, (image_size // patch) ** 2 + 1, width))
        self.encoder = _encoder(width, heads, depth, dropout)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.head(self.norm(self.encoder(x)[:, 0]))


class TextEncoder(nn.Module):
    """Token embedding, positions, a transformer encoder, and a classifier on the mean of its outputs.

    Args:
        vocabulary: how many tokens there are; public, like the tokens themselves.
        length: the longest text, in tokens.
        width: of the embeddings.
        heads: of the attention.
        depth: encoder layers.
        classes: logits that come out.
        dropout: share of units dropped in training.
    """

    def __init__(
        self,
        vocabulary: int = 5000,
        length: int = 64,
        width: int = 128,
        heads: int = 4,
        depth: int = 2,
        classes: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(1, length, width))
        self.encoder = _encoder(width, heads, depth, dropout)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[:, : tokens.shape[1]]
        return self.head(self.norm(self.encoder(x).mean(1)))
