"""Small networks that are ready for private training: no layer mixes examples."""

from dpivon.models.cnn import MLP, PaperCNN, SmallCNN

__all__ = ["MLP", "PaperCNN", "SmallCNN"]
