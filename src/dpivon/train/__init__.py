"""``dpivon train`` and ``dpivon predict``: from one's own data to a private model, and from a published model to predictions.

    columns.py    a declared column, and what becomes of a cell        schema.py   the schema file, and how one is drafted
    sources/      tables, folders of images, arrays                    task.py     configuration → source
    networks.py   which network, by public sizes                       config.py   YAML and flags → one validated Config
    loop.py       the private loop, kept by Checkpoints                run.py      a run from configuration to RUN folder
    published.py  the folder model/ that may be given away             artefacts.py, statements.py  what RUN says of the run

Nothing here reads a statistic off the data: what preprocessing and network depend on is declared, or is a name of a column or
the shape of an array, which no row changes.
"""

from dpivon.train.config import Config, resolve
from dpivon.train.published import Published, load
from dpivon.train.run import train

__all__ = ["Config", "Published", "load", "resolve", "train"]
