"""hf_posenc: run a pretrained decoder with another positional encoding.

Importing the package registers the `posenc_<family>` model types with transformers and nothing
else; no class or function of transformers is changed.
"""

from hf_posenc.calibration import Calibration, calibrate
from hf_posenc.checkpoint.adapter import load_adapter, save_adapter
from hf_posenc.checkpoint.io import load_model
from hf_posenc.checkpoint.stream import convert_checkpoint
from hf_posenc.errors import PosencError
from hf_posenc.model_spec import ModelSpec
from hf_posenc.plan import LayerPlan, PositionPlan
from hf_posenc.runtime.auto import register_families
from hf_posenc.runtime.patch import get_plan, patch_model, unpatch_model, unpatched
from hf_posenc.schemes import list_schemes, make_scheme

__version__ = "0.1.0"
__all__ = [
    "Calibration",
    "LayerPlan",
    "ModelSpec",
    "PosencError",
    "PositionPlan",
    "calibrate",
    "convert_checkpoint",
    "get_plan",
    "list_schemes",
    "load_adapter",
    "load_model",
    "make_scheme",
    "patch_model",
    "save_adapter",
    "unpatch_model",
    "unpatched",
]

register_families()
