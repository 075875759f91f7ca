"""What every command shares: errors as one line, a quiet screen, two consoles."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from contextlib import AbstractContextManager
from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from hf_posenc.errors import PosencError

_NOISY = ("transformers", "torch", "peft", "accelerate", "datasets", "huggingface_hub", "lm_eval",
          "lm-eval", "matplotlib", "filelock", "fsspec", "urllib3", "absl")  # fmt: skip

_INTERRUPTED = 130  # what typer makes of Ctrl-C, in versions that do not raise Abort
# typer carries click inside it or depends on it, by version; its base class is the same in both.
_USAGE_ERROR: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)


class PosencGroup(TyperGroup):
    """The group of all commands: bad input is one line on stderr and exit code 2.

    HF_POSENC_DEBUG=1 lets exceptions, warnings and logs through.
    """

    def main(self, args: Any = None, *, standalone_mode: bool = True, **extra: Any) -> Any:  # type: ignore[override]
        args = (sys.argv[1:] if args is None else args) or ["--help"]
        if not standalone_mode or debugging():
            return super().main(args, standalone_mode=standalone_mode, **extra)
        quiet()
        try:
            code = super().main(args, standalone_mode=False, **extra)
        except (PosencError, _USAGE_ERROR) as error:
            _fail(_one_line(error), 2)
        except typer.Abort:
            code = _INTERRUPTED
        except BrokenPipeError:
            # The reader of the pipe has gone; keep Python from flushing to it once more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except OSError as error:
            _fail(_one_line(error), 2)
        if code == _INTERRUPTED:
            _fail("interrupted; `run` and `heal` go on from here when called again", code)
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    cls=PosencGroup,
    name="hf-posenc",
    help="Give a pretrained decoder another positional encoding, heal it, score it, share it.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def screen() -> Console:
    """Where results go: stdout."""
    return Console(highlight=False)


def say(text: str) -> None:
    """A line for the person at the screen: stderr, never read as markup."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)


def waiting(text: str) -> AbstractContextManager[object]:
    """A spinner on stderr while the block works; nothing where no one watches."""
    return Console(stderr=True).status(Text(text))


def debugging() -> bool:
    """Whether HF_POSENC_DEBUG asks for tracebacks, warnings and logs."""
    return os.environ.get("HF_POSENC_DEBUG", "") not in ("", "0")


def quiet() -> None:
    """Keep warnings, logs and bars of the libraries underneath off the screen."""
    warnings.filterwarnings("ignore")
    for name, value in {
        "TOKENIZERS_PARALLELISM": "false",
        "LMEVAL_LOG_LEVEL": "ERROR",
        "DATASETS_VERBOSITY": "error",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }.items():
        os.environ.setdefault(name, value)
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()


def _one_line(error: BaseException) -> str:
    text = error.format_message() if hasattr(error, "format_message") else str(error)
    text = " ".join(text.split()) or type(error).__name__
    context = getattr(error, "ctx", None)
    if context is None:
        return text
    return f"{text.rstrip('.')} (see `{context.command_path} --help`)"


def _fail(message: str, code: int) -> None:
    print(f"hf-posenc: {message}", file=sys.stderr)
    sys.exit(code)
