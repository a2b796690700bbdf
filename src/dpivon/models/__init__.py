"""Small networks that are ready for private training: no layer mixes examples."""

from dpivon.models.cnn import MLP, PaperCNN, SmallCNN
from dpivon.models.compact import CompactCNN
from dpivon.models.standardised import StandardisedConv2d
from dpivon.models.transformer import TextEncoder, VisionTransformer
from dpivon.models.wrn import WideResNet

__all__ = [
    "MLP",
    "CompactCNN",
    "PaperCNN",
    "SmallCNN",
    "StandardisedConv2d",
    "TextEncoder",
    "VisionTransformer",
    "WideResNet",
]
