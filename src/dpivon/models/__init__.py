"""Small networks that are ready for private training: no layer mixes examples."""

from dpivon.models.cnn import MLP, CompactCNN, OrdinalMLP, PaperCNN, SmallCNN, TableMLP
from dpivon.models.networks import NETWORKS, check_network, network
from dpivon.models.standardised import StandardisedConv2d
from dpivon.models.transformer import TextEncoder, VisionTransformer
from dpivon.models.wrn import WideResNet

__all__ = [
    "MLP",
    "NETWORKS",
    "CompactCNN",
    "OrdinalMLP",
    "PaperCNN",
    "SmallCNN",
    "StandardisedConv2d",
    "TableMLP",
    "TextEncoder",
    "VisionTransformer",
    "WideResNet",
    "check_network",
    "network",
]
