"""Reports: one HTML file about a run or a study, for the data owner and for the users of the model.

A run's report opens the files named in ``run_folder.READ`` and nothing else of the folder: never a checkpoint, a training
example, a seed or the state of a generator.
"""

from dpivon.report.writer import Built, build, write

__all__ = ["Built", "build", "write"]
