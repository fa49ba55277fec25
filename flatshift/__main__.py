"""`python -m flatshift` is the `flatshift` command."""

import os
import sys

_OURS = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))  # noqa: PTH120 - a pathlib.py may be theirs
if not sys.flags.safe_path and os.path.realpath(sys.path[0]) != _OURS:
    del sys.path[0]  # the current directory, where a user's finetune.py or random.py is none of ours

from flatshift.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
