"""Forward passes of rows of parameters, in one of several ways that all say the same.

eager.py is the obvious way, and the only one on a CPU. kernels.py and compiled.py are fast on a GPU. choice.py holds them to
the eager one on pictures and rows of the stack at hand, and takes the first that agrees. way.py says what a way is.
"""
