"""SDPO, Self-Distilled Policy Optimization (arXiv 2601.20802), on top of TRL's GRPOTrainer."""

from typing import TYPE_CHECKING, Any

from .divergence import feedback_reverse_kl
from .feedback import select_feedback

if TYPE_CHECKING:
    from .config import SDPOConfig
    from .trainer import SDPOTrainer

__version__ = "0.1.0"
__all__ = ["SDPOConfig", "SDPOTrainer", "feedback_reverse_kl", "select_feedback"]


def __getattr__(name: str) -> Any:
    """The kernel needs torch alone; TRL is imported when the trainer is asked for."""
    if name == "SDPOConfig":
        from .config import SDPOConfig

        return SDPOConfig
    if name == "SDPOTrainer":
        from .trainer import SDPOTrainer

        return SDPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
