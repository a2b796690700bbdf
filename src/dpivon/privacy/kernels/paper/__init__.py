"""The paper's CNN for any number of runs at once, in Triton kernels of its own."""
