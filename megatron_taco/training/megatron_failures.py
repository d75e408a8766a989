"""Turns what Megatron's own checks raise into a message that names the user's keys."""

import ast
import re
import traceback
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Final

from megatron_taco.config.megatron_section import OWNED

FAILURES: Final = (
    AssertionError,
    ValueError,
    RuntimeError,
    KeyError,
    TypeError,
    ImportError,
    NotImplementedError,
    SystemExit,
)
"""What Megatron's checks of the arguments raise (`exit()` is among them)."""

_SCHEDULE: Final = re.compile(
    r"OptimizerParamScheduler: class input value (.+?) and checkpoint\s*value (.+?) for (.+?) "
    r"do not match"
)
_SCHEDULE_KEYS: Final = {
    "learning rate": ("lr", False),
    "minimum learning rate": ("min_lr", False),
    "warmup iterations": ("lr_warmup_iters / lr_warmup_fraction", True),
    "total number of iterations": ("lr_decay_iters / train_iters", True),
    "learning rate decay style": ("lr_decay_style", False),
    "start weight decay": ("weight_decay / start_weight_decay", False),
    "end weight decay": ("weight_decay / end_weight_decay", False),
    "total number of weight decay iterations": ("train_iters", True),
    "weight decay incr style": ("weight_decay_incr_style", False),
}
"""Keys behind what Megatron's learning-rate schedule compares; whether it counts in samples."""

_ARGUMENT: Final = re.compile(
    r"(\w+) value from checkpoint \((.*?)\) is not equal to the input argument value \((.*?)\)"
)
_CHECKPOINT_KEYS: Final = {
    "add_position_embedding": "model.position_embedding_type",
    "model_parallel_size": "megatron.tensor_model_parallel_size",
}
_SHAPE: Final = re.compile(
    r"Global shape mismatch for loaded \((.*)\)\s*and expected \((.*)\) tensor for key (\S+)"
)

_FLAG: Final = re.compile(r"--([a-z0-9][a-z0-9_-]*)")
_WORD: Final = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)+")


def explain(
    error: BaseException, keys: Mapping[str, str], known: Container[str]
) -> tuple[str | None, str]:
    """Return (key, message) for an exception raised by one of Megatron's checks.

    Args:
        error: The exception, with its traceback.
        keys: The user's dotted key by Megatron's name of the argument, for those that are set.
        known: Names of all of Megatron's arguments.

    Returns:
        The first of the user's keys that the check speaks of (None if it speaks of none), and
        Megatron's own message, or the condition itself where Megatron gives no message.
    """
    statement, condition = _where(error)
    text = "" if isinstance(error, SystemExit) else " ".join(str(error).split())
    named = list(
        dict.fromkeys(
            [
                *_names_in_text(text, keys),
                *_names_in_code(statement),
                *_names_in_code(condition),
            ]
        )
    )
    given = list(dict.fromkeys(keys[name] for name in named if name in keys))
    others = given[1:] or [f"megatron.{name}" for name in named if name in known][: not given]
    mentioned = f" (see also {', '.join(others)})" if others else ""
    message = f"Megatron refuses it: {_message(error, text, statement, condition)}{mentioned}"
    return (given[0] if given else None), message


def describe_known(error: BaseException) -> str | None:
    """Return what an error of Megatron's loop means and which key to change, if it is known.

    Known are the ways in which a checkpoint does not fit the configuration that resumes it: the
    learning-rate schedule (`OptimizerParamScheduler.load_state_dict`), arguments of the
    architecture (`check_checkpoint_args`) and shapes of tensors (distributed checkpointing).

    Returns:
        One sentence, or None for any other error.
    """
    text = " ".join(str(error).split())
    if found := _SCHEDULE.search(text):
        here, there, what = found.groups()
        keys, in_samples = _SCHEDULE_KEYS.get(what, ("lr_decay_iters / train_iters", False))
        unit = " samples (iterations x global_batch_size)" if in_samples else ""
        return (
            f"megatron.load: the checkpoint was trained on another schedule: {what} is "
            f"{there}{unit} there and {here} here; set the same megatron.{keys} as there, or "
            "megatron.override_opt_param_scheduler: true to go on with the schedule set here, or "
            "megatron.use_checkpoint_opt_param_scheduler: true for the checkpoint's"
        )
    if found := _ARGUMENT.search(text):
        name, there, here = found.groups()
        key = _CHECKPOINT_KEYS.get(name) or OWNED.get(name, f"megatron.{name}")
        return (
            f"{key}: the checkpoint of megatron.load was written with {name} {there}, here it is "
            f"{here}; set {there}, or load another checkpoint"
        )
    if found := _SHAPE.search(text):
        there, here, tensor = found.groups()
        return (
            f"megatron.load: the tensor {tensor} has the shape {there} in the checkpoint and "
            f"{here} here; set the sizes of the section model (and data.tokenizer) with which it "
            "was written, or load another checkpoint"
        )
    return None


def _message(
    error: BaseException, text: str, statement: ast.stmt | None, condition: ast.expr | None
) -> str:
    if isinstance(error, KeyError):
        return f"{text} is not one of the allowed names"
    if text:
        return text
    if isinstance(statement, ast.Assert):
        return f"the condition `{ast.unparse(statement.test)}` does not hold"
    if condition is not None:
        return f"it stops where `{ast.unparse(condition)}`"
    return f"{type(error).__name__} while checking the arguments"


def _names_in_text(text: str, keys: Mapping[str, str]) -> Iterator[str]:
    """Yield names that a message spells as a flag, as a name, or in words."""
    for match in _FLAG.finditer(text):
        yield match.group(1).rstrip("-_").replace("-", "_")
    for match in _WORD.finditer(text):
        yield match.group(0)
    words = text.lower().replace("-", " ").replace("_", " ")
    for name in keys:
        if "_" in name and name.replace("_", " ") in words:
            yield name


def _names_in_code(tree: ast.AST | None) -> Iterator[str]:
    """Yield NAME for every `args.NAME` (`self.NAME` in a configuration class)."""
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        if node.value.id in ("args", "self"):
            yield node.attr


def _where(error: BaseException) -> tuple[ast.stmt | None, ast.expr | None]:
    """Return the statement of Megatron's source that raised, and the `if` it stands under.

    Each is None if it cannot be found.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/megatron/" in Path(frame.filename).as_posix() and frame.lineno is not None
    ]
    if not frames or not Path(frames[-1].filename).is_file():
        return None, None
    line = frames[-1].lineno or 0
    tree = ast.parse(Path(frames[-1].filename).read_text(encoding="utf-8"))
    around = sorted(
        (node for node in ast.walk(tree) if isinstance(node, ast.stmt) and _holds(node, line)),
        key=lambda node: (node.end_lineno or node.lineno) - node.lineno,
    )
    condition = next((node.test for node in around[1:] if isinstance(node, ast.If)), None)
    return (around[0] if around else None), condition


def _holds(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)
