"""`dpivon train` on a hospital's table: scikit-learn's breast cancer data as CSV files, with public ranges in patients.yaml.

The three commands below are what one types; this script only writes the tables first.
"""

import csv
import json
from pathlib import Path

import numpy as np
from sklearn.datasets import load_breast_cancer

from dpivon.cli import app

SCHEMA = Path(__file__).with_name("patients.yaml")
TRAIN = 419  # rows; the hospital says "about 400", and that is all that becomes public


def write_tables() -> None:
    data = load_breast_cancer()
    order = np.random.default_rng(0).permutation(len(data.data))
    for name, rows in (("patients.csv", order[:TRAIN]), ("new-patients.csv", order[TRAIN:])):
        with open(name, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*data.feature_names, "diagnosis"])
            for i in rows:
                writer.writerow([*data.data[i].tolist(), data.target_names[data.target[i]]])


def dpivon(command: str) -> None:
    print(f"$ dpivon {command}", flush=True)
    app(command.split(), standalone_mode=False)


def main() -> None:
    write_tables()
    dpivon(
        f"train patients.csv --schema {SCHEMA} --epsilon 3 --delta 1e-4 --dataset-size 400 "
        "--test new-patients.csv --out patients-run"
    )
    dpivon("predict patients-run/model new-patients.csv --out predictions.csv")
    dpivon("ledger show patients-run --delta 1e-4")
    summary = json.loads(Path("patients-run/summary.json").read_text(encoding="utf-8"))
    print(f"epsilon = {summary['epsilon']:.2f}, accuracy on the others {summary['metrics']['mc_accuracy']:.2f}")


if __name__ == "__main__":
    main()
