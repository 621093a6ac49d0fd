"""Import the libraries that the project is compared with, while none of its files can be found.

The reason is that transformers looks for a package named kernels.
"""
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
path = sys.path[:]
ours = ROOT, ROOT / "tests", ROOT / "tests" / "help"
sys.path[:] = [folder for folder in path if Path(folder).resolve() not in ours]
import transformers.models.llama.modeling_llama  # noqa: E402, F401
import transformers.models.mixtral.modeling_mixtral  # noqa: E402, F401

sys.path[:] = path
