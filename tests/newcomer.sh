#!/usr/bin/env bash
# A newcomer's first commands, from the built wheel to a published model of a table of their own, in an empty folder: `make newcomer`.
# The table is scikit-learn's breast cancer data; for the blanks of the drafted schema stands examples/patients.yaml.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$root/.venv/bin/python" -m build --wheel --outdir "$folder/wheel" "$root" > /dev/null
cd "$folder"
"$python" -m venv env
PATH="$folder/env/bin:$PATH"
began=$SECONDS
step() {
    echo
    echo "\$ $*"
    "$@"
    echo "[$((SECONDS - began)) s]"
}
# torch first, as its own page tells: which build is the machine's choice
pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" torch 2> /dev/null
step pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" "$folder"/wheel/*.whl 2> /dev/null
python -c "import sys; sys.path.insert(0, '$root/examples'); import train_patients; train_patients.write_tables()"
step dpivon train patients.csv --target diagnosis --write-schema patients.yaml
cp "$root/examples/patients.yaml" patients.yaml
step dpivon train patients.csv --schema patients.yaml --epsilon 3 --delta 1e-4 --dataset-size 400 --test new-patients.csv --out run
step dpivon predict run new-patients.csv --out predictions.csv
step dpivon report run
step dpivon export run --out published
step dpivon predict published new-patients.csv --out published.csv
cmp predictions.csv published.csv
ls run/report.html published/model-card.md
# A table as an office program saves it: semicolons, decimal commas, dates, an id, a rare class; then a number to predict.
python "$root/tests/newcomer_tables.py"
private="--epsilon 3 --delta 1e-5 --dataset-size 3000 --test new-admissions.csv"
sed 's/^decimal.*//' readmitted.yaml > points.yaml
if dpivon train admissions.csv --schema points.yaml $private --out refused; then exit 1; fi  # before any ε is spent
step dpivon train admissions.csv --schema readmitted.yaml $private --out readmitted
step dpivon train admissions.csv --schema readmitted.yaml --unit patient ${private/3000/1000} --prior yes=.1 --cost balanced --out patients
step dpivon export patients --out patients-published
step dpivon predict patients-published new-admissions.csv --out readmitted.csv
step dpivon train admissions.csv --schema days.yaml $private --out days
step dpivon predict days new-admissions.csv --out days.csv
head -n 2 readmitted.csv days.csv
cat > plain.py << 'END'
import torch
model = torch.export.load("patients-published/model.pt2").module()
print(model(torch.zeros(2, 10)))
END
step python plain.py
grep "Unit of privacy: one person" patients-published/model-card.md
