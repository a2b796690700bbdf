"""``dpivon train`` and ``dpivon predict``: from one's own data to a private model, and from a published model to predictions.

    config.py     YAML and flags → one validated Config               networks.py  which network, by public sizes
    loop.py       the private loop, kept by Checkpoints                run.py       a run from configuration to RUN folder
    published.py  the folder model/ that may be given away             artefacts.py the other files of RUN
    commands.py   what people type                                     display.py   what they see
    earlier.py    a run that starts from an earlier one, and its cost
    last_layer.py a run on a prior's features

How data is read and encoded is :mod:`dpivon.sources`. Nothing reads a statistic off the data: preprocessing and network depend
on what was declared, on names of columns and on shapes of arrays, which no row changes.
"""

from dpivon.train.config import Config, resolve
from dpivon.train.published import Published, load
from dpivon.train.run import train

__all__ = ["Config", "Published", "load", "resolve", "train"]
