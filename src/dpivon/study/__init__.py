"""Studies: grids of private runs, declared in YAML, run in stacks, continued wherever they were stopped.

``plan``, ``runner`` and what they import need torch, numpy and safetensors alone (besides the library itself), so that
a plan resolved on one machine runs on a bare one; YAML is read in ``config``, images are drawn in ``figures``.
"""
