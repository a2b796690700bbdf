"""Image data sets from their official files, checked against what they should hold, and scikit-learn's digits."""

from dpivon.data.cifar10 import load_cifar10
from dpivon.data.fashion_mnist import load_fashion_mnist
from dpivon.data.images import MEAN, STD, DataSet, Images, digest, load_digits, normalised, tuning_split

__all__ = [
    "MEAN",
    "STD",
    "DataSet",
    "Images",
    "digest",
    "load_cifar10",
    "load_digits",
    "load_fashion_mnist",
    "normalised",
    "tuning_split",
]
