"""Studies on a Ray cluster. Nothing here is imported unless ``--engine ray`` asks for it; pip install 'dpivon[ray]'.

engine.py    the driver: hands stacks out, begins again what is lost, and alone writes the tables
attempt.py   a worker: one attempt at one stack
desk.py      what workers tell the driver, and the ledgers of those that do not see its folder
start.py     a cluster that is there, or one on this machine
"""
