"""From a study's YAML file to a plan: every run by its numbers."""
