"""Entry point of `python -m mindspeed_lite`, the command `mindspeed-lite`."""

import sys

from mindspeed_lite.cli import main

if __name__ == "__main__":
    sys.exit(main())
