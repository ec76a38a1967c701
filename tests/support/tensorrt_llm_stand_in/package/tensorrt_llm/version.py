"""The version that the stand-in plays."""

import os

__version__ = os.environ.get("TENSORRT_LLM_STAND_IN", "1.3.0rc24")
IS_1_3 = not __version__.startswith("1.2")
