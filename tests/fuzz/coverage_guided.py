"""One reader of files under atheris: ``python tests/fuzz/coverage_guided.py posterior 30 folder``, for thirty seconds.

Python's own coverage guides it, from the valid file on. What came of it is in counts.json in the folder.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parent))
with atheris.instrument_imports(
    include=[
        "dpivon.data",
        "dpivon.durable",
        "dpivon.posterior",
        "dpivon.durable.tensors",
        "dpivon.study",
        "pickle",
    ]
):
    from fuzz_readers import READERS, attempt


def main() -> None:
    name, seconds, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    reader = READERS[name]
    corpus = folder / "corpus"
    corpus.mkdir()
    (corpus / "valid").write_bytes(reader.valid())
    counts: Counter[str] = Counter()

    def one(content: bytes) -> None:
        counts[attempt(reader, content, folder)] += 1
        if sum(counts.values()) % 50 == 0:  # libFuzzer leaves without a goodbye
            (folder / "counts.json").write_text(json.dumps(counts))

    options = [f"-max_total_time={seconds}", "-rss_limit_mb=4096", "-timeout=20", f"-artifact_prefix={folder}/"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
