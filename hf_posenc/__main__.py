"""`python -m hf_posenc`: the command line, with the package's model types registered first."""

from __future__ import annotations

import hf_posenc  # noqa: F401  registers the posenc model types
from hf_posenc.cli import main

if __name__ == "__main__":
    main()
