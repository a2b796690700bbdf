"""The numbers of the documentation that come from scikit-learn's digits."""
