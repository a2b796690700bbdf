"""``python -m dpivon`` is the command ``dpivon``."""

from dpivon.cli import main

if __name__ == "__main__":
    main()
