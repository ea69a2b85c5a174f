"""Tasks that grade themselves: programs run in a sandbox, answers read and compared, failures turned into feedback.

Imports the core and is imported by nothing in it; what is heavy is imported when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .code_data import code_row, load_code, own_problems
    from .code_reward import CodeReward
    from .graders import ChoiceReward, ToolUseReward
    from .llm_feedback import LLMFeedback
    from .math_grader import MathReward
    from .pool import SandboxPool
    from .program import Limits, Program, Run
    from .sandbox import Sandbox, SandboxError, SandboxUnavailable

_HOME = {
    "code_row": "code_data", "load_code": "code_data", "own_problems": "code_data",
    "CodeReward": "code_reward",
    "ChoiceReward": "graders", "MathReward": "math_grader", "ToolUseReward": "graders",
    "LLMFeedback": "llm_feedback",
    "SandboxPool": "pool",
    "Limits": "program", "Program": "program", "Run": "program", "Sandbox": "sandbox",
    "SandboxError": "sandbox", "SandboxUnavailable": "sandbox",
}  # fmt: skip
__all__ = [
    "ChoiceReward", "CodeReward", "LLMFeedback", "Limits", "MathReward", "Program", "Run", "Sandbox", "SandboxError",
    "SandboxPool", "SandboxUnavailable", "ToolUseReward", "code_row", "load_code", "own_problems",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Each name is imported with its module when it is asked for: graders need no sandbox, the sandbox no datasets."""
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
