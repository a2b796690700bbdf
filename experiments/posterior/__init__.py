"""What is a private posterior worth? Predictors made of the same trained runs, compared within each run."""
