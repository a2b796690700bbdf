"""Studies: grids of private runs, declared in YAML, run in stacks, continued wherever they were stopped.

``plan/`` goes from YAML to every run by its numbers, ``run/`` from there to rows, ``results/`` from rows to what people read;
``cluster/`` runs stacks on Ray. Running needs torch, numpy and safetensors alone: YAML is read in ``plan/config.py`` only,
and pydantic is needed for a user's own data (``plan/own_data.py``).
"""
