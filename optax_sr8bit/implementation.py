"""Which back end runs a step, and why."""

from optax_sr8bit_kernels.obstacle import triton_obstacle

IMPLEMENTATIONS = (None, "xla", "triton")


def select(asked: str | None) -> tuple[str, str]:
    """The back end for `implementation=asked`, and the reason in words.

    Returns:
      ("xla" or "triton", reason).

    Raises:
      NotImplementedError: where "triton" was asked for and cannot run here.
    """
    if asked == "xla":
        return "xla", "asked for"
    obstacle = triton_obstacle()
    if asked == "triton":
        if obstacle:
            raise NotImplementedError(f"implementation='triton': {obstacle}; pass implementation='xla' or None")
        return "triton", "asked for"
    if obstacle:
        return "xla", obstacle
    return "triton", "the fused kernel"
