"""The libraries' own bars and notices, kept out of what a command prints."""

from __future__ import annotations

import os


def quieten() -> None:
    """Silences transformers and datasets, unless OPD_DEBUG asks for everything."""
    if os.environ.get("OPD_DEBUG", "") not in ("", "0"):
        return
    import datasets
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
