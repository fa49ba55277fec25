"""`python -m flatshift` is the `flatshift` command."""

import os
import sys

if not sys.flags.safe_path and not os.path.samefile(  # noqa: PTH121 - pathlib may be theirs
    sys.path[0],
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),  # noqa: PTH100, PTH120
):
    del sys.path[0]  # the current directory, where a user's finetune.py or random.py is none of ours

from flatshift.cli import main

if __name__ == "__main__":
    main()
