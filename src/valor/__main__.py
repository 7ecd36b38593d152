"""`python -m valor …` is `valor …`."""

import sys

from valor.cli import main

sys.exit(main())
