"""Studies on a Ray cluster. Nothing here is imported unless ``--engine ray`` asks for it; pip install 'dpivon[ray]'.

engine.py    the driver: finds or starts a cluster, hands stacks out, restarts lost ones, and alone writes the tables
attempt.py   a worker: one attempt at one stack
desk.py      what workers report to the driver, and the ledgers of those that do not see its folder
"""
