"""A private classifier on a hospital's table, in a scikit-learn pipeline.

What scikit-learn would read off the rows is stated instead: the range of each measurement and the two diagnoses.
"""

import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from dpivon.integrations.sklearn import DPIVONClassifier

# Largest values that the measurements can sensibly take: radius, texture, perimeter, area, … as mean, error and worst.
MEAN = [30, 40, 200, 2600, 0.2, 0.4, 0.5, 0.25, 0.4, 0.1]
ERROR = [3, 5, 25, 600, 0.04, 0.2, 0.4, 0.06, 0.1, 0.03]
WORST = [40, 50, 260, 4300, 0.25, 1.1, 1.3, 0.3, 0.7, 0.25]
HIGH = np.array(MEAN + ERROR + WORST)


def main() -> float:
    x, y = load_breast_cancer(return_X_y=True)
    x, test_x, y, test_y = train_test_split(x, y, test_size=150, random_state=0)
    classifier = DPIVONClassifier(
        epsilon=8.0,
        delta=1e-4,
        classes=[0, 1],
        bounds=(0.0, np.sqrt(HIGH)),
        hidden=(16,),
        batch_size=64,
        epochs=30,
        lr=0.5,
    )
    # The square root looks at one value at a time. A StandardScaler here would look at all rows, without any noise.
    pipeline = make_pipeline(FunctionTransformer(np.sqrt), classifier).fit(x, y)
    accuracy = pipeline.score(test_x, test_y)
    print(
        f"epsilon = {classifier.epsilon_:.2f} at delta = {classifier.delta}, accuracy on {len(test_y)} others {accuracy:.2f}"
    )
    confidence = pipeline.predict_proba(test_x).max(axis=1)
    right = pipeline.predict(test_x) == test_y
    sure = confidence >= np.median(confidence)
    print(f"of the surer half {right[sure].mean():.2f} are right, of the other {right[~sure].mean():.2f}")
    return float(accuracy)


if __name__ == "__main__":
    main()
