"""Tables as an office program saves them, for `make newcomer`: semicolons, decimal commas, dates, patients, gaps.

`python newcomer_tables.py` writes admissions.csv and new-admissions.csv, with a schema for the class and one for the number.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

COLUMNS = """\
source: the limits of the admission form
id: case
delimiter: ';'
decimal: ','
columns:
  age: {min: 18, max: 100}
  crp: {min: 0, max: 300}
  ward: {categories: [north, south]}
  admitted: {min: 2020-01-01, max: 2024-12-31, format: '%d.%m.%Y'}
"""
READMITTED = "target: readmitted\nclasses: ['yes', 'no']\nignore: [days, patient]\n"
DAYS = "task: regression\ntarget: days\ntarget_bounds: {min: 0, max: 40}\nignore: [readmitted, patient]\n"


def rows(n: int, seed: int) -> list[str]:
    """One line per admission, three of each patient; one in eight is readmitted."""
    draw = np.random.default_rng(seed)
    age, crp, since = draw.uniform(18, 100, n), draw.gamma(2.0, 30.0, n), draw.integers(0, 1826, n)
    ward = draw.choice(["north", "south"], n)
    risk = (age - 60) / 15 + (crp - 60) / 40 + (ward == "south") + draw.normal(0, 1, n)
    readmitted = risk > 3.2
    days = np.clip(4 + 0.15 * (age - 18) + crp / 20 + draw.normal(0, 2, n), 0, 40)
    dates = np.datetime64("2020-01-01") + since
    out = ["case;patient;age;crp;ward;admitted;readmitted;days"]
    for i in range(n):
        day = dates[i].item().strftime("%d.%m.%Y")
        cells = [
            f"{age[i]:.1f}",
            f"{crp[i]:.1f}" if i % 9 else "",
            str(ward[i]),
            day,
            ["no", "yes"][int(readmitted[i])],
        ]
        numbers = [cell if j > 1 else cell.replace(".", ",") for j, cell in enumerate(cells)]
        out.append(";".join([f"c{seed}-{i}", f"p{seed}-{i // 3}", *numbers, f"{days[i]:.1f}".replace(".", ",")]))
    return out


def main() -> None:
    for name, n, seed in (("admissions.csv", 3000, 0), ("new-admissions.csv", 1000, 1)):
        Path(name).write_text("\n".join(rows(n, seed)) + "\n", encoding="utf-8")
    Path("readmitted.yaml").write_text(READMITTED + COLUMNS, encoding="utf-8")
    Path("days.yaml").write_text(DAYS + COLUMNS, encoding="utf-8")


if __name__ == "__main__":
    main()
