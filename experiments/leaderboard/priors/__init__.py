"""Priors learned from random processes, and private training that starts from them."""
