"""The command lines of train_lm.py and train_distributed.py."""

import argparse
from pathlib import Path

LEARNING_RATES = {"adamw": (4e-3, 2e-4), "adam": (4e-3, 2e-4), "lion": (6e-4, 5e-5)}
"""By optimizer: a tuned rate, and the low one that --compare shows beside it."""

TRAJECTORY = ("optimizer", "rounding", "codec", "block_size", "lr", "steps", "batch", "seq", "width", "layers", "seed")
"""The options that every bit of a run depends on: a checkpoint is resumed only with the same ones."""

COMPARE = """train three arms from one initialisation on the same batches, at a tuned and at a low learning rate: FP32
(Optax's own optimizer, FP32 parameters and moments), BF16 nearest (parameters rounded to the nearest BF16; moments in
FP32, so that the rounding alone differs), and BF16 stochastic with 8-bit moments (--codec, --block-size). All compute
in the same dtype; only what is stored between steps differs. Prints a table a rate and draws the loss curves into PNG
(train_lm.png)"""


def parse(description: str | None, argv: list[str] | None) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    """Return the options of train_lm.py, checked, and the parser, to report later errors with."""
    parser = training_parser(description)
    parser.add_argument("--compare", nargs="?", const="train_lm.png", metavar="PNG", help=COMPARE)
    args = parser.parse_args(argv)
    check(args, parser)
    return args, parser


def training_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that every run has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(compare=None)
    add = parser.add_argument
    add("--data", metavar="FILE", help="text to train on (the Python standard library's source)")
    add("--optimizer", choices=list(LEARNING_RATES), default="adamw", help="the rule (adamw)")
    add("--rounding", choices=["stochastic", "nearest"], help="of the parameters, from FP32 to BF16 (stochastic)")
    codecs = ["offset", "offset_wide", "dynamic", "float32"]
    add("--codec", choices=codecs, default="offset", help="how the moments are stored (offset)")
    add("--block-size", type=int, default=256, metavar="N", help="moments that share a scale (256)")
    add("--lr", type=float, nargs="+", metavar="RATE", help="peak rate, or with --compare one or more (tuned ones)")
    add("--steps", type=int, default=400, metavar="N", help="training steps, which the schedule spans (400)")
    add("--batch", type=int, default=16, metavar="N", help="windows a step (16)")
    add("--seq", type=int, default=32, metavar="N", help="bytes a window (32)")
    add("--width", type=int, default=128, metavar="N", help="of the residual stream, a multiple of 32 (128)")
    add("--layers", type=int, default=2, metavar="N", help="transformer blocks (2)")
    add("--seed", type=int, default=0, metavar="N", help="of initial values, batches and rounding (0)")
    add("--checkpoint", metavar="DIR", help="folder for checkpoints, the last one at the end")
    add("--checkpoint-every", type=int, metavar="N", help="steps between checkpoints (100)")
    add("--resume", action="store_true", help="go on from the newest checkpoint in DIR, bit for bit")
    return parser


def check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Fill in what was left out; end with the parser's error where the options make no sense."""
    least = dict(steps=2, batch=1, seq=1, layers=1, seed=0, checkpoint_every=1)  # a step of warm-up, one of training
    for name, bound in least.items():
        value = getattr(args, name)
        if value is not None and value < bound:
            parser.error(f"--{name.replace('_', '-')} must be at least {bound}, got {value}")
    if args.width < 32 or args.width % 32:
        parser.error(f"--width must be a multiple of 32 (the width of a head), got {args.width}")
    if args.compare:
        if not Path(args.compare).parent.is_dir():
            parser.error(f"--compare {args.compare}: there is no folder {Path(args.compare).parent}")
        for name in ("rounding", "checkpoint", "resume"):
            if getattr(args, name):
                parser.error(f"--{name} has no meaning with --compare, which trains its own arms from the start")
    if not args.checkpoint:
        for name in ("checkpoint_every", "resume"):
            if getattr(args, name):
                parser.error(f"--{name.replace('_', '-')} needs --checkpoint DIR")
    if args.lr is None:
        args.lr = list(LEARNING_RATES[args.optimizer][: 2 if args.compare else 1])
    if len(args.lr) > 1 and not args.compare:
        parser.error(f"--lr takes one rate without --compare, got {len(args.lr)}")
    for rate in args.lr:
        if not 0 < rate < float("inf"):
            parser.error(f"--lr must be positive and finite, got {rate}")
    if len(set(args.lr)) < len(args.lr):
        parser.error("--lr names a rate twice")
    args.rounding = args.rounding or "stochastic"
    args.checkpoint_every = args.checkpoint_every or 100
