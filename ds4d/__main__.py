"""``python -m ds4d`` is ``ds4d``."""

import sys

from ds4d.cli import main

sys.exit(main())
