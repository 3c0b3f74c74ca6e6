"""`python -m mindspeed_lite` is the command `mindspeed-lite`; torchrun takes it as `-m mindspeed_lite`."""

import sys

from mindspeed_lite.cli import main

if __name__ == "__main__":
    sys.exit(main())
