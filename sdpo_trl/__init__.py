"""SDPO, Self-Distilled Policy Optimization (arXiv 2601.20802), on top of TRL's GRPOTrainer."""

from .config import SDPOConfig
from .divergence import feedback_reverse_kl
from .feedback import select_feedback
from .trainer import SDPOTrainer

__version__ = "0.1.0"
__all__ = ["SDPOConfig", "SDPOTrainer", "feedback_reverse_kl", "select_feedback"]
