"""Tests run on one thread: small models gain nothing from more, and lose much on a busy machine."""

import torch

torch.set_num_threads(1)
