"""From a model's config.json to the backends of its layers, with every reason."""

from .errors import ModelConfigError
from .layers import ExplainedLayer, explain_models
from .model_config import ModelConfig

__all__ = ["ExplainedLayer", "ModelConfig", "ModelConfigError", "explain_models"]
