"""States of one optimizer, codec or library continued by another."""

from optax_sr8bit.checkpoint.bitsandbytes import (
    from_bitsandbytes as from_bitsandbytes,
    to_bitsandbytes as to_bitsandbytes,
)
from optax_sr8bit.checkpoint.conversion import convert as convert
