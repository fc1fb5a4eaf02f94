"""Orbax checkpoints of parameters, optimizer state and the settings that made them."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """The checkpoints of one run, in one folder. Close it: Orbax writes in the background.

    Raises:
        ValueError: to be resumed, the folder has no checkpoint, or one of a run with other settings; to be begun, it
            already has some.
    """

    def __init__(self, folder: str, settings: dict[str, Any], resume: bool):
        path = Path(folder).resolve()  # Orbax takes no relative path
        if path.exists() and not path.is_dir():
            raise ValueError(f"--checkpoint {folder} is a file, not a folder")
        if resume and not path.exists():
            raise ValueError(f"--resume: no checkpoint in {folder}, which does not exist")
        self.settings = settings
        self.manager = ocp.CheckpointManager(path)
        if resume:
            problem = self.mismatch()
        else:
            problem = self.manager.all_steps() and "it already holds a run: add --resume, or choose another folder"
        if problem:
            self.close()
            raise ValueError(f"{'--resume' if resume else '--checkpoint'} {folder}: {problem}")

    def mismatch(self) -> str:
        """Return why the run cannot be resumed from here, or an empty string."""
        newest = self.manager.latest_step()
        if newest is None:
            return "no checkpoint in this folder is complete: begin without --resume"
        saved = self.manager.restore(newest, args=ocp.args.Composite(settings=ocp.args.JsonRestore()))["settings"]
        names = [*self.settings, *(name for name in saved if name not in self.settings)]
        changed = [name for name in names if saved.get(name) != self.settings.get(name)]
        return "; ".join(f"{name} was {saved.get(name)}, is {self.settings.get(name)}" for name in changed)

    def close(self) -> None:
        """Wait for the last write."""
        self.manager.close()

    def save(self, steps: int, params: Any, state: Any) -> None:
        """Write what `steps` training steps have made."""
        train = ocp.args.StandardSave({"params": params, "state": state})
        self.manager.save(steps, args=ocp.args.Composite(train=train, settings=ocp.args.JsonSave(self.settings)))

    def restore(self, params: Any, state: Any) -> tuple[int, Any, Any]:
        """Return (steps, params, state) of the newest checkpoint, shaped, typed and placed like the given ones."""
        steps = max(self.manager.all_steps())
        # Without this tree Orbax would return plain dicts in place of NNX's and the optimizer's own types.
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, {"params": params, "state": state})
        train = self.manager.restore(steps, args=ocp.args.Composite(train=ocp.args.StandardRestore(like)))["train"]
        return steps, train["params"], train["state"]
