"""Reports: one HTML file about a run or a study, for who answers for the data and for who uses the model.

It reads the files that are meant to be read (``run_folder.py``, ``study_folder.py``) and nothing else of the folder: never a
checkpoint, a training example, a seed or the state of a generator.
"""

from dpivon.report.writer import Built, build, write

__all__ = ["Built", "build", "write"]
