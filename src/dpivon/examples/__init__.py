"""Programs to start from, as they are or as a template: ``python -m dpivon.examples.…``."""
