"""Studies: grids of private runs, declared in YAML, run in stacks, continued wherever they were stopped.

``plan/`` goes from YAML to every run by its numbers, ``run/`` from there to rows, ``results/`` from rows to what people read;
``cluster/`` runs stacks on Ray. Running needs torch, numpy and safetensors alone: YAML and pydantic are needed in
``plan/config.py`` only, which also reads a user's own data.
"""
